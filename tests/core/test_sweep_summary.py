from __future__ import annotations

import json

import pytest

from mgpu_slurm.core.sweep_summary import SweepOver, SweepSummary, TrialSummary
from tests.support import REPOSITORY

TRIAL = TrialSummary(
    number=3, state="COMPLETE", value=0.5, progress=10, params={"lr": 0.1, "sizes": [8, 8]}, seconds=1.5, reason=""
)
OVER = SweepOver(reason="2 of 2 hours are over", failed=False)


@pytest.mark.parametrize(
    "summary",
    [
        SweepSummary(),
        SweepSummary(study="s", metric="loss", best=TRIAL, known=(TRIAL,), over=OVER),
        # of a newer version
        SweepSummary(study="s", others={"new": 1}),
    ],
)
def test_a_summary_is_the_same_after_json(summary: SweepSummary) -> None:
    assert SweepSummary.from_json(json.loads(json.dumps(summary.to_json()))) == summary


def test_the_file_of_version_0_1_has_these_fields() -> None:
    record = json.loads((REPOSITORY / "tests/version_0_1/runs/search/summary.json").read_text())
    summary = SweepSummary.from_json(record)
    assert (summary.best, summary.recent[0].number) == (summary.recent[0], 0)
    assert json.loads(json.dumps(summary.to_json())) == record
