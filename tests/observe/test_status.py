"""The table of runs, and what a group's line tells of its runs."""

from __future__ import annotations

import pytest

from mgpu_slurm import records
from mgpu_slurm.observe import status


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([0.5], "0.5"),
        ([1.0, 2.0, 3.0], "2±1"),
        # one that has diverged is not hidden behind the others, nor are the others' lines lost
        ([float("nan"), 1.0], "nan"),
        ([float("inf"), 1.0], "inf"),
        ([float("inf"), float("-inf")], "nan"),
    ],
)
def test_a_groups_metrics_are_mean_and_spread(losses: list[float], told: str) -> None:
    runs = [
        records.FIRST_STATE | {"run": f"group/{place}", "state": "COMPLETED", "metrics": {"loss": loss}}
        for place, loss in enumerate(losses)
    ]
    line = status.table(runs).splitlines()[1]
    assert line.split()[0] == "group"
    assert f"loss={told} " in line
