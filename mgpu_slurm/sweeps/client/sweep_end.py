"""The end of a sweep, when its budget is spent or its trials fail, and the removal of workers no longer needed.

Budgets are checked before each trial, so that running trials are finished.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timezone

from optuna.trial import FrozenTrial, TrialState

from mgpu_slurm.core import log_lines
from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.core.files import locked
from mgpu_slurm.registry import lookup
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.sweep_records import SweepOver
from mgpu_slurm.slurm import commands, job_identity
from mgpu_slurm.sweeps import confirmation
from mgpu_slurm.sweeps.client.worker_study import WorkerStudy
from mgpu_slurm.sweeps.scheduling.judged_values import is_feasible
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.search.sweep_options import Budget
from mgpu_slurm.sweeps.study import summary
from mgpu_slurm.sweeps.study import trial_queue as studies

HOURS_EVERY = 10.0
"""Seconds between two checks of a budget of hours."""


class SweepEnd:
    """One worker's check whether the sweep is over."""

    def __init__(self, shared: WorkerStudy, gpus: int) -> None:
        """
        Args:
            gpus: number of GPUs of one worker.
        """
        self._shared = shared
        self._gpus = gpus
        self._next_look_at_hours = time.monotonic()

    def why_over(self) -> SweepOver | None:
        """Return why no trial starts any more, or None; end the sweep if its budget is spent."""
        known = studies.why_over(self._shared.study)
        if known is not None:
            return known
        reason = self._spent()
        if reason is None:
            return None
        with locked(self._shared.folder.sweep_lock):
            if not self._shared.reread_sweep():
                return end_sweep(self._shared, reason, failed=False)
        # the budget may have been raised since
        return self.why_over()

    def when_all_tried(self) -> SweepOver | None:
        """End the sweep if the points of its space are all tried, and no trial runs; return whether it is over."""
        study, sweep = self._shared.study, self._shared.sweep
        with locked(self._shared.folder.trials_lock):
            if not studies.all_tried(study):
                return None
            if self._shared.is_busy() or summary.promotable(study, sweep, is_over=False):
                return None
            return end_sweep(self._shared, "all points of the space have been tried", failed=False)

    def _spent(self) -> str | None:
        sweep = self._shared.sweep
        if sweep.budget == Budget():
            return None
        reason = spent(self._shared.trials(), sweep)
        if reason is None and time.monotonic() >= self._next_look_at_hours:
            self._next_look_at_hours = time.monotonic() + HOURS_EVERY
            reason = spent_time(sweep, self._shared.sweep_folder, self._gpus, self._shared.trials())
        return reason


def end_sweep(shared: WorkerStudy, reason: str, failed: bool) -> SweepOver:
    """Mark the sweep as over, so that no more trials start."""
    over = SweepOver(reason=reason, failed=failed)
    studies.set_over(shared.study, over)
    log_lines.say(f"the sweep is over: {reason}")
    return over


def dismiss_waiting(shared: WorkerStudy) -> None:
    """Remove workers that have not started from SLURM's queue, if the study is over."""
    folder = shared.sweep_folder
    # read before what is left: a call that adds trials meanwhile submits new jobs
    job_ids = [each.job_id for each in records.submissions(folder) if each.job_id is not None]
    counts = summary.counts(shared.trials(), shared.sweep)
    is_over = studies.why_over(shared.study) is not None
    is_over = is_over or not (counts["WAITING"] or counts["RUNNING"])
    unstarted = [
        member
        for member in lookup.members(folder)
        if not records.attempts_started(member) and states.is_alive(records.read_state(member).state)
    ]
    if not (is_over and unstarted and job_ids):
        return
    try:
        others = {job_identity.array_id(job.job_id) for job in job_identity.foreign_jobs(folder, job_ids)}
        if own := [job_id for job_id in job_ids if job_id not in others]:
            commands.run(commands.scancel_waiting_command(own))
    except ClusterError as error:
        # they will start, and leave at once
        log_lines.say(f"cannot remove waiting workers from the queue: {error}")
        return
    for member in unstarted:
        records.cancel_unstarted(member, "nothing was left to do")


# -- budgets


def spent(trials: Sequence[FrozenTrial], sweep: Sweep) -> str | None:
    """Return why no more trials should start; None if another one may.

    Args:
        trials: trials of the study, without those copied from an earlier study.
    """
    budget = sweep.budget
    if budget.target is not None and _reached(summary.best_of(trials, sweep), budget.target, sweep):
        return f"a trial has reached {sweep.metric} {budget.target:g}"
    if budget.patience is not None and since_best(trials, sweep) >= budget.patience:
        return f"none of {budget.patience} trials was better than the best before"
    return None


def spent_time(sweep: Sweep, folder: RunFolder, gpus: int, trials: Sequence[FrozenTrial] = ()) -> str | None:
    """Return why no more trials should start because of hours or GPU-hours; reads a file of each worker.

    Args:
        gpus: number of GPUs of each worker.
        trials: as for `spent`.
    """
    budget = sweep.budget
    clock, summed = (seconds / 3600 for seconds in confirmation.seconds_needed(trials, sweep))
    rest = ", and the rest is for the confirmation" if summed else ""
    if budget.hours is not None:
        hours = hours_since_start(folder)
        if hours >= _for_the_search(budget.hours, clock):
            return f"{_amount(hours)} of {budget.hours:g} hours are over{rest}"
    if budget.gpu_hours is not None:
        used = worker_hours(folder) * gpus
        if used >= _for_the_search(budget.gpu_hours, summed * gpus / sweep.trials_per_worker):
            return f"{_amount(used)} of {budget.gpu_hours:g} GPU-hours are used{rest}"
    return None


def _amount(hours: float) -> str:
    return f"{hours:.2f}" if hours >= 1 else f"{hours:.3g}"


def _for_the_search(limit: float, confirmation: float) -> float:
    """Return the part of a budget that is for the search: at least half of it."""
    return max(limit - confirmation, limit / 2)


def since_best(trials: Sequence[FrozenTrial], sweep: Sweep) -> int:
    """Return how many trials have ended since the best one, without failed ones.

    If trials may pause, only complete ones count: most are pruned because others are better already.
    """
    counted = (TrialState.COMPLETE,) if sweep.pruner.pauses else (TrialState.COMPLETE, TrialState.PRUNED)
    ended = [trial for trial in trials if trial.state in counted]
    ended.sort(key=lambda trial: (trial.datetime_complete or datetime.max, trial.number))
    best: list[tuple[float, ...]] = []
    since = 0
    for trial in ended:
        since += 1
        if trial.state == TrialState.COMPLETE and is_feasible(trial):
            losses = summary.losses(trial, sweep)
            if not any(summary.covers(other, losses) for other in best):
                best = [other for other in best if not summary.covers(losses, other)] + [losses]
                since = 0
    return since


def _reached(best: FrozenTrial | None, target: float, sweep: Sweep) -> bool:
    aim = sweep.objectives[0]
    return best is not None and summary.losses(best, sweep)[0] <= aim.loss(target)


def hours_since_start(folder: RunFolder) -> float:
    """Return the hours since the first worker started; 0 before that."""
    starts = [begun for member in lookup.members(folder) for begun, _ in records.spans(member)]
    return (datetime.now(timezone.utc) - min(starts)).total_seconds() / 3600 if starts else 0.0


def worker_hours(folder: RunFolder) -> float:
    """Return the hours for which workers have held their nodes, summed over all workers."""
    return sum(map(records.hours, lookup.members(folder)))
