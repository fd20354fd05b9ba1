"""Checks whether a sweep is over. They are made before each trial, so that running trials are finished."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timezone

from optuna.trial import FrozenTrial, TrialState

from mgpu_slurm.core import records
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.registry import lookup
from mgpu_slurm.sweeps.search.sweep_file import Sweep


def spent(trials: Sequence[FrozenTrial], sweep: Sweep) -> str | None:
    """Return why no more trials should start; None if another one may.

    Args:
        trials: trials of the study, without those copied from an earlier study.
    """
    budget = sweep.budget
    ended = [trial for trial in trials if trial.state == TrialState.COMPLETE and trial.value is not None]
    if budget.target is not None and any(
        _is_better(trial.value, budget.target, sweep, or_equal=True) for trial in ended
    ):
        return f"a trial has reached {sweep.metric} {budget.target:g}"
    if budget.patience is not None and since_best(trials, sweep) >= budget.patience:
        return f"none of {budget.patience} trials was better than the best before"
    return None


def spent_time(sweep: Sweep, folder: RunFolder, gpus: int) -> str | None:
    """Return why no more trials should start because of hours or GPU-hours; reads a file of each worker.

    Args:
        gpus: number of GPUs of each worker.
    """
    budget = sweep.budget
    if budget.hours is not None and (hours := hours_since_start(folder)) >= budget.hours:
        return f"{hours:.2f} of {budget.hours:g} hours are over"
    if budget.gpu_hours is not None and (used := worker_hours(folder) * gpus) >= budget.gpu_hours:
        return f"{used:.2f} of {budget.gpu_hours:g} GPU-hours are used"
    return None


def since_best(trials: Sequence[FrozenTrial], sweep: Sweep) -> int:
    """Return how many trials have ended since the best one, without failed ones."""
    ended = [trial for trial in trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    ended.sort(key=lambda trial: (trial.datetime_complete or datetime.max, trial.number))
    best = -math.inf if sweep.direction == "maximize" else math.inf
    since = 0
    for trial in ended:
        since += 1
        if trial.state == TrialState.COMPLETE and _is_better(trial.value, best, sweep):
            assert trial.value is not None
            best, since = trial.value, 0
    return since


def _is_better(value: float | None, than: float, sweep: Sweep, or_equal: bool = False) -> bool:
    assert value is not None
    if value == than:
        return or_equal
    return value > than if sweep.direction == "maximize" else value < than


def hours_since_start(folder: RunFolder) -> float:
    """Return the hours since the first worker started; 0 before that."""
    starts = [begun for member in lookup.members(folder) for begun, _ in records.spans(member)]
    return (datetime.now(timezone.utc) - min(starts)).total_seconds() / 3600 if starts else 0.0


def worker_hours(folder: RunFolder) -> float:
    """Return the hours for which workers have held their nodes, summed over all workers."""
    return sum(map(records.hours, lookup.members(folder)))
