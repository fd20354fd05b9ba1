"""Writes a job's output to logs, one per rank. A full disk loses lines of output but does not stop the training."""

from __future__ import annotations

import io
import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_slurm.core import retry
from mgpu_slurm.core.log_lines import WARNING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


HELD = 1 << 16
"""Maximum bytes of output held in memory while the disk is full."""


def send_to(log: Path) -> None:
    """Redirect the output of this process and its children to a file; srun's --output cannot contain the attempt."""
    flush()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    descriptor = retry.for_the_disk(lambda: os.open(log, flags, 0o640), log)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    tolerate_full_disk()


def tolerate_full_disk() -> None:
    """Hold this process's further output in memory while the disk is full."""
    sys.stdout, sys.stderr = _stream(1), _stream(2)


def flush() -> None:
    """Write the output held back by a full disk, if there is room again."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor in (1, 2):
        if _log(descriptor).held:
            _log(descriptor).write(b"")


@cache
def _stream(descriptor: int) -> io.TextIOWrapper:
    buffer = io.BufferedWriter(_log(descriptor))
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)


@cache
def _log(descriptor: int) -> _Log:
    return _Log(descriptor, "w", closefd=False)


class _Log(io.FileIO):
    """A file that holds data in memory while the disk is full, and writes it when there is room again."""

    held = b""
    _lost = 0
    """Bytes dropped because there were too many to hold."""

    def write(self, data: ReadableBuffer, /) -> int:
        if not self.held:
            try:
                return super().write(data)
            except OSError as error:
                self._hold(bytes(data), error)
        else:
            self._write_held(bytes(data))
        return memoryview(data).nbytes

    def _write_held(self, data: bytes) -> None:
        due = self.held + data
        if self._lost:
            due = f"\n{WARNING}the disk was full: {self._lost} bytes of output are lost here\n".encode() + due
        try:
            written = super().write(due)
        except OSError as error:
            self._hold(self.held + data, error)
        else:
            self.held, self._lost = due[written:], 0

    def _hold(self, data: bytes, error: OSError) -> None:
        if error.errno not in retry.FULL:
            raise error
        self.held = data[-HELD:]
        self._lost += len(data) - len(self.held)
