"""Reads srun's messages, the only record of how ranks ended: which failed first, and whether SLURM ended them all."""

from __future__ import annotations

import re
from pathlib import Path

from mgpu_slurm.job.attempt import Ending, describe_exit
from mgpu_slurm.request.spec import TERMINATED_EXIT_CODE

_TASK_FAILURE = re.compile(
    r"^srun: error: (?P<nodes>\S+): task(?P<several>s?) (?P<ranks>\S+): (?P<how>.+)$", re.MULTILINE
)

# from srun's source: messages for a step that SLURM ends, and for one that it could not start as a whole
_ABORT = re.compile(r"^srun: (?:Job step aborted|error: Node failure on)", re.MULTILINE)
_NO_LAUNCH = re.compile(
    r"^srun: error: (?:Application launch|Task launch for|timeout waiting for task launch)", re.MULTILINE
)

_OUT_OF_MEMORY = "Out Of Memory"

_COMPLAINT = re.compile(r"^srun: (?:error|fatal): .+$", re.MULTILINE)


class LaunchLog:
    """The part of srun's log written from now on; earlier starts of a job wrote to the same file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0

    def describe(self, ending: Ending) -> str:
        """Describe a failure by its first cause, as far as srun saw it."""
        return first_failure(self._added()) or describe_exit(ending)

    def begins_with_sigterm(self) -> bool:
        """Return whether the first task that failed had been terminated; after a failure the others always are."""
        match = _first_failed_task(self._added())
        return match is not None and match["how"] in ("Terminated", f"Exited with exit code {TERMINATED_EXIT_CODE}")

    def tells_of_an_abort(self) -> bool:
        """Return whether SLURM ended the ranks, as when it ends the job, and not because one of them failed."""
        added = self._added()
        abort = _ABORT.search(added)
        return abort is not None and _NO_LAUNCH.search(added, endpos=abort.start()) is None

    def tells_of_too_little_memory(self) -> bool:
        """Return whether a task was killed because it exceeded its memory."""
        match = _first_failed_task(self._added())
        return match is not None and match["how"] == _OUT_OF_MEMORY

    def _added(self) -> str:
        added = self._path.read_bytes()[self._position :] if self._path.exists() else b""
        return added.decode(errors="replace")


def first_failure(launch_log: str) -> str | None:
    """Return which task failed first and how, or why srun could not start the tasks; None if srun reports neither.

    srun's exit code is only the highest of all tasks.
    """
    match = _first_failed_task(launch_log)
    if match is None:
        complaint = _COMPLAINT.search(launch_log)
        return None if complaint is None else complaint[0]
    who = f"rank{match['several']} {match['ranks']} on {match['nodes']}"
    exited = re.fullmatch(r"Exited with exit code (\d+)", match["how"])
    return f"{who}: {match['how']}" if exited is None else describe_exit(Ending(int(exited[1]), who))


def _first_failed_task(launch_log: str) -> re.Match[str] | None:
    """Return srun's message about the first task that failed; None if there is none.

    A task out of memory counts as the first: it never fails after the others, but srun may report them earlier.
    """
    found = list(_TASK_FAILURE.finditer(launch_log))
    return min(found, key=lambda match: match["how"] != _OUT_OF_MEMORY, default=None)
