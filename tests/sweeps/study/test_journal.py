"""The study's journal: what is in it stays whole, whoever dies over it and however many write."""

from __future__ import annotations

import fcntl
import io
import json
import multiprocessing
import os
import re
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as some
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from mgpu_slurm.core import files, retry
from mgpu_slurm.core.errors import MgpuError
from mgpu_slurm.core.files import locked
from mgpu_slurm.sweeps.study import journal
from mgpu_slurm.sweeps.study.journal import Journal, JournalFile
from tests.support import stderr_as, wait_until

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "study.journal"
    JournalFile(made, is_new=True)
    return made


def records(path: Path) -> list[dict[str, Any]]:
    return list(JournalFile(path).read_logs(0))


def in_children(count: int, does: Callable[[int], None]) -> list[int | None]:
    """Their exit codes."""
    children = [FORK.Process(target=does, args=(child,)) for child in range(count)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    return [child.exitcode for child in children]


def test_appended_records_are_read_once_and_in_order(path: Path) -> None:
    one, other = JournalFile(path), JournalFile(path)
    one.append_logs([{"n": 0}, {"n": 1}])
    assert list(other.read_logs(0)) == [{"n": 0}, {"n": 1}]
    other.append_logs([{"n": 2}])
    assert list(other.read_logs(2)) == [{"n": 2}]
    assert list(other.read_logs(3)) == []
    # from anywhere, and again
    assert list(one.read_logs(1)) == [{"n": 1}, {"n": 2}]
    assert list(one.read_logs(0)) == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_grouped_records_are_synced_to_disk_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    one, other = JournalFile(path), JournalFile(path)
    with one.synced_once():
        one.append_logs([{"n": 0}])
        one.append_logs([{"n": 1}])
        assert list(other.read_logs(0)) == [{"n": 0}, {"n": 1}]
        assert synced == []
    whole = path.stat().st_size
    one.append_logs([{"n": 2}])
    assert synced == [whole, path.stat().st_size]


def test_concurrent_writers_lose_and_tear_no_record(path: Path) -> None:
    def write(child: int) -> None:
        own = JournalFile(path)
        for number in range(40):
            own.append_logs([{"child": child, "number": number, "text": "x" * 300 * (number % 3)}])

    assert in_children(8, write) == [0] * 8
    found = records(path)
    for child in range(8):
        assert [record["number"] for record in found if record["child"] == child] == list(range(40))


class TestKilledWriters:
    @pytest.mark.parametrize("torn", [b'{"n":', b"\0" * 70_000, b'{"n":7}'], ids=["half", "zeros", "no line break"])
    def test_torn_line_is_skipped_and_cut_off_by_the_next_writer(self, path: Path, torn: bytes) -> None:
        own = JournalFile(path)
        own.append_logs([{"n": 0}])
        with path.open("ab") as file:
            file.write(torn)
        assert list(own.read_logs(0)) == [{"n": 0}]
        own.append_logs([{"n": 1}])
        assert list(own.read_logs(1)) == [{"n": 1}]
        assert path.read_bytes() == b'{"n":0}\n{"n":1}\n'

    def test_reader_does_not_join_a_torn_line_with_the_record_that_replaces_it(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between two reads of one reader, a writer cuts off the torn line that the first one has seen."""
        own, other = JournalFile(path), JournalFile(path)
        own.append_logs([{"n": 0}])
        with path.open("ab") as file:
            file.write(b'{"op":6,"worker":"a","trial":1,')

        class Slow(io.FileIO):
            def readinto(self, buffer: Any) -> int | None:
                self._write_meanwhile()
                return super().readinto(buffer)

            def read(self, size: int | None = -1, /) -> bytes | None:
                found = super().read(-1 if size is None else size)
                self._write_meanwhile()
                return found

            def _write_meanwhile(self) -> None:
                if self.tell() > 8:
                    other.append_logs([{"op": 8, "worker": "b", "trial": 2, "value": 1}])

        monkeypatch.setattr(files, "open", lambda path, *_, **__: Slow(path), raising=False)
        monkeypatch.setattr(journal, "open", lambda path, *_, **__: io.BufferedReader(Slow(path)), raising=False)
        assert list(own.read_logs(0)) == [{"n": 0}]
        monkeypatch.undo()
        assert next(iter(own.read_logs(1))) == {"op": 8, "worker": "b", "trial": 2, "value": 1}

    def test_torn_first_line_is_cut_off_by_the_next_writer(self, path: Path) -> None:
        path.write_bytes(b'{"n"')
        JournalFile(path).append_logs([{"n": 1}])
        assert path.read_bytes() == b'{"n":1}\n'

    def test_lock_of_a_killed_writer_is_released(self, path: Path, tmp_path: Path) -> None:
        def hold(_: int) -> None:
            with locked(path.with_name(f"{path.name}.lock")):
                (tmp_path / "held").touch()
                signal.pause()

        holder = FORK.Process(target=hold, args=(0,))
        holder.start()
        wait_until((tmp_path / "held").exists)
        writer = FORK.Process(target=lambda: JournalFile(path).append_logs([{"n": 1}]))
        writer.start()
        assert records(path) == []
        holder.kill()
        writer.join(20)
        assert (writer.exitcode, records(path)) == (0, [{"n": 1}])

    def test_killed_writers_lose_no_acknowledged_record(self, path: Path, tmp_path: Path) -> None:
        told = FORK.Array("i", 6, lock=False)

        def write(child: int) -> None:
            own = JournalFile(path)
            while not (tmp_path / "over").exists():
                own.append_logs([{"child": child, "number": told[child], "text": "y" * 5000}])
                told[child] += 1

        children = [FORK.Process(target=write, args=(child,)) for child in range(6)]
        for child in children:
            child.start()
        for number in range(4):
            wait_until(lambda number=number: told[number] > 5 * number)
            children[number].kill()
        before = told[5]
        wait_until(lambda: told[5] > before)
        (tmp_path / "over").touch()
        for child in children:
            child.join()
        found = records(path)
        for child in range(6):
            written = [record["number"] for record in found if record["child"] == child]
            assert written == list(range(len(written)))
            assert len(written) >= told[child] > 0


def test_record_cut_short_by_a_full_disk_is_rolled_back(path: Path) -> None:
    # who makes it does not wait until there is room
    own = JournalFile(path, is_new=True)
    own.append_logs([{"n": 0}])
    before = path.read_bytes()
    # the system's own limit on the size of a file takes a part of the line, as a full disk does
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            own.append_logs([{"n": "x" * 100}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    own.append_logs([{"n": 1}])
    assert list(own.read_logs(0)) == [{"n": 0}, {"n": 1}]


class TestUnavailableFileSystem:
    def test_reader_waits_with_a_message_until_the_journal_is_back(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(retry, "SLOW_SECONDS", 0.0)
        own, away, found = JournalFile(path), path.with_name("away"), []
        own.append_logs([{"n": 0}])
        path.rename(away)
        reader = threading.Thread(target=lambda: found.extend(own.read_logs(0)))
        with stderr_as(path.with_name("stderr")) as stderr:
            reader.start()
            wait_until(lambda: "; trying again until " in stderr.read_text())
        assert f"mgpu_slurm: the study's journal {str(path)!r} cannot be opened (" in stderr.read_text()
        assert found == []
        away.rename(path)
        reader.join(20)
        assert found == [{"n": 0}]

    def test_missing_journal_is_an_error_and_is_not_created_again(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(retry, "SECONDS", 0.0)
        own = JournalFile(path)
        path.unlink()
        with pytest.raises(FileNotFoundError):
            list(own.read_logs(0))
        with pytest.raises(FileNotFoundError):
            own.append_logs([{"n": 0}])
        assert not path.exists()


@pytest.mark.parametrize("line", [b"not json\n", b"[1]\n", b"\xff\xfe\n"])
def test_damaged_line_is_reported_on_each_read(path: Path, line: bytes) -> None:
    path.write_bytes(b'{"n":0}\n' + line + b'{"n":2}\n')
    own = JournalFile(path)
    for _ in range(2):
        with pytest.raises(MgpuError, match="is damaged at byte 8"):
            list(own.read_logs(0))


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ('{"op_code":4,"worker_id":"w","study_id":0}', "Optuna cannot read it: KeyError: 'datetime_start'"),
        ('{"op_code":4,"op_code":8,"worker_id":"w","trial_id":0,"user_attr":{"a":1}}', "it has a key twice"),
    ],
    ids=["missing key", "duplicate key"],
)
def test_record_that_optuna_cannot_read_is_reported_on_each_read(path: Path, record: str, why: str) -> None:
    reader, writer = Journal(JournalFile(path)), Journal(JournalFile(path))
    study = optuna.create_study(storage=reader, study_name="digits")
    place = path.stat().st_size
    with path.open("a") as file:
        file.write(f"{record}\n")
    # Optuna would give this one the number of the damaged one
    JournalFile(path).append_logs([{"op_code": 4, "worker_id": "w", "study_id": 0, "datetime_start": None}])
    pattern = rf"is damaged at byte {place}: .* is not a record \({re.escape(why)}\): do not edit the file"
    for _ in range(2):
        with pytest.raises(MgpuError, match=pattern):
            study.get_trials()
        with pytest.raises(MgpuError, match=pattern):
            writer.get_all_studies()


def test_errors_with_an_intact_journal_are_optunas_own(path: Path) -> None:
    storage = Journal(JournalFile(path))
    optuna.create_study(storage=storage, study_name="digits")
    with pytest.raises(optuna.exceptions.DuplicatedStudyError):
        optuna.create_study(storage=storage, study_name="digits")
    for _ in range(2):
        with pytest.raises(KeyError, match="Record does not exist"):
            storage.set_trial_user_attr(7, "a", 1)


def test_keys_that_are_equal_in_json_are_not_damage(path: Path) -> None:
    study = optuna.create_study(storage=Journal(JournalFile(path)), study_name="digits")
    study.set_user_attr("a", {1: "x", "1": "y"})
    assert optuna.load_study(storage=Journal(JournalFile(path)), study_name="digits").user_attrs == {"a": {"1": "y"}}


def test_long_wait_for_the_lock_is_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SLOW_LOCK_SECONDS", 0.05)
    own = JournalFile(path)
    with open(f"{path}.lock", "w") as lock, stderr_as(path.with_name("stderr")) as stderr:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        writer = FORK.Process(target=lambda: own.append_logs([{"n": 1}]))
        writer.start()
        wait_until(lambda: "waiting for the lock" in stderr.read_text())
    writer.join(20)
    assert (writer.exitcode, records(path)) == (0, [{"n": 1}])


@given(some.lists(some.dictionaries(some.text(), some.floats(allow_nan=True) | some.text() | some.none()), max_size=9))
def test_any_record_round_trips(tmp_path_factory: pytest.TempPathFactory, made: list[dict[str, Any]]) -> None:
    own = JournalFile(tmp_path_factory.mktemp("any") / "study.journal", is_new=True)
    for record in made:
        own.append_logs([record])
    # as text, because NaN is not itself
    assert json.dumps(list(own.read_logs(0))) == json.dumps(made)


def test_optunas_own_backend_reads_the_same_study(path: Path) -> None:
    study = optuna.create_study(storage=JournalStorage(JournalFile(path)), study_name="digits", direction="maximize")

    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", -10, 10)
        trial.report(x, 1)
        return -(x**2)

    study.optimize(objective, n_trials=5)
    for backend in (JournalFile(path), JournalFileBackend(str(path))):
        seen = optuna.load_study(study_name="digits", storage=JournalStorage(backend))
        assert [trial.state for trial in seen.trials] == [TrialState.COMPLETE] * 5
        assert [(trial.params, trial.values) for trial in seen.trials] == [
            (trial.params, trial.values) for trial in study.trials
        ]
