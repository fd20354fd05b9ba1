"""What is made of a checkup that did not come to its end."""

from __future__ import annotations

from pathlib import Path

from mgpu_slurm.observe.doctor.job import ended_badly
from mgpu_slurm.paths import RunFolder

LOST = {"state": "FAILED", "reason": "lost"}


def made(path: Path) -> RunFolder:
    folder = RunFolder(path / "runs" / "doctor-1")
    folder.logs.mkdir(parents=True)
    return folder


def test_ranks_that_left_no_word_most_often_do_not_see_the_folder(tmp_path: Path) -> None:
    folder = made(tmp_path)
    folder.launch_log("42").write_text("slurmstepd: error: execve(): /opt/python: No such file or directory\n")
    found = ended_badly(folder, LOST, shown=0)
    assert (found.level, found.text) == ("failed", "the checkup ended as FAILED: lost")
    assert f"nodes do not see the runs folder {tmp_path}/runs, or this Python" in found.mend


def test_ranks_that_left_a_word_are_to_be_read(tmp_path: Path) -> None:
    folder = made(tmp_path)
    folder.rank_log(1, 0).write_text("Traceback ...\n")
    assert ended_badly(folder, LOST, shown=0).mend == f"look at the logs of the ranks in {folder.logs}"


def test_a_cancelled_checkup_is_no_fault_of_the_cluster(tmp_path: Path) -> None:
    found = ended_badly(made(tmp_path), {"state": "CANCELLED", "reason": ""}, shown=3)
    assert (found.text, found.mend) == ("the checkup ended as CANCELLED: nobody said why", "try again")
