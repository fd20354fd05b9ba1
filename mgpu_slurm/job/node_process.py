"""The process of a node that imports torch once and forks the node's ranks, under SLURM.

srun starts a task for each rank. The first task of a node forks the node's process, and every task asks that for a fork
that runs its rank. On a shared disk the import is most of a rank's start: about 37,000 file operations and seconds of
CPU time, for each rank of a node alike. The task stays, waits, and ends as its rank ended, so that SLURM sees what it
would see without this: exit codes, output, and signals, which it sends to all processes of a step.

A task that gets no fork runs the rank itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from mgpu_slurm.core import processes
from mgpu_slurm.job import rank_process
from mgpu_slurm.job.socket_handoff import user_of
from mgpu_slurm.request.spec import ATTEMPT_VARIABLE, Spec

VARIABLE = "MGPU_FORK_RANKS"
"""Set to 0, each rank is a process that srun starts."""

ASK_SECONDS = 20.0
"""Seconds that a task waits for the node's process, which its first task starts at about the same time."""

ANSWER_SECONDS = 60.0
"""Seconds that the node's process waits for the rest of a request."""

_BOUND = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND", "PMI_FD")
"""Variables of steps whose tasks have something that a process of another task cannot have: a GPU in a control group of
their own, or an open connection to SLURM's PMI."""

_NUMBER = struct.Struct("!i")

