"""Wait for storage, and say so once: for a server that restarts, a disk that is full, or one that is away."""

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

T = TypeVar("T")

SECONDS = 300.0
"""For so long a job waits for one answer."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What a disk says that takes no more."""

_PASSING = FULL | {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN, errno.ESHUTDOWN}
"""What a disk says of itself; where a folder is not there, or nobody's to write to, waiting does not help."""

SLOW_SECONDS = 5.0
"""After which who waits says so."""

LONGEST_PAUSE_SECONDS = 2.0

LONGEST_LOOK = 2.0
"""Seconds that count between two looks, at most."""


class OwnTime:
    """The time that passes for this process: hardly any where it is suspended, as SLURM does with a whole job."""

    def __init__(self) -> None:
        self._looked = time.monotonic()

    def passed(self) -> float:
        """Seconds since the last call; it is to be called every second."""
        last, self._looked = self._looked, time.monotonic()
        return min(self._looked - last, LONGEST_LOOK)


class Waiting:
    """For the answer to one call."""

    def __init__(self, problem: str, seconds: float) -> None:
        """
        Args:
            problem: what does not answer, to go on from `mgpu_slurm: `.
            seconds: after which it has been too long.
        """
        self._problem = problem
        self._seconds = seconds
        self._began: float | None = None
        self._pause = 0.02
        self._has_told = False

    def is_over(self) -> bool:
        """Whether it has been too long; the time begins with the first question."""
        self._began = self._began or time.monotonic()
        return time.monotonic() - self._began >= self._seconds

    def pause(self, why: str) -> None:
        """Sleeps a little longer each time, no two processes equally long."""
        assert self._began is not None
        waited = time.monotonic() - self._began
        if waited >= SLOW_SECONDS and not self._has_told:
            self._has_told = True
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + self._seconds - waited))
            said = f"{self._problem} ({why}); trying again until {until}"
            print(f"mgpu_slurm: {said}", file=sys.stderr, flush=True)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        time.sleep(self._pause * random.uniform(0.5, 1.0))


def patiently(
    ask: Callable[[], T], problem: str, seconds: float | None = None, passing: Container[int | None] | None = None
) -> T:
    """The answer, also of a file system that is away for a while, or full.

    Args:
        problem: what cannot be opened, to go on from `mgpu_slurm: `.
        seconds: after which it has been too long; None for `SECONDS`.
        passing: the errors to wait for, by their numbers; None for all.

    Raises:
        OSError: it has been too long, or waiting does not help.
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
    """Writes what has to be kept, once the disk takes it.

    Raises:
        OSError: it has been too long, or waiting does not help.
    """
    return patiently(write, f"{str(path)!r} cannot be written", passing=_PASSING)


Note = Callable[[str], None]
"""Tells the user in one line what is going on."""


def quiet(_: str) -> None:
    """The note of a caller who wants none."""


@contextmanager
def saying_so_after(seconds: float, say: Callable[[], None]) -> Iterator[None]:
    """Calls `say`, from a thread of its own, where the block takes longer than that."""
    timer = threading.Timer(seconds, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
