"""What a sweep's trials say about its file: whether the first rung misleads, and whether a range is too narrow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from optuna.study import Study
from optuna.trial import FrozenTrial

from mgpu_slurm.sweeps.scheduling.construction import scheduler_of
from mgpu_slurm.sweeps.scheduling.halving import HEDGE_EVERY, Promotion
from mgpu_slurm.sweeps.search.parameters import Parameter, share_of_range
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import summary
from mgpu_slurm.sweeps.study.snapshots import Snapshots

FEWEST_HEDGED = 10
"""Number of hedged trials from which rungs are compared."""

BEST_SHARE, FEWEST_BEST = 0.1, 3
"""The best trials whose values are compared with the ends of ranges."""

EDGE = 0.05
"""Part of a range at each of its ends."""


def hints(study: Study, sweep: Sweep) -> list[str]:
    """Return advice for the next sweep, in lines for people."""
    return [*_rank_hints(study, sweep), *_range_hints(study, sweep)]


def _rank_hints(study: Study, sweep: Sweep) -> list[str]:
    """Return how well the first rung predicts the third, by the hedged trials, which are not selected there."""
    scheduler = scheduler_of(sweep.pruner, sweep.direction) if sweep.pruner.pauses else None
    if not isinstance(scheduler, Promotion):
        return []
    entries = Snapshots(study, scheduler).take(sweep.trials).entries.values()
    pairs = [
        (each.values[0], each.values[scheduler.first_rung(each.number)])
        for each in entries
        if scheduler.is_hedged(each.number) and each.has_arrived
    ]
    if len(pairs) < FEWEST_HEDGED:
        return []
    correlation = rank_correlation(pairs)
    low, high = interval_of_correlation(correlation, len(pairs))
    first, later = scheduler.rungs[0], scheduler.rungs[scheduler.first_rung(HEDGE_EVERY - 1)]
    told = (
        f"ranks at progress {first} and {later} correlate by {correlation:.2f} ({low:.2f} to {high:.2f}, {len(pairs)}"
        " hedged trials)"
    )
    if low > 0:
        return [told]
    return [f"{told}: progress {first} may mislead: raise min_resource"]


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Spearman's rank correlation; equal values share their mean rank."""
    ranks = [_ranks(column) for column in zip(*pairs, strict=True)]
    if any(len(set(column)) == 1 for column in ranks):
        return 0.0
    return float(np.corrcoef(np.array(ranks))[0][1])


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    places = {value: [place for place, each in enumerate(ordered) if each == value] for value in set(values)}
    return [sum(places[value]) / len(places[value]) for value in values]


def interval_of_correlation(correlation: float, count: int) -> tuple[float, float]:
    """Return the 95% interval of Spearman's correlation by Fisher's transformation, with the variance of Bonett and
    Wright (Psychometrika, 2000).

    Args:
        count: number of pairs, more than 3.
    """
    if abs(correlation) >= 1:
        return correlation, correlation
    center = math.atanh(correlation)
    width = 1.96 * math.sqrt((1 + correlation**2 / 2) / (count - 3))
    return math.tanh(center - width), math.tanh(center + width)


def _range_hints(study: Study, sweep: Sweep) -> list[str]:
    """Return which ranges end where the best values are."""
    if not isinstance(sweep.space, Space):
        return []
    ranked = summary.ranked(summary.own_trials(study), sweep)
    best = ranked[: max(FEWEST_BEST, math.ceil(len(ranked) * BEST_SHARE))]
    if len(ranked) < 2 * FEWEST_BEST:
        return []
    found = []
    for parameter in sweep.space.parameters:
        end = _end_of_best(parameter, best)
        if end is not None:
            found.append(f"the best values are at the {end} end of the range of {parameter.name}: widen it")
    return found


def _end_of_best(parameter: Parameter, best: Sequence[FrozenTrial]) -> str | None:
    """Return the end of a range, `lower` or `upper`, at which all of the best values are."""
    values = [trial.params[parameter.name] for trial in best if parameter.name in trial.params]
    places = [place for value in values if (place := share_of_range(parameter, value)) is not None]
    if len(places) < FEWEST_BEST:
        return None
    if max(places) <= EDGE:
        return "lower"
    return "upper" if min(places) >= 1 - EDGE else None
