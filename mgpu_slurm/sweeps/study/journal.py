"""The study's journal: one file that all workers append to, and that a worker may die over at any moment.

It takes the place of Optuna's own file backend under Optuna's `JournalStorage` and writes the same lines, so that any
tool that reads an Optuna journal reads this one. What differs: a lock that waiters get in the order in which they came,
and that ends with whoever holds it; a line that a dead writer left torn is cut off before the next one is appended,
where one stray half would make every later look at the study fail; and what a full disk does not take whole is taken
back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from optuna.exceptions import OptunaError
from optuna.storages.journal import BaseJournalBackend

from mgpu_slurm.core import retry
from mgpu_slurm.core.errors import MgpuError
from mgpu_slurm.core.files import cut_torn_tail
from mgpu_slurm.core.formatting import program
from mgpu_slurm.sweeps.optuna_adapter import CheckedJournalStorage
from mgpu_slurm.sweeps.study import journal_lines
from mgpu_slurm.sweeps.study.file_locks import locked

T = TypeVar("T")


class Journal(CheckedJournalStorage):
    """Optuna's storage in such a file. If Optuna fails over a record, the error says where that is.

    To try each record before Optuna reads it would take twice as long as to read it.
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
    """A backend of `optuna.storages.JournalStorage`. One is for one process; its calls come one at a time."""

    def __init__(self, path: Path, is_new: bool = False) -> None:
        """
        Args:
            path: absolute.
            is_new: makes it where it is not there, and does not wait for a file system that is away.
        """
        assert path.is_absolute(), path
        self._path = path
        self._seconds = 0.0 if is_new else retry.SECONDS
        self._lock_path = path.with_name(f"{path.name}.lock")
        self._read_up_to = 0
        """Offset of the first line that has not been read."""
        self._lines_read = 0
        self._unsynced: list[tuple[int, bytes]] | None = None
        """What was appended since the disk was last waited for, and where, while that is left to the end."""
        self._is_damaged = False
        if is_new:
            os.close(os.open(path, os.O_CREAT | os.O_APPEND, 0o640))

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Yields records from this one on; a line that is still being written is none yet.

        Raises:
            MgpuError: the file is damaged, and where.
            OSError: it cannot be read, and could not for long.
        """
        yield from self._patiently(lambda: self._read(log_number_from))

    def _read(self, log_number_from: int) -> list[dict[str, Any]]:
        if self._is_damaged:
            # Optuna would read on behind the record at which it failed, and number trials differently
            self.check()
        if log_number_from < self._lines_read:
            self._read_up_to = self._lines_read = 0
        place, number = self._read_up_to, self._lines_read
        found = []
        # opened each time: a network file system shows what others wrote to those who open the file after that
        with open(self._path, "rb") as file:
            file.seek(place)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                if number >= log_number_from:
                    found.append(self._record(line, place))
                place += len(line)
                number += 1
        self._read_up_to, self._lines_read = place, number
        return found

    def _record(self, line: bytes, place: int) -> dict[str, Any]:
        try:
            return journal_lines.record_of(line)
        except ValueError as error:
            raise self._damaged(line, place, str(error)) from None

    def check(self) -> None:
        """Check that Optuna can read each record; if it cannot, nothing is read from here any more.

        Raises:
            MgpuError: the file is damaged, and where.
        """
        place = 0
        with open(self._path, "rb") as file:
            for line in file:
                try:
                    journal_lines.records_of(line)
                except ValueError as error:
                    if line.endswith(b"\n"):
                        self._is_damaged = True
                        raise self._damaged(line, place, str(error)) from None
                place += len(line)

    def _damaged(self, line: bytes, place: int, why: str) -> MgpuError:
        return MgpuError(
            f"{str(self._path)!r} is damaged at byte {place}: {line[:40]!r} is no record ({why}): leave the file as it"
            f" is, `{program()} repair {self._path.parent.name}` writes a new one of what can be kept"
        )

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Appends all of these records or none.

        Raises:
            OSError: the file system does not take them, and did not for long; what it had taken is gone again.
        """
        data = "".join(f"{json.dumps(log, separators=(',', ':'))}\n" for log in logs).encode()
        self._patiently(lambda: self._append(data))

    @contextmanager
    def synced_once(self) -> Iterator[None]:
        """Within it each record is there for others at once, and all of them are on the disk at its end.

        Raises:
            MgpuError: they are gone, as where a network file system says only now that its disk is full.
            OSError: it cannot be asked, and could not for long.
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
                # to wait for it would help nobody: others have seen them
                raise MgpuError(f"{str(self._path)!r} has lost records that were in it: {error}") from None

    def _append(self, data: bytes) -> None:
        with locked(self._lock_path):
            # opened after others have written, and on the disk before they do: what a network file system asks for
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
            appended: where, and what.

        Raises:
            OSError: the records are gone, as where a network file system says only now that its disk is full.
        """
        try:
            os.fsync(descriptor)
        except OSError as error:
            with open(self._path, "rb") as file:
                for place, data in appended:
                    file.seek(place)
                    if file.read(len(data)) != data:
                        raise
            # others may have read it, so that it is not taken back
            print(f"mgpu_slurm: WARNING: {str(self._path)!r} may not be on the disk: {error}", flush=True)

    def _patiently(self, ask: Callable[[], T]) -> T:
        return retry.patiently(ask, f"the study's journal {str(self._path)!r} cannot be opened", self._seconds)
