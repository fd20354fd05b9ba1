"""The process of a node that imports torch once and forks the node's ranks, under SLURM.

srun starts a task for each rank. The first task of a node forks the node's process, and every task asks that for a fork
that runs its rank. On a shared disk the import is most of a rank's start: about 37,000 file operations and seconds of
CPU time, for each rank of a node alike. The task stays, passes signals on, and ends as its rank ended, so that SLURM
sees what it would see without this. A task that gets no fork runs the rank itself.

SLURM sends a signal to all processes of a step or, with proctrack/cgroup and without SignalChildrenProcesses, only to
its tasks (`proctrack_p_signal` in its source; it kills all of them). The node's process blocks every signal, so that
one which it was sent too stays pending there: then ranks have it as well, and tasks need not pass it on.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import socket
import struct
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu_slurm.core import processes
from mgpu_slurm.job import rank_process
from mgpu_slurm.job.socket_handoff import credentials_of, user_of
from mgpu_slurm.request.spec import ATTEMPT_VARIABLE

ASK_SECONDS = 20.0
"""Seconds that a task waits for the node's process, which its first task starts at about the same time."""

ANSWER_SECONDS = 60.0
"""Seconds that the node's process waits for the rest of a request."""

REFUSAL_SECONDS = 1.0
"""Seconds that the first task waits for the process that it has started, if that does not serve it."""

_NUMBER = struct.Struct("!i")

_UNBLOCKABLE = {signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
"""Signals that have to arrive at once."""

_OWN = {*_UNBLOCKABLE, signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT}
"""Signals that a task does not pass on: they concern itself, or cannot be handled."""


@dataclass(frozen=True)
class Task:
    """A task of srun, and the rank that it is to run."""

    local_rank: int
    local_ranks: int
    """Number of ranks on this node."""
    prepare: Callable[[], None]
    """Imports what ranks share."""
    run: Callable[[], int]
    """Runs the rank in the calling process; returns its exit code."""
    stop_signals: frozenset[signal.Signals]
    """Signals that the rank handles, and therefore has to receive even if they arrive before it exists.

    They are blocked when it begins; it unblocks them once it handles them.
    """


def run(task: Task) -> int:
    """Run the rank of a task in a fork of the node's process, or else in this process; return its exit code.

    Ends this process with the same signal if one has ended the rank.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _UNBLOCKABLE)
    mask = before | task.stop_signals
    node = _start_node(task, mask) if task.local_rank == 0 else None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        if _gets_rank(link):
            code = _wait_for_rank(link)
            if code == 0 and node is not None:
                # what finds the processes of a step by their parents finds the other ranks below this one
                os.waitpid(node, 0)
            return code if code >= 0 else rank_process.end_by(-code)
    if node is not None:
        _await_refusals(node)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return task.run()


def _await_refusals(node: int) -> None:
    """Wait until the node's process has refused the other tasks as well, for a limited time: the job should not find a
    child that it has not started."""
    give_up = time.monotonic() + REFUSAL_SECONDS
    while not os.waitpid(node, os.WNOHANG)[0] and time.monotonic() < give_up:
        time.sleep(0.02)


def _address(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of the node's socket in Linux's abstract namespace, which all processes of a node share."""
    step = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "SLURMD_NODENAME")
    names = (processes.RUN_VARIABLE, ATTEMPT_VARIABLE, *step)
    identity = json.dumps([os.getuid(), *(environ.get(name) for name in names)])
    return f"\0mgpu-ranks-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"


# -- the task's side


def _gets_rank(link: socket.socket) -> bool:
    """Ask the node's process for a fork that runs the rank in place of this process; return whether it exists now."""
    with suppress(OSError):
        if not _is_connected(link) or _has_own_variables(credentials_of(link)[0]):
            return False
        about = {"environ": dict(os.environ), "folder": os.getcwd(), "cores": sorted(os.sched_getaffinity(0))}
        text = json.dumps(about).encode()
        socket.send_fds(link, [_NUMBER.pack(len(text))], [0, 1, 2])
        link.sendall(text)
        # without a limit: on a slow disk torch's import takes minutes
        return _received(link) is not None
    return False


