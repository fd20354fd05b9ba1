"""Signals that ask a run to stop: the handler sets a flag, and ranks act on it together at a step boundary.

A collective inside a handler deadlocks, and a save on one rank alone tears the checkpoint; so nothing happens here.
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

from mgpu_slurm.core import retry
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.rank import crash

LEAD_SIGNAL_VARIABLE = "MGPU_LEAD_SIGNAL"
LEAD_SECONDS_VARIABLE = "MGPU_LEAD_SECONDS"

PART_OF_LEAD = 0.75
"""Of the time between the lead signal and the time limit, after which a rank that is blocked leaves; the rest is for
the requeue."""

SAYS_AFTER = 4.0
"""Seconds after SIGTERM: SIGKILL comes 30 s later mostly, and at some sites 5."""


class Stop(IntEnum):
    """What was asked, the stronger the higher."""

    NO = 0
    REQUEUE = 1
    """The time limit is near: save and come back."""
    LEAVE = 2
    """The time limit is very near: leave and come back, also where nothing was saved."""
    END = 3
    """SIGTERM, or Ctrl-C: save and leave; who sent it decides what comes next."""


class StopFlag:
    """The strongest request that this rank has received so far."""

    def __init__(self, leave_after: float | None = None) -> None:
        """
        Args:
            leave_after: seconds after the lead signal at which this rank has to be gone, saved or not; None for one
                that stays to its end.
        """
        self._leave_after = leave_after
        self.is_heeded = False
        """Nobody need be told where this rank is: it has come to the place where all of them stop."""
        self.comes_back = False
        """Whether this rank has stopped in order to be started again."""
        self.asked = Stop.NO
        self._asked_at = 0.0

    @property
    def due(self) -> Stop:
        """What is to be done now."""
        is_late = self._leave_after is not None and time.monotonic() - self._asked_at >= self._leave_after
        return Stop.LEAVE if self.asked is Stop.REQUEUE and is_late else self.asked

    def listen(self) -> None:
        """Takes over the lead signal, SIGTERM and Ctrl-C of this process."""
        reset_sigterm_in_children()
        signal.signal(lead_signal(), self._on_lead)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, self._on_interrupt)

    def see_to_it(self, leave_after: float | None, leave: Callable[[], None]) -> None:
        """Has a thread hear the signals too: where the main one is blocked, in a collective that another rank does not
        come to or in user code, it runs no handler and reaches no boundary. It says where that is after a SIGTERM.

        Args:
            leave_after: seconds after the lead signal at which it calls `leave`; None for never.
        """
        heard, tell = os.pipe()
        os.set_blocking(tell, False)
        # written by the C code that catches a signal, whatever the interpreter does
        signal.set_wakeup_fd(tell, warn_on_full_buffer=False)

        def wait() -> None:
            while True:
                (signum,) = os.read(heard, 1)
                if signum == lead_signal() and leave_after is not None:
                    time.sleep(leave_after)
                    leave()
                elif signum == signal.SIGTERM:
                    time.sleep(SAYS_AFTER)
                    if not self.is_heeded:
                        _say_where(b"asked to end, and has come to no place where it could save")

        crash.guarded_thread(wait, "signals")

    def _on_lead(self, signum: int, frame: FrameType | None) -> None:
        if self.asked is Stop.NO:
            self.asked, self._asked_at = Stop.REQUEUE, time.monotonic()

    def _on_term(self, signum: int, frame: FrameType | None) -> None:
        self.asked = Stop.END

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self.asked is Stop.END:
            # a second one does not wait for a boundary
            signal.default_int_handler(signum, frame)
        self.asked = Stop.END


def wish_to_requeue(folder: RunFolder, attempt: int, said: str = "") -> None:
    """Ask the batch step to have the run started again, where an exit code does not reach it: srun takes one for a
    failure, ends the other ranks while they still save, and reports the code of those; launchers replace it.

    Args:
        said: why this rank asks so, for people.
    """
    wish = folder.requeue_wish(attempt)
    retry.for_the_disk(wish.touch, wish)
    with suppress(OSError), open(wish, "a") as file:
        file.write(said and f"{said}\n")


def leave_from_here(exit_code: int, tell: Callable[[], None] = lambda: None) -> NoReturn:
    """Ends a rank that cannot save from where it is, which its log shows.

    Args:
        tell: is called before.
    """
    try:
        _say_where(b"the time limit is near: this rank leaves, and could not save from here")
        tell()
    finally:
        os._exit(exit_code)


def _say_where(words: bytes) -> None:
    # not by print, over which another thread may be blocked
    os.write(1, b"mgpu_slurm: WARNING: " + words + b":\n")
    faulthandler.dump_traceback(1)


def lead_signal() -> signal.Signals:
    """Return the signal that says that the time limit is near."""
    return signal.Signals[f"SIG{os.environ.get(LEAD_SIGNAL_VARIABLE, 'USR2')}"]


def ignore_stop_signals(*besides: signal.Signals) -> None:
    """Ignore the lead signal and Ctrl-C, and these: the signals of the run reach every process of a rank, and none must
    die of them before the save."""
    for signum in (lead_signal(), signal.SIGINT, *besides):
        signal.signal(signum, signal.SIG_IGN)


# -- children of a rank

_forking = threading.local()
"""The signals that the thread had blocked before it began to fork."""


@functools.cache
def reset_sigterm_in_children() -> None:
    """Make SIGTERM end the children that this process forks from now on, as it ends any other program.

    They would inherit a handler that only sets a flag, which nobody reads in a child: `Process.terminate` and
    `multiprocessing.Pool` would wait for them for ever. A SIGTERM that comes before the child has reset the handler
    waits until it has.
    """
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


def _before_fork() -> None:
    _forking.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.blocked)


def _after_fork_in_child() -> None:
    # signals of the child are no signals of this rank
    signal.set_wakeup_fd(-1)
    handler = signal.getsignal(signal.SIGTERM)
    if getattr(handler, "__func__", None) is StopFlag._on_term:  # and not one that the job has set since
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _after_fork()
