"""The study's journal: one file that all workers append to, and that a worker may die over at any moment.

It takes the place of Optuna's own file backend under Optuna's `JournalStorage` and writes the same lines, so that any
tool that reads an Optuna journal reads this one. What differs: a lock that waiters get in the order in which they came,
and that ends with whoever holds it; a line that a dead writer left torn is cut off before the next one is appended,
where one stray half would make every later look at the study fail; and what a full disk does not take whole is taken
back.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optuna.storages.journal import BaseJournalBackend

from mgpu_slurm.errors import MgpuError
from mgpu_slurm.patience import saying_so_after

SLOW_LOCK_SECONDS = 30.0
"""After which who waits for the lock says so: a file system that hangs looks like that."""

_BLOCK = 1 << 16


class JournalFile(BaseJournalBackend):
    """A backend of `optuna.storages.JournalStorage`. One is for one process; its calls come one at a time."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: absolute; made where it is not there.
        """
        assert path.is_absolute(), path
        self._path = path
        # never the journal itself: closing any descriptor of a file gives up all locks that its process has on it
        self._lock_path = path.with_name(f"{path.name}.lock")
        self._read_up_to = 0
        """Offset of the first line that has not been read."""
        self._lines_read = 0
        os.close(os.open(path, os.O_CREAT | os.O_APPEND, 0o666))

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Yields records from this one on; a line that is still being written is none yet.

        Raises:
            MgpuError: the file is damaged, and where.
        """
        if log_number_from < self._lines_read:
            self._read_up_to = self._lines_read = 0
        # opened each time: a network file system shows what others wrote to those who open the file after that
        with open(self._path, "rb") as file:
            file.seek(self._read_up_to)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                number, place = self._lines_read, self._read_up_to
                self._read_up_to += len(line)
                self._lines_read += 1
                if number >= log_number_from:
                    yield self._record(line, place)

    def _record(self, line: bytes, place: int) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise MgpuError(
                f"{str(self._path)!r} is damaged at byte {place}: {line[:40]!r} is no record; take that line out of it"
            )
        return record

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Appends all of these records or none.

        Raises:
            OSError: the file system does not take them; what it had taken is gone again.
        """
        data = "".join(f"{json.dumps(log, separators=(',', ':'))}\n" for log in logs).encode()
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND)
        try:
            with self._locked():
                _cut_torn_tail(descriptor)
                _write_whole(descriptor, data)
            # outside of the lock, so that those who wait share one trip to the disk
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """By fcntl: the system queues those who wait, and frees the lock of a process, or node, that is gone."""
        descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._wait_for_lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _wait_for_lock(self, descriptor: int) -> None:
        with saying_so_after(SLOW_LOCK_SECONDS, self._say_who_waits):
            fcntl.lockf(descriptor, fcntl.LOCK_EX)

    def _say_who_waits(self) -> None:
        print(
            f"mgpu_slurm: waiting for the lock {str(self._lock_path)!r} for {SLOW_LOCK_SECONDS:g} s:"
            " another worker has it, or the file system hangs",
            file=sys.stderr,
            flush=True,
        )


def _cut_torn_tail(descriptor: int) -> None:
    """Takes away what follows the last line break: a writer died over it, and nobody has read it."""
    end = os.fstat(descriptor).st_size
    if end == 0 or os.pread(descriptor, 1, end - 1) == b"\n":
        return
    line_break = -1
    while end and line_break < 0:
        start = max(0, end - _BLOCK)
        line_break = os.pread(descriptor, end - start, start).rfind(b"\n")
        end = start + line_break + 1
    os.ftruncate(descriptor, end)


def _write_whole(descriptor: int, data: bytes) -> None:
    before = os.fstat(descriptor).st_size
    try:
        written = 0
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except OSError:
        os.ftruncate(descriptor, before)
        raise
