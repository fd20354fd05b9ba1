"""A plan, as people read it before the start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import Spec, Target
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.submission.plan import Plan, Request, make

ONE: dict[str, Any] = {"config": {"lr": 0.1, "seed": 3}}
GROUP = ONE | {"tasks": 3}
FEW_AT_A_TIME = GROUP | {"at_once": 2}
SWEEP = ONE | {"kind": "sweep", "tasks": 2, "at_once": 2}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (ONE, ["run       digits", "config    lr=0.1  seed=3"]),
        (GROUP, ["run       digits", "config    lr=0.1", "seeds     3 to 5 (3 runs)"]),
        (
            FEW_AT_A_TIME,
            ["run       digits", "config    lr=0.1", "seeds     3 to 5 (3 runs), at most 2 at a time"],
        ),
        # its workers are no runs with seeds of their own
        (SWEEP, ["study     digits", "config    lr=0.1  seed=3"]),
        ({"config": {}}, ["run       digits"]),
    ],
)
def test_plan_lists_seeds_only_for_a_group(tmp_path: Path, values: dict[str, Any], expected: list[str]) -> None:
    spec = Spec("digits", Target(function="train:train"), "slurm", Resources(), **values)
    lines = Plan(spec, RunFolder(tmp_path / "digits"), notes=(), snapshot_limit=1).lines()
    assert [line for line in lines if line.partition(" ")[0] in ("run", "study", "config", "seeds")] == expected


def test_data_to_stage_is_found_from_where_the_run_is_submitted(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "job.py").write_text("def train(run): ...\n")
    request = Request(target="job.py", executor="local", stage=("data", str(tmp_path / "job.py")))
    planned = make(request, tmp_path, tmp_path / "runs")
    assert planned.spec.stage == (str(tmp_path / "data"), str(tmp_path / "job.py"))
    assert f"stage     {tmp_path / 'data'}" in planned.lines()
    with pytest.raises(UserError, match="--stage dta: no such file or folder"):
        make(replace(request, stage=("dta",)), tmp_path, tmp_path / "runs")
