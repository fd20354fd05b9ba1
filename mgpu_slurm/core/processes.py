"""Processes of this machine: who is who, who descends from whom, and ending all of a run.

Linux only: it reads `/proc` and sets process attributes by prctl(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

RUN_VARIABLE = "MGPU_RUN_FOLDER"
"""Every process of a run carries it, so that one which left its family is still found."""

TRIAL_VARIABLE = "MGPU_TRIAL_FOLDER"
"""Every process of a trial's command carries it, besides that of the worker."""

_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "busybox", "fish", "tcsh", "csh"})

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def die_with_parent(signum: int, parent: int) -> None:
    """This process gets the signal when its parent ends; at once where that has already happened."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process, not of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def started_at(pid: int) -> int | None:
    """Clock ticks since boot at which a living process started, None for a dead one.

    With the pid it identifies a process: pids are used again, a pair is not.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def is_alive(pid: int, start: int) -> bool:
    return started_at(pid) == start


def _stat(pid: int) -> list[str] | None:
    """The fields of proc(5)'s stat after the command name: state, parent, ..."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        # it has ended, or a site hides the processes of others
        return None
    return text.rpartition(")")[2].split()


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children() -> dict[int, list[int]]:
    """Return the living children of each process that has any, zombies left out."""
    found: dict[int, list[int]] = {}
    for pid in _all_pids():
        fields = _stat(pid)
        if fields is not None and fields[0] != "Z":
            found.setdefault(int(fields[1]), []).append(pid)
    return found


def tell(signum: int, roots: Iterable[int], below: Mapping[int, list[int]] | None = None) -> None:
    """Send a signal to processes and what is below them, so that each of them gets it once.

    To all, down to the first on each way that catches it: a training ends its own workers, and launchers such as
    torchrun and uv pass a signal on. A shell that catches one does not, and waits for its child first.

    Args:
        below: as `children` returns it.
    """
    known = children() if below is None else below
    for pid in roots:
        passes_on = _catches(pid, signum) and not _is_shell(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
        if not passes_on:
            tell(signum, known.get(pid, []), known)


def _catches(pid: int, signum: int) -> bool:
    with contextlib.suppress(OSError):
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (signum - 1) & 1)
    return False


def _is_shell(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() in _SHELLS
    return False


def descendants(ancestor: int) -> list[int]:
    """Living processes below `ancestor`, zombies left out."""
    below_each = children()
    found: list[int] = []
    frontier = [ancestor]
    while frontier:
        below = below_each.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def carrying(variable: str, folder: str) -> list[int]:
    """Processes of this user with the variable of a run or trial in the environment they started with."""
    needle = f"{variable}={folder}".encode()
    found = []
    for pid in _all_pids():
        with contextlib.suppress(OSError):
            if needle in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def end_all(run_folder: str, keep: set[int]) -> None:
    """Kills what descends from this process or carries the run's variable, until nothing is left but `keep`.

    Collects no child: its exit code is its parent's to hear.
    """
    while True:
        rest = (set(descendants(os.getpid())) | set(carrying(RUN_VARIABLE, run_folder))) - keep - {os.getpid()}
        rest = {pid for pid in rest if started_at(pid) is not None}
        if not rest:
            return
        for pid in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def reap() -> None:
    """Collects every child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def allow_many_files() -> None:
    """Raises the number of open files to what the system allows: each rank holds a connection to every other one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def oom_kills() -> int:
    """How many processes of this machine the kernel has killed for want of memory since it started, also within the
    limit of a cgroup; 0 where it does not count them."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def cores() -> int:
    """Cores this process may use (not those the machine has)."""
    return len(os.sched_getaffinity(0))
