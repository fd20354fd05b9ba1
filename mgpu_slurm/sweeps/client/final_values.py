"""The values of a trial whose job has returned, from what the job returned and reported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mgpu_slurm.core.errors import suggestion
from mgpu_slurm.sweeps.client.trial import WorkerTrial
from mgpu_slurm.sweeps.search.sweep import Sweep


@dataclass(frozen=True)
class FinalValues:
    """The last value of each metric, and whether they are enough."""

    metrics: dict[str, float]
    returned: dict[str, float]
    """Those that the job returned."""
    fails: str = ""
    """Why the trial fails, if it does."""
    prunes: str = ""
    """Why it counts as pruned, if it does."""


def final_values(
    own: WorkerTrial,
    sweep: Sweep,
    result: Mapping[str, float],
    last_metrics: Mapping[str, float],
    has_trained: bool,
) -> FinalValues:
    """Return the values of a trial.

    Args:
        result: what the job returned.
        last_metrics: the last value of each metric that it reported in this attempt.
        has_trained: as for `StudyClient.complete`.
    """
    returned = dict(result)
    if list(returned) == ["value"] and len(sweep.objectives) == 1:
        # a job function that returns one number returns the metric
        returned = {sweep.metric: returned["value"]}
    reported = {**last_metrics, **own.metrics}
    if own.last_value is not None and own.seeds is None:
        reported[sweep.metric] = own.last_value
    found = reported | returned if has_trained else returned | reported
    names = [each.metric for each in sweep.objectives]
    lacks = next((name for name in [*names, *own.unknown_constraints(found)] if name not in found), None)
    if lacks is not None:
        return FinalValues(
            found, returned, fails=f"the job never reported or returned the metric {missing(lacks, found)}"
        )
    infinite = next((name for name in names if not math.isfinite(found[name])), None)
    prunes = "" if infinite is None else f"{infinite} is {found[infinite]}"
    return FinalValues(found, {name: found[name] for name in returned}, prunes=prunes)


def missing(metric: str, metrics: Mapping[str, float]) -> str:
    """Return the name of a metric that is missing, and what there is instead, for people."""
    names = sorted(metrics)
    reported = f"; it reports {', '.join(names)}" if names else "; it reports nothing"
    return f"{metric!r}{suggestion(metric, names) or reported}"