def _is_connected(link: socket.socket) -> bool:
    """Connect to the process of this node and user; return False if there is none."""
    give_up = time.monotonic() + ASK_SECONDS
    # else it blocks where a stranger has filled the queue of the socket
    link.settimeout(1.0)
    while True:
        try:
            link.connect(_address())
            break
        except OSError:
            if time.monotonic() > give_up:
                return False
            time.sleep(0.02)
    link.settimeout(None)
    return user_of(link) == os.getuid()


def _has_own_variables(first: int) -> bool:
    """Return whether srun or a site's prolog gave this task variables that the first one has not.

    It would be refused, but only when torch is imported.

    Args:
        first: pid of the first task.
    """
    try:
        # what both had when they started; Python may have added to it
        found = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in (first, "self")]
    except PermissionError:
        # each task is in a container of its own, which hides this from the others
        return False
    ours, theirs = ({pair for pair in pairs if not pair.startswith(b"SLURM")} for pairs in found)
    return ours != theirs


def _wait_for_rank(link: socket.socket) -> int:
    """Pass signals on until the rank has ended; return its exit code, negative for a signal."""
    heard, _ = _wakeup_pipe()
    passed = signal.valid_signals() - _OWN
    for signum in passed:
        signal.signal(signum, lambda signum, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
    while True:
        ready, _, _ = select.select([link.fileno(), heard], [], [])
        if heard in ready:
            # by CPython's C signal handler, each a byte
            with suppress(OSError):
                link.sendall(os.read(heard, 1024))
        if link.fileno() in ready:
            # without a status, the node's process was killed, and the rank with it
            status = _received(link)
            return -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)


def _wakeup_pipe() -> tuple[int, int]:
    """Return both ends of a pipe to which each signal with a handler is written from now on."""
    heard, tell = os.pipe()
    for end in (heard, tell):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    return heard, tell


def _received(link: socket.socket) -> int | None:
    """Return the next number that the node's process sends; None if it has closed the connection."""
    received = b""
    while len(received) < _NUMBER.size:
        with suppress(OSError):
            if part := link.recv(_NUMBER.size - len(received)):
                received += part
                continue
        return None
    number: int = _NUMBER.unpack(received)[0]
    return number


# -- the node's side


