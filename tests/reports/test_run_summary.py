"""What is said of a run at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core.files import append_jsonl, write_json
from mgpu_slurm.reports.run_summary import RankWarning, ending_lines, rank_warnings, warning_lines
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState

ATTEMPT = {"attempt": 1, "exit_code": 1, "message": "it failed"}
RAISED = {"rank": 0, "node": "n1", "error": "ValueError", "traceback": "Traceback of rank 0\n"}


@pytest.mark.parametrize(
    ("failure", "shown_rank", "first"),
    [
        ({"who": "rank 0", **RAISED}, None, "-- rank 0 on n1 failed first:"),
        ({"who": "rank 0", **RAISED}, 1, "-- rank 0 on n1 failed first:"),
        # both ranks raised, and the process of the other one ended first
        ({"who": "rank 1", **RAISED}, 0, "FAILED"),
        ({"who": "the batch step", "traceback": "Traceback of a thread\n"}, 0, "-- the batch step failed first:"),
        ({"who": "rank 1"}, 0, "-- rank 1 failed first; the end of its log:"),
        ({"who": "rank 1"}, 1, "FAILED"),
        # it was killed before it said anything
        ({"who": "rank 2"}, 0, "FAILED"),
        ({"who": "srun"}, 0, "FAILED"),
    ],
)
def test_first_failure_is_shown_once(
    failure: dict[str, Any], shown_rank: int | None, first: str, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "x")
    folder.create()
    write_json(folder.failure, ATTEMPT | failure)
    folder.rank_log(1, 1).write_text("said last\n")
    folder.rank_log(1, 2).touch()
    shown = [] if shown_rank is None else [shown_rank]
    lines = ending_lines(folder.path, RunState(state="FAILED", run="x", attempts=1), shown)
    assert lines[0].startswith(first)
    assert sum("failed first" in line for line in lines) == (first != "FAILED")


def test_traceback_that_was_already_shown_is_not_repeated(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "x")
    folder.create()
    write_json(folder.failure, ATTEMPT | {"who": "rank 0"} | RAISED)
    write_json(folder.rank_failure(1, 1), ATTEMPT | RAISED | {"rank": 1})
    lines = ending_lines(folder.path, RunState(state="FAILED", run="x", attempts=1), shown_ranks=[1])
    assert lines[0] == "-- rank 0 on n1 failed first, in the same way"
    assert not any("Traceback" in line for line in lines)


def test_warnings_of_all_attempts_and_ranks_are_found(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    for attempt, rank in ((2, 0), (1, 10), (1, 3)):
        append_jsonl(folder.rank_warnings(attempt, rank), {"rank": rank, "node": "n2", "text": "few cores"})
    folder.rank_log(1, 3).write_text("other files do not count\n")
    assert {(warned.attempt, warned.rank) for warned in rank_warnings(folder)} == {(1, 3), (1, 10), (2, 0)}


def test_same_warning_of_several_ranks_is_one_line() -> None:
    few = [RankWarning(1, rank, f"n{1 + rank // 2}", "few cores") for rank in range(4)]
    assert warning_lines([RankWarning(2, 0, "n1", "few cores"), RankWarning(1, 3, "n2", "old torch"), *few]) == [
        "ranks 0-3 on n[1-2]: few cores",
        "rank 3 on n2: old torch",
    ]
