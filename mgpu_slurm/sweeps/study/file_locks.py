"""A lock that workers on all nodes share, and that ends with whoever holds it."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mgpu_slurm.core.retry import saying_so_after

SLOW_LOCK_SECONDS = 30.0
"""After which who waits for the lock says so: a file system that hangs looks like that."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file, which is made where it is not there.

    By fcntl: the system queues those who wait, and frees the lock of a process, or node, that is gone. It is a file of
    its own: closing any descriptor of a file gives up all locks that its process has on it.
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
    print(
        f"mgpu_slurm: waiting for the lock {str(path)!r} for {SLOW_LOCK_SECONDS:g} s:"
        " another worker has it, or the file system hangs",
        file=sys.stderr,
        flush=True,
    )