def _start_node(task: Task, mask: set[int]) -> int | None:
    """Start the node's process; return its pid, None if the socket's name is taken."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener:
        try:
            listener.bind(_address())
        except OSError:
            return None
        listener.listen(task.local_ranks)
        pid = os.fork()
        if pid == 0:
            # without the exit handlers and buffers of the task
            try:
                _Node(task, mask, listener).serve()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        return pid


@dataclass
class _Asked:
    """A task that has asked for its rank."""

    link: socket.socket
    environ: dict[str, str]
    folder: str
    cores: list[int]
    streams: list[int]
    """Descriptors of its standard input, output and error."""
    pid: int = 0
    """Process of its rank."""
    forked: float = 0.0
    """When that was forked, on the monotonic clock."""
    is_gone: bool = False
    """Whether the task was killed."""


def _request_on(link: socket.socket) -> _Asked | None:
    """Return what a task asks for; None if it has ended."""
    link.settimeout(ANSWER_SECONDS)
    streams: list[int] = []
    try:
        header, streams, _, _ = socket.recv_fds(link, _NUMBER.size, 3)
        size = _NUMBER.unpack(header)[0]
        with link.makefile("rb") as stream:
            about: dict[str, Any] = json.loads(stream.read(size))
    except (OSError, ValueError, struct.error):
        for descriptor in streams:
            os.close(descriptor)
        return None
    return _Asked(link, streams=streams, **about)


class _Node:
    """Forks ranks until all tasks of this node have theirs, and reports how each ended."""

    def __init__(self, task: Task, mask: set[int], listener: socket.socket) -> None:
        self._task = task
        self._mask = mask
        self._listener = listener
        self._environ = _unlike_slurms(os.environ)
        self._running: list[_Asked] = []
        self._number_asked = 0
        self._forks = False
        """Whether tasks get forks."""
        self._passed: deque[tuple[float, _Asked, int]] = deque()
        """Signals from tasks, with the times at which SLURM has sent them to everybody, if it does."""

    def serve(self) -> None:
        try:
            self._task.prepare()
            self._forks = rank_process.can_be_forked()
        except Exception:
            # torch cannot be imported anew in a fork of this process
            traceback.print_exc()
        # a task that has not asked by then has not found the socket
        self._serve_until(time.monotonic() + ASK_SECONDS)

    def _serve_until(self, late: float) -> None:
        """Serve until all tasks have asked, or will not ask any more, and all ranks have ended."""
        wakeup = _wakeup_pipe()
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        while self._running or (self._number_asked < self._task.local_ranks and time.monotonic() < late):
            links = {asked.link: asked for asked in self._running if not asked.is_gone}
            sources: list[Any] = [self._listener, wakeup[0], *links]
            ready, _, _ = select.select(sources, [], [], processes.SPREAD_SECONDS / 2 if self._passed else 1.0)
            with suppress(BlockingIOError):
                os.read(wakeup[0], 1024)
            if self._listener in ready:
                self._accept(wakeup)
            for link in links.keys() & set(ready):
                self._hear(links[link])
            self._pass_signals_on()
            self._report_ended()

    def _accept(self, wakeup: tuple[int, int]) -> None:
        """Fork the rank of the next task; a closed connection tells the task to run it itself."""
        link, _ = self._listener.accept()
        is_own = user_of(link) == os.getuid()
        self._number_asked += is_own
        # a task that wants no fork closes its connection
        asked = _request_on(link) if is_own else None
        pid = None if asked is None else self._fork(asked, wakeup)
        if asked is None or pid is None:
            link.close()
            return
        asked.pid, asked.forked = pid, time.monotonic()
        self._running.append(asked)
        # a task that has ended is seen by its connection
        with suppress(OSError):
            link.sendall(_NUMBER.pack(pid))

    def _fork(self, asked: _Asked, wakeup: tuple[int, int]) -> int | None:
        """Fork the process of a rank; return its pid, None if the task has to run the rank itself."""
        node = os.getpid()
        try:
            if self._forks and _unlike_slurms(asked.environ) == self._environ:
                # here, so that a failure is none of the rank
                os.chdir(asked.folder)
                os.sched_setaffinity(0, asked.cores)
                return rank_process.fork(lambda: self._become(asked, node, wakeup), self._task.run)
        except OSError:
            # also too many processes
            pass
        finally:
            for descriptor in asked.streams:
                os.close(descriptor)
        return None

    def _become(self, asked: _Asked, node: int, wakeup: tuple[int, int]) -> None:
        """Make this new process what the task would be."""
        processes.die_with_parent(signal.SIGKILL, node)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for target, descriptor in enumerate(asked.streams):
            os.dup2(descriptor, target)
        for descriptor in (*asked.streams, *wakeup):
            os.close(descriptor)
        # a task sees by its connection that this node's process has ended
        for each in (self._listener, asked.link, *(other.link for other in self._running)):
            each.close()
        os.environ.clear()
        os.environ.update(asked.environ)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _hear(self, asked: _Asked) -> None:
        """Take the signals that a task passes on; kill the rank of one that has ended."""
        try:
            heard = asked.link.recv(1024)
        except OSError:
            heard = b""
        if not heard:
            asked.is_gone = True
            os.kill(asked.pid, signal.SIGKILL)
        now = time.monotonic()
        self._passed += [(now + processes.SPREAD_SECONDS, asked, signum) for signum in heard]

    def _pass_signals_on(self) -> None:
        """Send ranks the signals of their tasks that are due, unless SLURM has sent them to all processes."""
        while self._passed and self._passed[0][0] <= time.monotonic():
            at, asked, signum = self._passed.popleft()
            # SLURM lists processes before it signals them, and may have missed a new one
            is_new = at < asked.forked + 2 * processes.SPREAD_SECONDS
            if asked in self._running and (is_new or signum not in signal.sigpending()):
                os.kill(asked.pid, signum)

    def _report_ended(self) -> None:
        for asked in list(self._running):
            ended, status = os.waitpid(asked.pid, os.WNOHANG)
            if not ended:
                continue
            self._running.remove(asked)
            with suppress(OSError):
                asked.link.sendall(_NUMBER.pack(status))
            asked.link.close()


def _unlike_slurms(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in which the tasks of a node do not differ: all but SLURM's."""
    return {name: value for name, value in environ.items() if not name.startswith("SLURM")}
