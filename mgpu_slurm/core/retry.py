"""Wait for storage, and report it once: for a server that restarts, or a disk that is full or unavailable."""

from __future__ import annotations

import errno
import random
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from mgpu_slurm.core import log_lines

T = TypeVar("T")

SECONDS = 300.0
"""Seconds for which a job waits for one answer."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The errors of a full disk."""

_PASSING = FULL | {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN, errno.ESHUTDOWN}
"""Errors of the disk itself; if a folder is missing or not writable, waiting does not help."""

SLOW_SECONDS = 5.0
"""Seconds of waiting after which it is reported."""

LONGEST_PAUSE_SECONDS = 2.0

LONGEST_LOOK = 2.0
"""Seconds that are counted between two calls, at most."""


class OwnTime:
    """A clock that hardly advances while this process is suspended, as SLURM does with whole jobs."""

    def __init__(self) -> None:
        self._looked = time.monotonic()

    def passed(self) -> float:
        """Return the seconds since the last call; call it every second."""
        last, self._looked = self._looked, time.monotonic()
        return min(self._looked - last, LONGEST_LOOK)


class Waiting:
    """The wait for the answer to one call."""

    def __init__(self, problem: str, seconds: float) -> None:
        """
        Args:
            problem: what does not answer, as the beginning of a line in the log.
            seconds: the longest time to wait.
        """
        self._problem = problem
        self._seconds = seconds
        self._began: float | None = None
        self._pause = 0.02
        self._has_told = False

    def is_over(self) -> bool:
        """Return whether the time is up; it starts with the first call."""
        self._began = self._began or time.monotonic()
        return time.monotonic() - self._began >= self._seconds

    def pause(self, why: str) -> None:
        """Sleep, a little longer each time, and randomly so that processes do not act in step."""
        assert self._began is not None
        waited = time.monotonic() - self._began
        if waited >= SLOW_SECONDS and not self._has_told:
            self._has_told = True
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + self._seconds - waited))
            said = f"{self._problem} ({why}); trying again until {until}"
            log_lines.say(said, file=sys.stderr)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        time.sleep(self._pause * random.uniform(0.5, 1.0))


def while_unavailable(
    ask: Callable[[], T], problem: str, seconds: float | None = None, passing: Container[int | None] | None = None
) -> T:
    """Return the answer, and retry while a file system is unavailable or full.

    Args:
        problem: what cannot be opened, as the beginning of a line in the log.
        seconds: the longest time to wait; None for `SECONDS`.
        passing: the numbers of the errors to wait for; None for all.

    Raises:
        OSError: the time is up, or waiting does not help.
    """
    patience = Waiting(problem, SECONDS if seconds is None else seconds)
    while True:
        try:
            return ask()
        except OSError as error:
            if patience.is_over() or (passing is not None and error.errno not in passing):
                raise
            patience.pause(str(error))


def for_the_disk(write: Callable[[], T], path: Path) -> T:
    """Write data that must not be lost, and retry while the disk does not accept it.

    Raises:
        OSError: the time is up, or waiting does not help.
    """
    return while_unavailable(write, f"{str(path)!r} cannot be written", passing=_PASSING)


Note = Callable[[str], None]
"""Reports to the user, in one line, what is happening."""


def quiet(_: str) -> None:
    """Do nothing: the `Note` of a caller who wants no reports."""


@contextmanager
def noting_after(seconds: float, say: Callable[[], None]) -> Iterator[None]:
    """Call `say` from a separate thread if the block takes longer than `seconds`."""
    timer = threading.Timer(seconds, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
