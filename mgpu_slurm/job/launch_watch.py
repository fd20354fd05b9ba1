"""Whether SLURM starts a job's ranks at all.

SLURM 22.05 may give a job a node that was lost a moment ago, on which it then starts nothing: srun waits for it until
the time limit, and says so only after minutes.
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
"""Seconds without a sign of the ranks after which SLURM is asked for their step, again and again."""

AGAIN_AFTER = 30.0
"""Seconds after which it is asked once more where there is none: srun may be about to try again, as where the
controller was away."""


class LaunchWatch:
    """Of one attempt, from before its srun starts."""

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
        """Tells a failure by its first cause, as far as it is seen from here."""
        if self._is_in_vain:
            return f"srun waited for {self._waited:.0f} s, and SLURM did not start the ranks' step"
        return self._log.describe(ending)

    def is_in_vain(self) -> bool:
        """Whether waiting for the ranks makes no sense any more. To be asked every second; it may ask SLURM."""
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
        """Whether the job runs, and there is not even a step that its ranks may have to wait for."""
        job = (jobs.queued([self._job_id]) or {}).get(self._job_id)
        # a reason: nodes that still boot, or a prolog of the site's, for both of which srun waits rightly
        if job is None or job.state != states.RUNNING or job.reason:
            return False
        try:
            return not steps.steps(self._job_id)
        except ClusterError:
            return False
