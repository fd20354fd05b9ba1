"""The last words on a run that failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core.files import write_json
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.reports.run_summary import ending_lines

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
def test_what_failed_first_is_shown_once(
    failure: dict[str, Any], shown_rank: int | None, first: str, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "x")
    folder.create()
    write_json(folder.failure, ATTEMPT | failure)
    folder.rank_log(1, 1).write_text("said last\n")
    folder.rank_log(1, 2).touch()
    lines = ending_lines(folder.path, {"state": "FAILED", "run": "x", "reason": "", "attempts": 1}, shown_rank)
    assert lines[0].startswith(first)
    assert sum("failed first" in line for line in lines) == (first != "FAILED")
