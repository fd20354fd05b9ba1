"""Whether SLURM starts a job's ranks at all.

SLURM 22.05 may give a job a node that was lost a moment ago, on which it then starts nothing: srun waits for it until
the time limit, and says so only after minutes.
"""

from __future__ import annotations

import math
import time

from mgpu_slurm import records, slurm, states, steps
from mgpu_slurm.errors import ClusterError
from mgpu_slurm.paths import RunFolder
from mgpu_slurm.runtime.attempt import Ending
from mgpu_slurm.runtime.launch_log import LaunchLog

PATIENCE = 60.0
"""Seconds without a sign of the ranks after which SLURM is asked for their step, again and again."""


class LaunchWatch:
    """Of one attempt, from before its srun starts."""

    def __init__(self, folder: RunFolder, job_id: str, log: LaunchLog) -> None:
        self._folder = folder
        self._job_id = job_id
        self._log = log
        self._ask_at = time.monotonic() + PATIENCE
        self._is_in_vain = False

    def describe(self, ending: Ending) -> str:
        """Tells a failure by its first cause, as far as it is seen from here."""
        if self._is_in_vain:
            return f"srun waited for {PATIENCE:g} s, and SLURM did not start the ranks' step"
        return self._log.describe(ending)

    def is_in_vain(self) -> bool:
        """Whether waiting for the ranks makes no sense any more; may ask SLURM for that."""
        if time.monotonic() >= self._ask_at:
            has_started = self._has_started()
            self._is_in_vain = not has_started and self._is_held_up()
            self._ask_at = math.inf if has_started else time.monotonic() + PATIENCE
        return self._is_in_vain

    def _has_started(self) -> bool:
        return self._folder.rank_log(records.attempts_started(self._folder), 0).exists()

    def _is_held_up(self) -> bool:
        job = (slurm.queued([self._job_id]) or {}).get(self._job_id)
        # a reason: nodes that still boot, or a prolog of the site's, for both of which srun waits rightly
        if job is None or job.state != states.RUNNING or job.reason:
            return False
        try:
            return all(step.name != self._folder.group.run for step in steps.steps(self._job_id))
        except ClusterError:
            return False
