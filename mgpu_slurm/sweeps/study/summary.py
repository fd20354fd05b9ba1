"""How a sweep stands, as plain facts: for the file that `status` reads, and for those who ask the study itself."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from mgpu_slurm.core.files import write_whole
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.core.records import now
from mgpu_slurm.sweeps.optuna_adapter import FIXED_PARAMS
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep_file import Sweep
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.file_locks import locked

RECENT = 50
"""Trials that have ended last, of which `summary.json` tells one by one."""

_ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


def own_trials(study: Study) -> list[FrozenTrial]:
    """The study's trials but for those of another study that it started with."""
    return [trial for trial in study.get_trials(deepcopy=False) if studies.ORIGIN not in trial.system_attrs]


def ranked(trials: Iterable[FrozenTrial], direction: str) -> list[FrozenTrial]:
    """The complete trials, the best first; the earlier one of two that are equal."""
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    sign = -1 if direction == "maximize" else 1
    return sorted(complete, key=lambda trial: (sign * _value(trial), trial.number))


def best_of(trials: Iterable[FrozenTrial], direction: str) -> FrozenTrial | None:
    return next(iter(ranked(trials, direction)), None)


def _value(trial: FrozenTrial) -> float:
    assert trial.value is not None
    return trial.value


def counts(trials: Sequence[FrozenTrial], sweep: Sweep) -> dict[str, int]:
    """How many trials there are in each of Optuna's states; those that have not begun are waiting."""
    found = {state.name: 0 for state in TrialState}
    for trial in trials:
        found[trial.state.name] += 1
    found["WAITING"] += max(0, (sweep.trials or 0) - len(trials))
    return found


def summarize(study: Study, sweep: Sweep) -> dict[str, Any]:
    trials = own_trials(study)
    best = best_of(trials, sweep.direction)
    ended = [trial for trial in trials if trial.state in _ENDED and trial.datetime_complete is not None]
    ended.sort(key=lambda trial: (trial.datetime_complete, trial.number))
    over = studies.notes(study).get(studies.OVER)
    return {
        "study": sweep.study,
        "metric": sweep.metric,
        "direction": sweep.direction,
        "trials": counts(trials, sweep),
        "best": None if best is None else described(best, sweep),
        "known": [described(trial, sweep) for trial in trials if _is_known_point(trial, sweep)],
        "given_back": sum(map(studies.was_given_back, trials)),
        "over": over,
        "seconds": {"complete": _seconds(trials, TrialState.COMPLETE), "pruned": _seconds(trials, TrialState.PRUNED)},
        "recent": [described(trial, sweep) for trial in ended[-RECENT:]],
        "updated": now(),
    }


def write(folder: RunFolder, study: Study, sweep: Sweep) -> None:
    """Tells those who only read files; never older than what is there."""
    with locked(folder.summary_lock):
        # without indents, which take the slow way through the encoder
        write_whole(folder.summary, json.dumps(summarize(study, sweep)), sync=False)


def _is_known_point(trial: FrozenTrial, sweep: Sweep) -> bool:
    """Whether the sweep file gave its values."""
    return sweep.sampler.name != "grid" and bool(trial.system_attrs.get(FIXED_PARAMS)) and trial.value is not None


def described(trial: FrozenTrial, sweep: Sweep) -> dict[str, Any]:
    """A trial as facts for programs."""
    last = max(trial.intermediate_values, default=None)
    value = trial.value
    if value is None and last is not None:
        value = trial.intermediate_values[last]
    return {
        "number": trial.number,
        "state": trial.state.name,
        "value": value if value is None or math.isfinite(value) else None,
        "progress": last,
        "params": parameters(trial, sweep),
        "seconds": _length(trial),
        "reason": trial.system_attrs.get(studies.REASON, ""),
    }


def parameters(trial: FrozenTrial, sweep: Sweep) -> dict[str, Any]:
    """The trial's parameters as the job got them."""
    return sweep.space.restored(trial.params) if isinstance(sweep.space, Space) else dict(trial.params)


def _length(trial: FrozenTrial) -> float | None:
    """Seconds for which workers have had the trial."""
    if trial.datetime_start is None or trial.datetime_complete is None:
        return None
    before: float = trial.system_attrs.get(studies.SECONDS, 0.0)
    return before + (trial.datetime_complete - trial.datetime_start).total_seconds()


def _seconds(trials: Iterable[FrozenTrial], state: TrialState) -> list[float]:
    """How many trials have ended so, and how long they took together."""
    lengths = [_length(trial) or 0.0 for trial in trials if trial.state == state]
    return [len(lengths), sum(lengths)]
