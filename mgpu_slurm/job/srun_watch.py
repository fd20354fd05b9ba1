"""Watch srun: its messages, the only record of how ranks ended, and whether it launches any.

SLURM 22.05 may allocate a node that has just failed and then start nothing on it: srun waits for it until the time
limit, and reports it only after minutes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from pathlib import Path

from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.core.hostlist import expand
from mgpu_slurm.core.retry import OwnTime
from mgpu_slurm.job.attempt import Ending, describe_exit
from mgpu_slurm.request.spec import TERMINATED_EXIT_CODE
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.slurm import jobs, steps

PATIENCE = 60.0
"""Seconds without a sign of the ranks after which SLURM is asked for their step; also the interval afterwards."""

AGAIN_AFTER = 30.0
"""Seconds after which SLURM is asked again if there is no step: srun may be about to retry, for example after an outage
of the controller."""

_TASK_FAILURE = re.compile(
    r"^srun: error: (?P<nodes>\S+): task(?P<several>s?) (?P<ranks>[\d,-]+): (?P<how>.+)$", re.MULTILINE
)

# from srun's source: messages for a step that SLURM ends, and for one that it could not start as a whole
_ABORT = re.compile(r"^srun: (?:Job step aborted|error: Node failure on)", re.MULTILINE)
_NO_LAUNCH = re.compile(
    r"^srun: error: (?:Application launch|Task launch for|timeout waiting for task launch)", re.MULTILINE
)

_OUT_OF_MEMORY = "Out Of Memory"

# but for the program that a node does not have, such as the runtime of a container
_SLURMS = re.compile(r"srun: |slurmstepd(?:-\S+)?: (?!error: execve\(\))")

_COMPLAINT = re.compile(r"^srun: (?:error|fatal): .+$", re.MULTILINE)


class LaunchLog:
    """The part of srun's log written from now on; earlier starts of a job wrote to the same file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0

    def describe(self, ending: Ending, followers: Collection[int] = ()) -> str:
        """Describe a failure by its first cause, as far as srun saw it.

        Args:
            followers: ranks that failed because another one had ended.
        """
        return first_failure(self._added(), followers) or describe_exit(ending)

    def last_words(self) -> str:
        """Return the last line that is not SLURM's own, such as why a container did not start; or ""."""
        lines = [line.strip() for line in self._added().splitlines()]
        others = [line for line in lines if line and not _SLURMS.match(line)]
        return others[-1] if others else ""

    def begins_with_sigterm(self) -> bool:
        """Return whether the first task that failed had been terminated; after a failure the others always are."""
        match = _first_failed_task(self._added())
        return match is not None and match["how"] in ("Terminated", f"Exited with exit code {TERMINATED_EXIT_CODE}")

    def reports_abort(self) -> bool:
        """Return whether SLURM ended the ranks, as when it ends the job, and not because one of them failed."""
        added = self._added()
        abort = _ABORT.search(added)
        return abort is not None and _NO_LAUNCH.search(added, endpos=abort.start()) is None

    def reports_out_of_memory(self) -> bool:
        """Return whether a task was killed because it exceeded its memory."""
        match = _first_failed_task(self._added())
        return match is not None and match["how"] == _OUT_OF_MEMORY

    def _added(self) -> str:
        added = self._path.read_bytes()[self._position :] if self._path.exists() else b""
        return added.decode(errors="replace")


def first_failure(launch_log: str, followers: Collection[int] = ()) -> str | None:
    """Return which task failed first and how, or why srun could not start the tasks; None if srun reports neither.

    srun's exit code is only the highest of all tasks.
    """
    match = _first_failed_task(launch_log, followers)
    if match is None:
        complaint = _COMPLAINT.search(launch_log)
        return None if complaint is None else complaint[0]
    who = f"rank{match['several']} {match['ranks']} on {match['nodes']}"
    exited = re.fullmatch(r"Exited with exit code (\d+)", match["how"])
    return f"{who}: {match['how']}" if exited is None else describe_exit(Ending(int(exited[1]), who))


def _first_failed_task(launch_log: str, followers: Collection[int] = ()) -> re.Match[str] | None:
    """Return srun's message about the first task that failed; None if there is none.

    A task out of memory counts as the first: it never fails after the others, but srun may report them earlier. With
    proctrack/cgroup, it may also report a task that was killed after those that failed because of that.
    """

    def place(match: re.Match[str]) -> tuple[bool, bool]:
        ranks = map(int, expand(f"[{match['ranks']}]"))
        return match["how"] != _OUT_OF_MEMORY, set(ranks) <= set(followers)

    return min(_TASK_FAILURE.finditer(launch_log), key=place, default=None)


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

    def describe(self, ending: Ending, followers: Collection[int]) -> str:
        """Describe a failure by its first cause, as far as it is visible here; see `LaunchLog.describe`."""
        if self._is_in_vain:
            return f"srun waited for {self._waited:.0f} s, and SLURM did not start the ranks' step"
        return self._log.describe(ending, followers)

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
