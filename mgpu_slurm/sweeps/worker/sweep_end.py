"""The end of a sweep, when its budget is spent or its trials fail, and the removal of workers no longer needed."""

from __future__ import annotations

import time

from mgpu_slurm.core import log_lines, records
from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.core.record_types import SweepOver
from mgpu_slurm.registry import lookup
from mgpu_slurm.slurm import commands, job_identity
from mgpu_slurm.sweeps.search import budget
from mgpu_slurm.sweeps.search.sweep_options import Budget
from mgpu_slurm.sweeps.study import summary
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.file_locks import locked
from mgpu_slurm.sweeps.worker.worker_study import WorkerStudy

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

    def _spent(self) -> str | None:
        sweep = self._shared.sweep
        if sweep.budget == Budget():
            return None
        reason = budget.spent(self._shared.trials(), sweep)
        if reason is None and time.monotonic() >= self._next_look_at_hours:
            self._next_look_at_hours = time.monotonic() + HOURS_EVERY
            reason = budget.spent_time(sweep, self._shared.sweep_folder, self._gpus)
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
    jobs = [each.job_id for each in records.submissions(folder) if each.job_id is not None]
    counts = summary.counts(shared.trials(), shared.sweep)
    is_over = studies.why_over(shared.study) is not None
    is_over = is_over or not (counts["WAITING"] or counts["RUNNING"])
    unstarted = [member for member in lookup.members(folder) if not records.attempts_started(member)]
    if not (is_over and unstarted and jobs):
        return
    try:
        others = {job_identity.whole(job.job_id) for job in job_identity.strangers(folder, jobs)}
        if own := [job_id for job_id in jobs if job_id not in others]:
            commands.run(commands.scancel_waiting_command(own))
    except ClusterError as error:
        # they will start, and leave at once
        log_lines.say(f"cannot remove waiting workers from the queue: {error}")
        return
    for member in unstarted:
        records.cancel_unstarted(member, "nothing was left to do")
