"""What is made of a checkup that did not come to its end."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from mgpu_slurm.api import Handle
from mgpu_slurm.doctor.job_checks import ended_badly, tidy
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState

LOST = RunState(state="FAILED", reason="lost")


def made(path: Path) -> RunFolder:
    folder = RunFolder(path / "runs" / "doctor-1")
    folder.logs.mkdir(parents=True)
    return folder


def test_checkup_without_rank_logs_suggests_an_unshared_folder(tmp_path: Path) -> None:
    folder = made(tmp_path)
    folder.launch_log("42").write_text("slurmstepd: error: execve(): /opt/python: No such file or directory\n")
    found = ended_badly(folder, LOST, shown=0)
    assert (found.level, found.text) == ("failed", "the checkup ended as FAILED: lost")
    assert f"nodes do not see the runs folder {tmp_path}/runs or this Python" in found.fix


def test_failed_checkup_points_to_the_rank_logs(tmp_path: Path) -> None:
    folder = made(tmp_path)
    folder.rank_log(1, 0).write_text("Traceback ...\n")
    assert ended_badly(folder, LOST, shown=0).fix == f"look at the logs of the ranks in {folder.logs}"


def test_cancelled_checkup_suggests_trying_again(tmp_path: Path) -> None:
    found = ended_badly(made(tmp_path), RunState(state="CANCELLED"), shown=3)
    assert (found.text, found.fix) == ("the checkup ended as CANCELLED: no reason was recorded", "try again")


def test_checkup_run_that_cannot_be_deleted_is_only_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(path: Path) -> NoReturn:
        raise OSError(errno.EBUSY, "Device or resource busy", f"{path}/logs/.nfs0001")

    folder = made(tmp_path)
    records.update_state(folder, executor="local", state="COMPLETED")
    monkeypatch.setattr(shutil, "rmtree", busy)
    notes: list[str] = []
    tidy(Handle(folder), notes.append)
    (note,) = notes
    assert note.startswith("cannot delete the checkup's run doctor-1: cannot delete all of ")
    assert "/logs/.nfs0001" in note
