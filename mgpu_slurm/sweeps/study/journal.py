"""The study's journal: one file to which all workers append, and which survives a worker's death at any moment.

It replaces Optuna's file backend for `JournalStorage` and writes the same lines, so that any tool that reads an Optuna
journal can read it. The differences: the lock is granted in the order of arrival, and released when its holder dies; a
torn line of a dead writer is cut off before the next one is appended, since it would make every later read of the study
fail; and records that a full disk accepts only in part are removed again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from optuna.exceptions import OptunaError
from optuna.storages.journal import BaseJournalBackend

from mgpu_slurm.core import log_lines, retry
from mgpu_slurm.core.errors import MgpuError
from mgpu_slurm.core.files import complete_lines, cut_torn_tail, locked
from mgpu_slurm.core.formatting import program
from mgpu_slurm.sweeps.optuna_adapter import CheckedJournalStorage
from mgpu_slurm.sweeps.study import journal_lines
from mgpu_slurm.sweeps.study.journal_lines import Content

T = TypeVar("T")


class Journal(CheckedJournalStorage):
    """Optuna's storage in such a file. If Optuna fails to read a record, the error states its position.

    Checking each record before Optuna reads it would take twice as long as reading it.
    """

    def __init__(self, file: JournalFile) -> None:
        self._file = file
        super().__init__(file)

    def read_new(self, read: Callable[[], None]) -> None:
        try:
            read()
        except (MgpuError, OptunaError, OSError):
            raise
        except Exception:
            self._file.check()
            raise


class JournalFile(BaseJournalBackend):
    """A backend of `optuna.storages.JournalStorage`. For one process, which calls it from one thread at a time."""

    def __init__(self, path: Path, is_new: bool = False) -> None:
        """
        Args:
            path: absolute path.
            is_new: create the file if it does not exist, and do not wait for an unavailable file system.
        """
        assert path.is_absolute(), path
        self._path = path
        self._seconds = 0.0 if is_new else retry.SECONDS
        self._lock_path = path.with_name(f"{path.name}.lock")
        self._read_up_to = 0
        """Offset of the first unread line."""
        self._lines_read = 0
        self._unsynced: list[tuple[int, bytes]] | None = None
        """Offsets and data appended since the last sync, inside `synced_once`; else None."""
        self._is_damaged = False
        if is_new:
            os.close(os.open(path, os.O_CREAT | os.O_APPEND, 0o640))

    def read_logs(self, log_number_from: int) -> Iterator[Content]:
        """Yield records from this number on; an incomplete last line is skipped.

        Raises:
            MgpuError: the file is damaged; the message states where.
            OSError: the file could not be read for too long.
        """
        yield from self._patiently(lambda: self._read(log_number_from))

    def _read(self, log_number_from: int) -> list[Content]:
        if self._is_damaged:
            # Optuna would continue after the record at which it failed, and number trials differently
            self.check()
        if log_number_from < self._lines_read:
            self._read_up_to = self._lines_read = 0
        place, number = self._read_up_to, self._lines_read
        found = []
        for line in complete_lines(self._path, place):
            if number >= log_number_from:
                found.append(self._content(line, place))
            place += len(line) + 1
            number += 1
        self._read_up_to, self._lines_read = place, number
        return found

    def _content(self, line: bytes, place: int) -> Content:
        try:
            return journal_lines.content_of(line)
        except ValueError as error:
            raise self._damaged(line, place, str(error)) from None

    def check(self) -> None:
        """Check that Optuna can read each record; if it cannot, this object reads no more records.

        Raises:
            MgpuError: the file is damaged; the message states where.
        """
        place = 0
        for line in complete_lines(self._path):
            try:
                journal_lines.records_of(line)
            except ValueError as error:
                self._is_damaged = True
                raise self._damaged(line, place, str(error)) from None
            place += len(line) + 1

    def _damaged(self, line: bytes, place: int, why: str) -> MgpuError:
        return MgpuError(
            f"{str(self._path)!r} is damaged at byte {place}: {line[:40]!r} is not a record ({why}): do not edit"
            f" the file, `{program()} repair {self._path.parent.name}` writes a new one with what can be kept"
        )

    def append_logs(self, logs: list[Content]) -> None:
        """Append all of these records or none.

        Raises:
            OSError: the file system did not accept them for too long; partly written ones are removed.
        """
        data = "".join(f"{json.dumps(log, separators=(',', ':'))}\n" for log in logs).encode()
        self._patiently(lambda: self._append(data))

    @contextmanager
    def synced_once(self) -> Iterator[None]:
        """Make records visible to others at once, but sync all of them to disk only at the end.

        Raises:
            MgpuError: records are lost, as when a network file system reports only now that its disk is full.
            OSError: the file could not be opened for too long.
        """
        unsynced = self._unsynced = []
        try:
            yield
        finally:
            self._unsynced = None
            self._patiently(lambda: self._sync_all(unsynced))

    def _sync_all(self, appended: list[tuple[int, bytes]]) -> None:
        with open(self._path, "rb") as file:
            try:
                self._sync(file.fileno(), appended)
            except OSError as error:
                # waiting does not help: others have seen the records
                raise MgpuError(f"{str(self._path)!r} has lost records that were in it: {error}") from None

    def _append(self, data: bytes) -> None:
        with locked(self._lock_path):
            # opened after others have written, and synced before they write again: network file systems need that
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND)
            try:
                cut_torn_tail(descriptor)
                self._write_whole(descriptor, data)
            finally:
                os.close(descriptor)

    def _write_whole(self, descriptor: int, data: bytes) -> None:
        before = os.fstat(descriptor).st_size
        try:
            written = 0
            while written < len(data):
                written += os.write(descriptor, data[written:])
            if self._unsynced is None:
                self._sync(descriptor, [(before, data)])
            else:
                self._unsynced.append((before, data))
        except OSError:
            os.ftruncate(descriptor, before)
            raise

    def _sync(self, descriptor: int, appended: Sequence[tuple[int, bytes]]) -> None:
        """
        Args:
            appended: offsets and data.

        Raises:
            OSError: records are lost, as when a network file system reports only now that its disk is full.
        """
        try:
            os.fsync(descriptor)
        except OSError as error:
            with open(self._path, "rb") as file:
                for place, data in appended:
                    file.seek(place)
                    if file.read(len(data)) != data:
                        raise
            # not removed again, as others may have read it
            log_lines.warn(f"{str(self._path)!r} may not be on the disk: {error}")

    def _patiently(self, ask: Callable[[], T]) -> T:
        return retry.while_unavailable(ask, f"the study's journal {str(self._path)!r} cannot be opened", self._seconds)
