"""Identify processes of this machine, find their descendants, and end all processes of a run.

Linux only: reads `/proc` and sets process attributes with prctl(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from mgpu_slurm.core import cgroups, log_lines

RUN_VARIABLE = "MGPU_RUN_FOLDER"
"""Set in every process of a run, so that one which left the process tree is still found."""

TRIAL_VARIABLE = "MGPU_TRIAL_FOLDER"
"""Set in every process of a trial's command, in addition to the worker's variable."""

SINK_VARIABLE = "MGPU_SINK"
"""Set to the run's folder in the process that sends its reports to trackers, and in processes of their libraries."""

_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "busybox", "fish", "tcsh", "csh"})

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def die_with_parent(signum: int, parent: int) -> None:
    """Let this process receive a signal when its parent ends, or at once if that has already happened."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process, not of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def started_at(pid: int) -> int | None:
    """Return the start of a living process in clock ticks since boot; None for a dead one.

    Together with the pid it identifies a process: pids are reused, the pair is not.
    """
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def is_alive(pid: int, start: int) -> bool:
    return started_at(pid) == start


def _stat(pid: int) -> list[str] | None:
    """Return the fields of proc(5)'s stat after the command name: state, parent, ...; None for a dead process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        # it has ended, or a site hides the processes of others
        return None
    fields = text.rpartition(")")[2].split()
    # a zombie is the first thread: while others are left, files are still open, and written
    is_dead = fields[0] == "Z" and int(fields[17]) <= 1
    return None if is_dead else fields


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children() -> dict[int, list[int]]:
    """Return the living children of each process that has any."""
    found: dict[int, list[int]] = {}
    for pid in _all_pids():
        fields = _stat(pid)
        if fields is not None:
            found.setdefault(int(fields[1]), []).append(pid)
    return found


def tell(signum: int, roots: Iterable[int], below: Mapping[int, list[int]] | None = None) -> None:
    """Send a signal to processes and their descendants, so that each of them gets it once.

    On each branch it is sent down to the first process that catches it: a training ends its own workers, and launchers
    such as torchrun and uv forward a signal. A shell that catches one does not; it waits for its child first.

    Args:
        below: the result of `children`.
    """
    known = children() if below is None else below
    for pid in roots:
        passes_on = _catches(pid, signum) and not _is_shell(pid)
        # it may have ended, or be another user's
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)
        if not passes_on:
            tell(signum, known.get(pid, []), known)


def _catches(pid: int, signum: int) -> bool:
    return signum in _signals_of(pid, "SigCgt")


def _signals_of(pid: int, name: str) -> set[int]:
    """Return a set of signals from proc(5)'s status of a process; empty if that has ended."""
    with contextlib.suppress(OSError):
        found = re.search(rf"^{name}:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        if found is not None:
            return {signum for signum in signal.valid_signals() if int(found[1], 16) >> (signum - 1) & 1}
    return set()


def _is_shell(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() in _SHELLS
    return False


SPREAD_SECONDS = 0.2
"""Seconds within which SLURM signals all processes of a step that it signals."""


class SignalWitness:
    """Tells whether a signal to this process was sent to its children, too.

    SLURM sends signals to all processes of a step or, with proctrack/cgroup and without SignalChildrenProcesses, only
    to those that it has started itself (`proctrack_p_signal` in its source; it kills all of them). The witness is a
    child that blocks all signals, so that those that it was sent stay pending.
    """

    def __init__(self) -> None:
        parent = os.getpid()
        quiet = subprocess.DEVNULL
        self._process: subprocess.Popen[bytes] | None = None
        """None if no process can be started: nothing is passed on then."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                self._process = subprocess.Popen(
                    ["sleep", str(1 << 30)],
                    stdin=quiet,
                    stdout=quiet,
                    stderr=quiet,
                    preexec_fn=lambda: die_with_parent(signal.SIGKILL, parent),
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def has(self, signum: int) -> bool:
        """Return whether children were sent a signal that this process has just received; True if that is unknown."""
        time.sleep(SPREAD_SECONDS)
        if self._process is None or started_at(self._process.pid) is None:
            return True
        return signum in _signals_of(self._process.pid, "SigPnd") | _signals_of(self._process.pid, "ShdPnd")


def descendants(ancestor: int) -> list[int]:
    """Return the living processes below `ancestor`."""
    below_each = children()
    found: list[int] = []
    frontier = [ancestor]
    while frontier:
        below = below_each.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def seconds_computed() -> float:
    """Return the CPU seconds of this process and of all below it, those included that have ended."""
    found = map(_stat, descendants(os.getpid()))
    # utime, stime, cutime and cstime of proc(5)
    ticks = sum(int(field) for fields in found if fields is not None for field in fields[11:15])
    return sum(os.times()[:4]) + ticks / os.sysconf("SC_CLK_TCK")


def with_variable(variable: str, folder: str) -> list[int]:
    """Return this user's processes that started with a run's or trial's variable in their environment."""
    needle = f"{variable}={folder}".encode()
    found = []
    for pid in _all_pids():
        # it may have ended, or be another user's
        with contextlib.suppress(OSError):
            if needle in _environment_of(pid).split(b"\0"):
                found.append(pid)
    return found


def _environment_of(pid: int) -> bytes:
    """Return the environment with which a process has started; that of a zombie from a thread that is left."""
    # depending on the kernel, that of the zombie itself is empty or an error
    with contextlib.suppress(ProcessLookupError):
        if text := Path(f"/proc/{pid}/environ").read_bytes():
            return text
    others = (name for name in os.listdir(f"/proc/{pid}/task") if name != str(pid))
    return next(filter(None, (Path(f"/proc/{pid}/task/{name}/environ").read_bytes() for name in others)), b"")


ENDS_WITHIN = 30.0
"""Seconds after which a warning names killed processes that have not ended: only the kernel can end them."""


def end_all(run_folder: str, keep: set[int]) -> None:
    """Kill all processes that descend from this one or have the run's variable, until only `keep` is left.

    Does not reap children: their parent needs the exit codes.
    """
    warns_at = time.monotonic() + ENDS_WITHIN
    while True:
        rest = (set(descendants(os.getpid())) | set(with_variable(RUN_VARIABLE, run_folder))) - keep - {os.getpid()}
        rest = {pid for pid in rest if started_at(pid) is not None}
        if not rest:
            return
        if time.monotonic() > warns_at:
            warns_at = math.inf
            pids = ", ".join(map(str, sorted(rest)))
            log_lines.warn(f"processes {pids} were killed and have not ended: a driver or file system holds them")
        for pid in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def end_marked(variable: str, folder: str) -> None:
    """Kill this user's processes that started with a variable, except this one, and wait for their end."""
    while rest := [pid for pid in with_variable(variable, folder) if pid != os.getpid() and started_at(pid)]:
        for pid in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def reap() -> None:
    """Reap all children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def allow_many_files() -> None:
    """Raise the limit of open files to the system's maximum: each rank has a connection to every other one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def oom_kills() -> int:
    """Return how many processes the kernel's out-of-memory killer has ended since boot, also at the limit of a cgroup;
    0 if the kernel does not count them."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def cores() -> int:
    """Return the number of cores that this process may use, which may be less than the machine has."""
    return min(len(os.sched_getaffinity(0)), cores_of_machine())


def cores_of_machine() -> int:
    """Return the number of cores that all processes of a job on this machine may use: a quota of CPU time, rounded up,
    leaves fewer of them."""
    quota = cgroups.cpu_quota()
    count = os.cpu_count() or 1
    return count if quota is None else min(count, math.ceil(quota))
