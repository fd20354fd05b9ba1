"""Warnings that ranks recorded at their start."""

from __future__ import annotations

from pathlib import Path

from mgpu_slurm.core.files import append_jsonl
from mgpu_slurm.run_folder import rank_warnings
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.rank_warnings import RankWarning


def test_warnings_of_all_attempts_and_ranks_are_found(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    for attempt, rank in ((2, 0), (1, 10), (1, 3)):
        append_jsonl(folder.rank_warnings(attempt, rank), {"rank": rank, "node": "n2", "text": "few cores"})
    folder.rank_log(1, 3).write_text("other files do not count\n")
    assert {(warned.attempt, warned.rank) for warned in rank_warnings.of_run(folder)} == {(1, 3), (1, 10), (2, 0)}


def test_same_warning_of_several_ranks_is_one_line() -> None:
    few = [RankWarning(1, rank, f"n{1 + rank // 2}", "few cores") for rank in range(4)]
    assert rank_warnings.lines([RankWarning(2, 0, "n1", "few cores"), RankWarning(1, 3, "n2", "old torch"), *few]) == [
        "ranks 0-3 on n[1-2]: few cores",
        "rank 3 on n2: old torch",
    ]
