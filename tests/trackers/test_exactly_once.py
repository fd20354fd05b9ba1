"""Each report is in the tracker once, wherever the processes that send it are killed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from tests.support import REPOSITORY
from tests.trackers.run_files import add, make_run, report, save

TRACKERS = ["mlflow", "wandb"]


def make(mlflow_file: Path, tracker: str) -> RunFolder:
    place = {"mlflow": f"sqlite:///{mlflow_file}#project", "wandb": "project"}[tracker]
    return make_run(mlflow_file.with_name("run-1"), [f"{tracker}={place}"], lr=0.1, model={"width": 32})


def deaths(folder: RunFolder, where: str) -> tuple[int, dict[str, list[tuple[int, float]]]]:
    """Return how many processes were killed until all was sent, and the points of each metric in the tracker."""
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY), "WANDB_MODE": "offline", "HOME": str(folder.path)}
    command = [sys.executable, "-m", "tests.trackers.deaths", str(folder.path), where]
    done = subprocess.run(command, env=environ, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found["deaths"], {name: [(step, value) for step, value in each] for name, each in found["points"].items()}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_process_that_is_killed_after_each_report(mlflow_file: Path, tracker: str) -> None:
    folder = make(mlflow_file, tracker)
    first = [report(1), report(2, step=3, loss=0.75), report(3, loss=0.5, nan=math.nan)]
    add(folder, *first, report(4), report(5))
    save(folder, 3)
    records.update_state(folder, state="FAILED")
    count, found = deaths(folder, "report")
    assert count == len(first)
    assert values(found) == [each.metrics["loss"] for each in first]
    assert [math.isnan(value) for _, value in found["nan"]] == [True]
    # what was not in the checkpoint is repeated, with other values
    later = [report(progress, attempt=2) for progress in (4, 5, 6)]
    add(folder, *later)
    records.update_state(folder, state="COMPLETED")
    count, found = deaths(folder, "report")
    assert count == len(later)
    assert values(found) == [each.metrics["loss"] for each in (*first, *later)]
    # W&B has one row for each step
    moved = {1: 4} if tracker == "wandb" else {}
    assert found["mgpu/progress"] == [
        (moved.get(place, each.step), each.progress) for place, each in enumerate((*first, *later))
    ]


def test_a_process_that_is_killed_after_each_call_of_a_report(mlflow_file: Path) -> None:
    folder = make(mlflow_file, "mlflow")
    reports = [report(progress, a=progress, b=1 / progress, c=-progress) for progress in range(1, 4)]
    add(folder, *reports)
    records.update_state(folder, state="COMPLETED")
    count, found = deaths(folder, "call")
    assert count >= 4
    assert {name: found[name] for name in "abc"} == {
        name: [(each.step, each.metrics[name]) for each in reports] for name in "abc"
    }


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_process_that_is_killed_at_any_moment(mlflow_file: Path, tracker: str) -> None:
    folder = make(mlflow_file, tracker)
    reports = [report(progress) for progress in range(1, {"mlflow": 31, "wandb": 6}[tracker])]
    add(folder, *reports)
    records.update_state(folder, state="COMPLETED")
    count, found = deaths(folder, "moment")
    assert count >= 1
    assert found["loss"] == [(each.step, each.metrics["loss"]) for each in reports]


def values(found: dict[str, list[tuple[int, float]]]) -> list[float]:
    return [value for _, value in found["loss"]]
