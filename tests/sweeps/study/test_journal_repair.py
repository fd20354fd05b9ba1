"""Journals that are damaged: the file stays as it is, and each trial of the repaired one has what was its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial

from mgpu_slurm.core.errors import MgpuError, UserError
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.study.journal_repair import repair
from tests.sweeps.sweeps import begin, finish, make, study_of, worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Of a sweep whose trials have the value of their parameter; the last one runs."""
    made = make(tmp_path_factory.mktemp("sweep"), trials=9)
    part = worker(made, 0)
    for _ in range(2):
        x = begin(part).values["x"]
        part.report(1, {"score": x})
        finish(part, x)
    begin(part)
    return made


@pytest.fixture
def content(folder: RunFolder) -> Iterator[bytes]:
    kept = folder.journal.read_bytes()
    yield kept
    folder.journal.write_bytes(kept)


def trials_of(path: Path) -> list[FrozenTrial]:
    """As Optuna itself reads them."""
    return optuna.load_study(storage=JournalStorage(JournalFileBackend(str(path))), study_name="s").trials


def repaired(folder: RunFolder, damaged: bytes) -> list[FrozenTrial]:
    folder.journal.write_bytes(damaged)
    repair(folder)
    assert folder.journal.read_bytes() == damaged
    return trials_of(folder.journal.with_name("study.journal.repaired"))


def check_each_has_its_own(found: list[FrozenTrial], before: list[FrozenTrial]) -> None:
    for trial, own in zip(found, before, strict=False):
        assert trial.params in ({}, own.params)
        assert trial.value in (None, own.value)
        assert set(trial.intermediate_values.items()) <= set(own.intermediate_values.items())


HOW = {
    "zeros": lambda line: bytes(len(line)),
    "cut": lambda line: line[:30],
    "joined": lambda line: line + b"{",
    "garbage": lambda line: b"\xff\xfe",
}


@pytest.mark.parametrize("how", HOW)
def test_damaged_line_loses_only_its_own_record(folder: RunFolder, content: bytes, how: str) -> None:
    before = trials_of(folder.journal)
    lines = content.split(b"\n")[:-1]
    for place in range(len(lines)):
        damaged = [*lines[:place], HOW[how](lines[place]), *lines[place + 1 :], b""]
        found = repaired(folder, b"\n".join(damaged))
        assert len(found) == len(before), lines[place]
        check_each_has_its_own(found, before)
        lost = [trial for trial, own in zip(found, before, strict=True) if trial.value != own.value]
        # it has no end only if that is what was lost
        assert bool(lost) == (b'"op_code":6' in lines[place])


def with_one_name_less(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in record:
        yield {other: value for other, value in record.items() if other != name}


def with_another_operation(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    # not 1, by which Optuna would delete the study, and 10, which it passes over: that is no damage to it
    for operation in (0, *range(2, 10), 64, -1, "4", None, []):
        if operation != record["op_code"]:
            yield record | {"op_code": operation}


def with_another_value(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    # by another name it is another study
    for name in record.keys() - {"op_code", "worker_id", "study_name"}:
        for value in ("2026-13-01", {"name": "x"}, [], 77, None):
            yield record | {name: value}


Changes = Callable[[dict[str, Any]], Iterator[dict[str, Any]]]


@pytest.mark.parametrize("changes", [with_one_name_less, with_another_operation, with_another_value])
def test_record_that_optuna_cannot_read_loses_only_itself(folder: RunFolder, content: bytes, changes: Changes) -> None:
    before = trials_of(folder.journal)
    lines = content.split(b"\n")[:-1]
    named = 0
    for place, line in enumerate(lines):
        for changed in changes(json.loads(line)):
            damaged = b"\n".join([*lines[:place], json.dumps(changed).encode(), *lines[place + 1 :], b""])
            folder.journal.write_bytes(damaged)
            try:
                study_of(folder)
            except MgpuError as error:
                # what is read without an error, Optuna can read
                named += 1
                (told,) = str(error).splitlines()
                assert f"is damaged at byte {sum(len(each) + 1 for each in lines[:place])}: " in told
                assert told.endswith(" repair s` writes a new one with what can be kept")
                found = repaired(folder, damaged)
                assert len(found) == len(before), changed
                check_each_has_its_own(found, before)
                lost = [trial for trial, own in zip(found, before, strict=True) if trial.value != own.value]
                assert bool(lost) == (b'"op_code":6' in line)
    assert named >= len(lines)


def test_two_merged_records_lose_only_themselves(folder: RunFolder, content: bytes) -> None:
    before = trials_of(folder.journal)
    places = [place for place in range(len(content)) if content.startswith(b"}\n{", place)]
    for place in places:
        damaged = content[:place] + b"," + content[place + 3 :]
        folder.journal.write_bytes(damaged)
        with pytest.raises(MgpuError, match=r"is damaged at byte \d+: .* \(it has a key twice\): "):
            study_of(folder)
        found = repaired(folder, damaged)
        assert len(found) == len(before)
        check_each_has_its_own(found, before)
    assert len(places) == content.count(b"\n") - 1


def test_repaired_journal_is_not_damaged(folder: RunFolder, content: bytes) -> None:
    lines = content.split(b"\n")[:-1]
    created = [place for place, line in enumerate(lines) if json.loads(line)["op_code"] == 4]
    lines[0] = lines[created[1]] = b""
    repaired(folder, b"\n".join([*lines, b""]))
    copy = folder.journal.with_name("study.journal.repaired")
    folder.journal.write_bytes(copy.read_bytes())
    copy.unlink()
    assert repair(folder)[0].endswith("study.journal is not damaged: nothing was written")


def test_two_damaged_lines_do_not_mix_up_trials(folder: RunFolder, content: bytes) -> None:
    before = trials_of(folder.journal)
    lines = content.split(b"\n")[:-1]
    for first in range(len(lines)):
        for second in range(first + 1, len(lines)):
            damaged = list(lines)
            damaged[first], damaged[second] = b"\0" * 8, b"\0" * 8
            found = repaired(folder, b"\n".join([*damaged, b""]))
            assert len(found) <= len(before)
            check_each_has_its_own(found, before)


def test_two_records_on_one_line_are_both_kept(folder: RunFolder, content: bytes) -> None:
    before = trials_of(folder.journal)
    found = repaired(folder, content.replace(b"}\n{", b"}{", 3))
    assert found == before


def test_error_names_the_repair_command_and_its_result_works(folder: RunFolder, content: bytes) -> None:
    lines = content.split(b"\n")[:-1]
    created = [place for place, line in enumerate(lines) if json.loads(line)["op_code"] == 4]
    lines[created[1]] = bytes(80)
    folder.journal.write_bytes(b"\n".join([*lines, b""]))
    with pytest.raises(MgpuError, match=r"is damaged at byte \d+: .*: do not edit the file, `.* repair s` writes a"):
        study_of(folder)
    told = repair(folder)
    assert [line.split()[0] for line in told] == ["damaged", "written", "next", "resume"]
    assert "1 trial created again whose creation was lost" in told[1]
    folder.journal.with_name("study.journal.repaired").replace(folder.journal)
    assert begin(worker(folder, 1)).number == 3


def test_intact_journal_is_not_rewritten(folder: RunFolder, tmp_path: Path) -> None:
    (told,) = repair(folder)
    assert told.endswith("study.journal is not damaged: nothing was written")
    assert not folder.journal.with_name("study.journal.repaired").exists()
    with pytest.raises(UserError, match="is not a sweep"):
        repair(RunFolder(tmp_path))
