"""What srun says of the ranks, whose ends it alone has seen: who failed first, and whether SLURM ended them all."""

from __future__ import annotations

import re
from pathlib import Path

from mgpu_slurm.job.attempt import Ending, describe_exit
from mgpu_slurm.request.spec import TERMINATED_EXIT_CODE

_TASK_FAILURE = re.compile(
    r"^srun: error: (?P<nodes>\S+): task(?P<several>s?) (?P<ranks>\S+): (?P<how>.+)$", re.MULTILINE
)

# of srun's source: it says so of a step that SLURM ends, and of one that it could not start as a whole
_ABORT = re.compile(r"^srun: (?:Job step aborted|error: Node failure on)", re.MULTILINE)
_NO_LAUNCH = re.compile(
    r"^srun: error: (?:Application launch|Task launch for|timeout waiting for task launch)", re.MULTILINE
)

_OUT_OF_MEMORY = "Out Of Memory"

_COMPLAINT = re.compile(r"^srun: (?:error|fatal): .+$", re.MULTILINE)


class LaunchLog:
    """What srun adds to its log from now on; earlier starts of a job wrote to the same one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0

    def describe(self, ending: Ending) -> str:
        """Tells a failure by its first cause, as far as srun saw it."""
        return first_failure(self._added()) or describe_exit(ending)

    def begins_with_sigterm(self) -> bool:
        """Whether the first task that failed had been told to end; the others are, once one has failed."""
        match = _first_failed_task(self._added())
        return match is not None and match["how"] in ("Terminated", f"Exited with exit code {TERMINATED_EXIT_CODE}")

    def tells_of_an_abort(self) -> bool:
        """Whether SLURM ended the ranks, as it does with the job, and not because one of them failed."""
        added = self._added()
        abort = _ABORT.search(added)
        return abort is not None and _NO_LAUNCH.search(added, endpos=abort.start()) is None

    def tells_of_too_little_memory(self) -> bool:
        """Whether a task was ended because it took more memory than it had."""
        match = _first_failed_task(self._added())
        return match is not None and match["how"] == _OUT_OF_MEMORY

    def _added(self) -> str:
        added = self._path.read_bytes()[self._position :] if self._path.exists() else b""
        return added.decode(errors="replace")


def first_failure(launch_log: str) -> str | None:
    """Which task failed first and how, as srun says, whose exit code only tells the highest of all tasks; or why it
    could not start them."""
    match = _first_failed_task(launch_log)
    if match is None:
        complaint = _COMPLAINT.search(launch_log)
        return None if complaint is None else complaint[0]
    who = f"rank{match['several']} {match['ranks']} on {match['nodes']}"
    exited = re.fullmatch(r"Exited with exit code (\d+)", match["how"])
    return f"{who}: {match['how']}" if exited is None else describe_exit(Ending(int(exited[1]), who))


def _first_failed_task(launch_log: str) -> re.Match[str] | None:
    """What srun says of it. One that was out of memory comes first: the others never fail before it, but srun may hear
    of them before."""
    found = list(_TASK_FAILURE.finditer(launch_log))
    return min(found, key=lambda match: match["how"] != _OUT_OF_MEMORY, default=None)
