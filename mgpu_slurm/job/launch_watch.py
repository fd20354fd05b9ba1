"""Detects that SLURM does not start a job's ranks.

SLURM 22.05 may allocate a node that has just failed and then start nothing on it: srun waits for it until the time
limit, and reports it only after minutes.
"""

from __future__ import annotations

import math

from mgpu_slurm.core import records, states
from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.core.retry import OwnTime
from mgpu_slurm.job.attempt import Ending
from mgpu_slurm.job.srun_log import LaunchLog
from mgpu_slurm.slurm import jobs, steps

PATIENCE = 60.0
"""Seconds without a sign of the ranks after which SLURM is asked for their step; also the interval afterwards."""

AGAIN_AFTER = 30.0
"""Seconds after which SLURM is asked again if there is no step: srun may be about to retry, for example after an outage
of the controller."""


class LaunchWatch:
    """Watches the launch of one attempt. Created before its srun starts."""

    def __init__(self, folder: RunFolder, job_id: str, log: LaunchLog) -> None:
        self._folder = folder
        self._job_id = job_id
        self._log = log
        self._time = OwnTime()
        self._waited = 0.0
        self._ask_at = PATIENCE
        self._had_none = False
        self._is_in_vain = False

    def describe(self, ending: Ending) -> str:
        """Describe a failure by its first cause, as far as it is visible here."""
        if self._is_in_vain:
            return f"srun waited for {self._waited:.0f} s, and SLURM did not start the ranks' step"
        return self._log.describe(ending)

    def is_in_vain(self) -> bool:
        """Return whether waiting for the ranks is pointless. Must be called every second; it may query SLURM."""
        if self._is_in_vain:
            return True
        self._waited += self._time.passed()
        if self._waited >= self._ask_at:
            if self._has_started():
                self._ask_at = math.inf
            else:
                has_none = self._has_no_step()
                self._is_in_vain = has_none and self._had_none
                self._had_none = has_none
                self._ask_at = self._waited + (AGAIN_AFTER if has_none else PATIENCE)
        return self._is_in_vain

    def _has_started(self) -> bool:
        return self._folder.rank_log(records.attempts_started(self._folder), 0).exists()

    def _has_no_step(self) -> bool:
        """Return whether the job is running without any step, not even one that its ranks may have to wait for."""
        job = (jobs.queued([self._job_id]) or {}).get(self._job_id)
        # a reason: nodes that are still booting, or the site's prolog; srun waits rightly for both
        if job is None or job.state != states.RUNNING or job.reason:
            return False
        try:
            return not steps.steps(self._job_id)
        except ClusterError:
            return False
