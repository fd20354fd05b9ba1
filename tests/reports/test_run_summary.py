"""What is said of a run at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core.files import write_json
from mgpu_slurm.reports.run_summary import ending_lines
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
