"""Signals that ask a run to stop: the handler sets a flag, and all ranks act on it at the same step boundary.

The handler does no more, because a collective in it would deadlock, and a save on a single rank would be inconsistent.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from types import FrameType
from typing import NoReturn

from mgpu_slurm.core import log_lines, retry
from mgpu_slurm.core.errors import RunStopped
from mgpu_slurm.core.files import write_whole
from mgpu_slurm.rank import crash
from mgpu_slurm.request.parallelism import compiles
from mgpu_slurm.request.spec import TERMINATED_EXIT_CODE
from mgpu_slurm.run_folder.layout import RunFolder

LEAD_SIGNAL_VARIABLE = "MGPU_LEAD_SIGNAL"
LEAD_SECONDS_VARIABLE = "MGPU_LEAD_SECONDS"

PART_OF_LEAD = 0.75
"""Fraction of the time between the lead signal and the time limit after which a blocked rank exits.

The rest is left for the requeue.
"""

SAYS_AFTER = 4.0
"""Seconds after SIGTERM at which a rank logs where it is; SIGKILL usually follows after 30 s, at some sites 5 s."""


class Stop(IntEnum):
    """Requests to stop, weakest first."""

    NO = 0
    REQUEUE = 1
    """The time limit is near: save, exit and be restarted."""
    LEAVE = 2
    """The time limit is very near: exit and be restarted, even if nothing was saved."""
    END = 3
    """SIGTERM or Ctrl-C: save and exit; the sender decides what happens next."""


class StopFlag:
    """The strongest request that this rank has received so far."""

    def __init__(self, leave_after: float | None = None) -> None:
        """
        Args:
            leave_after: seconds after the lead signal at which this rank has to exit, saved or not; None for never.
        """
        self._leave_after = leave_after
        self.is_at_boundary = False
        """Whether this rank has reached the place where all ranks stop, so that its log need not show where it is."""
        self.will_restart = False
        """Whether this rank has stopped in order to be restarted."""
        self.asked = Stop.NO
        self._asked_at = 0.0

    @property
    def due(self) -> Stop:
        """The request to act on now."""
        is_late = self._leave_after is not None and time.monotonic() - self._asked_at >= self._leave_after
        return Stop.LEAVE if self.asked is Stop.REQUEUE and is_late else self.asked

    def listen(self) -> None:
        """Install handlers for the lead signal, SIGTERM and Ctrl-C."""
        reset_sigterm_in_children()
        handlers = {
            lead_signal(): self._on_lead,
            signal.SIGTERM: self._on_term,
            signal.SIGINT: self._on_interrupt,
        }
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        # a forked rank has blocked them until now, and a script that a rank has started inherits what that had blocked
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)

    def watch_signals(self, leave_after: float | None, leave: Callable[[], None]) -> None:
        """Start a thread that receives the signals too.

        The main thread runs no handler and reaches no boundary while it is blocked, in user code or in a collective
        that another rank does not reach. After a SIGTERM, the thread logs where that is.

        Args:
            leave_after: seconds after the lead signal at which the thread calls `leave`; None for never.
        """
        heard, tell = os.pipe()
        os.set_blocking(tell, False)
        # CPython's C signal handler writes to it, whatever the interpreter is doing
        signal.set_wakeup_fd(tell, warn_on_full_buffer=False)

        def wait() -> None:
            while True:
                (signum,) = os.read(heard, 1)
                if signum == lead_signal() and leave_after is not None:
                    time.sleep(leave_after)
                    leave()
                elif signum == signal.SIGTERM:
                    time.sleep(SAYS_AFTER)
                    if not self.is_at_boundary:
                        _say_where(b"asked to end, but has reached no place where it could save")

        crash.guarded_thread(wait, "signals")
        if compiles():
            # it would end the compilers that torch starts: they inherit blocked signals, but no handlers. That thread
            # still receives it
            signal.pthread_sigmask(signal.SIG_BLOCK, {lead_signal()})

    def _on_lead(self, signum: int, frame: FrameType | None) -> None:
        if self.asked is Stop.NO:
            self.asked, self._asked_at = Stop.REQUEUE, time.monotonic()

    def _on_term(self, signum: int, frame: FrameType | None) -> None:
        self.asked = Stop.END

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self.asked is Stop.END:
            # a second Ctrl-C does not wait for a boundary
            signal.default_int_handler(signum, frame)
        self.asked = Stop.END


def request_requeue(folder: RunFolder, attempt: int, said: str = "") -> None:
    """Ask the batch step to restart the run, for cases in which an exit code would not reach it.

    srun takes such a code for a failure, ends the other ranks while they still save, and reports their code instead;
    launchers replace the code.

    Args:
        said: the reason for the request, for people.
    """
    request = folder.requeue_request(attempt)
    retry.for_the_disk(request.touch, request)
    with suppress(OSError), open(request, "a") as file:
        file.write(said and f"{said}\n")


def note_stop(folder: RunFolder, attempt: int, stopped: RunStopped) -> None:
    """Tell the batch step that the ranks have ended on request; their exit code is that of ranks killed by SIGTERM."""
    if stopped.exit_code == TERMINATED_EXIT_CODE:
        # only words are lost on a full disk, and SIGKILL follows soon
        with suppress(OSError):
            write_whole(folder.terminated(attempt), f"{stopped.reason}\n".encode(), sync=False)


def leave_from_here(exit_code: int, tell: Callable[[], None] = lambda: None) -> NoReturn:
    """Log where this rank is, and exit, because it cannot save from there.

    Args:
        tell: called before the exit.
    """
    try:
        _say_where(b"the time limit is near: this rank exits, because it cannot save from here")
        tell()
    finally:
        os._exit(exit_code)


def _say_where(words: bytes) -> None:
    # not print, in which another thread may be blocked
    os.write(1, log_lines.WARNING.encode() + words + b":\n")
    faulthandler.dump_traceback(1)


def lead_signal() -> signal.Signals:
    """Return the signal that announces the time limit."""
    return signal.Signals[f"SIG{os.environ.get(LEAD_SIGNAL_VARIABLE, 'USR2')}"]


def ignore_stop_signals(*besides: signal.Signals) -> None:
    """Ignore the lead signal, Ctrl-C and the given signals.

    The run's signals reach every process of a rank, and none of them may die before the save.
    """
    for signum in (lead_signal(), signal.SIGINT, *besides):
        signal.signal(signum, signal.SIG_IGN)


# -- children of a rank

_forking = threading.local()
"""The signals that a thread had blocked before its fork."""


@functools.cache
def reset_sigterm_in_children() -> None:
    """Make SIGTERM terminate the children that this process forks from now on.

    They would inherit a handler that only sets a flag, which nobody reads in a child: `Process.terminate` and
    `multiprocessing.Pool` would wait for them forever. SIGTERM is blocked until the child has reset the handler.
    """
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


def _before_fork() -> None:
    _forking.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.blocked)


def _after_fork_in_child() -> None:
    # signals to the child are not signals to this rank
    signal.set_wakeup_fd(-1)
    handler = signal.getsignal(signal.SIGTERM)
    if getattr(handler, "__func__", None) is StopFlag._on_term:  # and not one that the job has set since
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _after_fork()