_UNBLOCKABLE = {signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
"""Signals that have to arrive at once."""


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


def is_possible(spec: Spec, local_ranks: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the ranks of a node can be forks of one process, and this saves time."""
    is_wanted = {**environ, **spec.environment}.get(VARIABLE) != "0"
    # memory that is bound to a rank's cores would be bound to those of the first one
    has_bound_memory = "none" not in environ.get("SLURM_MEM_BIND_TYPE", "none")
    # libgomp reads these once, together with the cores that a process may use
    has_bound_threads = any(name in environ for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"))
    is_bound = has_bound_memory or has_bound_threads or any(name in environ for name in _BOUND)
    return is_wanted and not is_bound and local_ranks > 1 and not spec.target.is_command


def run(task: Task) -> int:
    """Run the rank of a task in a fork of the node's process, or else in this process; return its exit code.

    Ends this process with the same signal if one has ended the rank.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _UNBLOCKABLE)
    mask = before | task.stop_signals
    node = _start_node(task, mask) if task.local_rank == 0 else None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        pid = _ask_for_rank(link)
        if pid is not None:
            return _wait_for(pid, link, node)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return task.run()


def _address(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of the node's socket in Linux's abstract namespace, which all processes of a node share."""
    step = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "SLURMD_NODENAME")
    names = (processes.RUN_VARIABLE, ATTEMPT_VARIABLE, *step)
    identity = json.dumps([os.getuid(), *(environ.get(name) for name in names)])
    return f"\0mgpu-ranks-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"


# -- the task's side


def _ask_for_rank(link: socket.socket) -> int | None:
    """Ask the node's process for a fork that replaces this process; return its pid, None if there will be none."""
    give_up = time.monotonic() + ASK_SECONDS
    while True:
        try:
            link.connect(_address())
            break
        except OSError:
            if time.monotonic() > give_up:
                return None
            time.sleep(0.02)
    if user_of(link) != os.getuid():
        return None
    about = {"environ": dict(os.environ), "folder": os.getcwd(), "cores": sorted(os.sched_getaffinity(0))}
    text = json.dumps(about).encode()
    with suppress(OSError):
        socket.send_fds(link, [_NUMBER.pack(len(text))], [0, 1, 2])
        link.sendall(text)
        # without a limit: on a slow disk torch's import takes minutes
        return _received(link)
    return None


def _wait_for(pid: int, link: socket.socket, node: int | None) -> int:
    """Wait until the rank has ended; return its exit code, or end by the same signal.

    Args:
        pid: the rank's process.
        node: the node's process if this task is its parent.
    """
    # they came before there was a rank
    for signum in signal.sigpending():
        with suppress(ProcessLookupError):
            os.kill(pid, signum)
    # without a status, the node's process was killed, and the rank with it
    status = _received(link)
    code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    if code == 0 and node is not None:
        # it is found below this task, together with the other ranks
        os.waitpid(node, 0)
    return code if code >= 0 else _end_by(-code)


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


def _end_by(signum: int) -> NoReturn:
    # the rank has left its own core file, if it was to leave one
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
    os._exit(128 + signum)


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
    is_gone: bool = False
    """Whether the task was killed."""

    @property
    def is_first(self) -> bool:
        return self.environ.get("SLURM_LOCALID") == "0"


def _request_on(link: socket.socket) -> _Asked | None:
    """Return what a task asks for; None if it is of another user or has ended."""
    if user_of(link) != os.getuid():
        return None
    link.settimeout(ANSWER_SECONDS)
    try:
        header, streams, _, _ = socket.recv_fds(link, _NUMBER.size, 3)
        size = _NUMBER.unpack(header)[0]
        with link.makefile("rb") as stream:
            about: dict[str, Any] = json.loads(stream.read(size))
    except (OSError, ValueError, struct.error):
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
        self._forks = True
        """Whether the next task gets a fork."""

    def serve(self) -> None:
        with suppress(Exception):
            # an error comes again in the ranks, which report it
            self._task.prepare()
        self._forks = rank_process.can_be_forked()
        # a task that has not asked by then has not found the socket
        self._serve_until(time.monotonic() + ASK_SECONDS)

    def _serve_until(self, late: float) -> None:
        """Serve until all tasks have asked, or will not ask any more, and all ranks have ended."""
        heard, tell = os.pipe()
        for end in (heard, tell):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(tell)
        while self._running or (self._number_asked < self._task.local_ranks and time.monotonic() < late):
            links = {asked.link: asked for asked in self._running if not asked.is_gone}
            sources: list[Any] = [self._listener, heard, *links]
            ready, _, _ = select.select(sources, [], [], 1.0)
            with suppress(BlockingIOError):
                os.read(heard, 1024)
            if self._listener in ready:
                self._accept([heard, tell])
            for link in links.keys() & set(ready):
                links[link].is_gone = True
                os.kill(links[link].pid, signal.SIGKILL)
            self._report_ended()

    def _accept(self, wakeup: list[int]) -> None:
        """Fork the rank of the next task; a closed connection tells the task to run it itself."""
        link, _ = self._listener.accept()
        self._number_asked += 1
        asked = _request_on(link)
        pid = None if asked is None else self._fork(asked, wakeup)
        if asked is None or pid is None:
            link.close()
            return
        asked.pid = pid
        self._running.append(asked)
        # a task that has ended is seen by its connection
        with suppress(OSError):
            link.sendall(_NUMBER.pack(pid))

    def _fork(self, asked: _Asked, wakeup: list[int]) -> int | None:
        """Fork the process of a rank; return its pid, None if the task has to run the rank itself."""
        node = os.getpid()
        try:
            # a site's prolog may give each task variables of its own, for example to choose its GPU
            if self._forks and _unlike_slurms(asked.environ) == self._environ:
                return rank_process.fork(lambda: self._become(asked, node, wakeup), self._task.run)
        except OSError:
            # too many processes
            pass
        finally:
            for descriptor in asked.streams:
                os.close(descriptor)
        return None

    def _become(self, asked: _Asked, node: int, wakeup: list[int]) -> None:
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
        os.chdir(asked.folder)
        os.sched_setaffinity(0, asked.cores)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _report_ended(self) -> None:
        for asked in list(self._running):
            ended, status = os.waitpid(asked.pid, os.WNOHANG)
            if not ended:
                continue
            self._running.remove(asked)
            with suppress(OSError):
                asked.link.sendall(_NUMBER.pack(status))
            asked.link.close()
            if status and asked.is_first:
                self._forks = False
                self._end_others()

    def _end_others(self) -> None:
        """Send the other ranks the SIGTERM that srun sends them now, and that may not reach them.

        The first task ends with its rank. A SLURM that finds the processes of a step by their parents does not find
        those below this one after that. When it kills the other tasks, their connections end.
        """
        for asked in self._running:
            os.kill(asked.pid, signal.SIGTERM)


def _unlike_slurms(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in which the tasks of a node do not differ: all but SLURM's."""
    return {name: value for name, value in environ.items() if not name.startswith("SLURM")}
