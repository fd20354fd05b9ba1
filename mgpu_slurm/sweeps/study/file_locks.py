"""A lock shared by workers on all nodes, which is released when its holder ends."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mgpu_slurm.core import log_lines
from mgpu_slurm.core.retry import saying_so_after

SLOW_LOCK_SECONDS = 30.0
"""Seconds after which a process that waits for the lock prints so: a hanging file system looks the same."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on a file, which is created if it does not exist.

    The lock is by fcntl: the system queues waiters, and releases the lock of a process or node that is gone. Use a
    separate file for it: closing any descriptor of a file releases all locks of the process on that file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o640)
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with saying_so_after(SLOW_LOCK_SECONDS, lambda: _say_who_waits(path)):
                fcntl.lockf(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _say_who_waits(path: Path) -> None:
    log_lines.say(
        f"waiting for the lock {str(path)!r} for {SLOW_LOCK_SECONDS:g} s:"
        " another worker has it, or the file system hangs",
        file=sys.stderr,
    )
