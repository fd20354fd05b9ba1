"""Runs, checkpoints and studies of version 0.1 can be read, diagnosed, resumed and continued."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_slurm.core.files import read_json
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from tests.support import REPOSITORY, Project, restore_version_0_1


@pytest.fixture
def old(project: Project) -> dict[str, Path]:
    return restore_version_0_1(project)


def result_of(folder: Path) -> dict[str, float]:
    return dict(json.loads((folder / "result.json").read_text())["result"])


def test_status_shows_the_states_of_old_runs(project: Project, old: dict[str, Path]) -> None:
    states = {facts["run"].partition("-")[0]: facts["state"] for facts in project.json("status")}
    ended = {"completed": "COMPLETED", "stopped": "CANCELLED", "failed": "FAILED", "group": "COMPLETED"}
    assert states.items() >= (ended | {"search": "COMPLETED", "pickled": "COMPLETED"}).items()


def test_why_and_logs_show_the_error_of_an_old_run(project: Project, old: dict[str, Path]) -> None:
    done = project.call("why", old["failed"].name)
    assert done.returncode == 0
    assert "ValueError: the data is broken" in done.stdout
    assert "ValueError: the data is broken" in project.call("logs", old["failed"].name).stdout


def test_curves_of_an_old_group_are_averaged(project: Project, old: dict[str, Path]) -> None:
    (group,) = project.json("aggregate", old["group"].name)["groups"]
    assert (group["metrics"]["loss"]["step"], group["metrics"]["loss"]["count"]) == (16, 2)


def test_resumed_old_run_has_the_result_of_an_uninterrupted_one(project: Project, old: dict[str, Path]) -> None:
    assert project.call("resume", old["stopped"].name, "--no-follow").returncode == 0
    facts = project.finish(old["stopped"])
    assert (facts["state"], facts["attempts"]) == ("COMPLETED", 2)
    assert result_of(old["stopped"]) == result_of(old["completed"])


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="Python 3.11 has pickled the function")
def test_old_pickled_function_loads_on_resume(project: Project, old: dict[str, Path]) -> None:
    """Its annotations name modules of that version."""
    records.update_state(RunFolder(old["pickled"]), state="FAILED")
    (old["pickled"] / "result.json").unlink()
    assert project.call("resume", old["pickled"].name, "--no-follow").returncode == 0
    assert project.finish(old["pickled"])["state"] == "COMPLETED"
    assert result_of(old["pickled"]) == {"answer": 0.5}


def test_function_pickled_by_another_python_is_refused(project: Project, old: dict[str, Path]) -> None:
    """Its bytecode might end the process."""
    records.update_state(RunFolder(old["pickled"]), state="FAILED")
    facts = read_json(old["pickled"] / "environment.json")
    (old["pickled"] / "environment.json").write_text(json.dumps(facts | {"python": {"version": "3.9.18"}}))
    project.call("resume", old["pickled"].name, "--no-follow")
    reason = project.finish(old["pickled"])["reason"]
    assert "the function of this run was pickled by Python 3.9.18, and Python 3." in reason


def test_old_study_continues(project: Project, old: dict[str, Path]) -> None:
    before = {name: (old["search"] / f"trials/{name}/result.json").read_text() for name in range(4)}
    best = project.json("best", "search")
    assert project.call("sweep", "sweep.yaml", "--executor", "local", "trials=6").returncode == 0
    (facts,) = project.json("status", "search")
    assert (facts["state"], sum(facts["trials"].values())) == ("COMPLETED", 6)
    assert {name: (old["search"] / f"trials/{name}/result.json").read_text() for name in range(4)} == before
    assert project.json("best", "search")["value"] <= best["value"]


@pytest.mark.parametrize(
    ("old_name", "part"),
    [
        ("mgpu_slurm.runtime.batch", "batch"),
        ("mgpu_slurm.runtime.entry", "rank"),
        ("mgpu_slurm.sweeping.worker", "worker"),
    ],
)
def test_old_module_names_start_the_same_programs(old_name: str, part: str, tmp_path: Path) -> None:
    def ends(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-m", *words, str(tmp_path / "nowhere"), "--token", "x"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr.splitlines()[-1]

    code, said = ends(old_name)
    # without the run and the variables that a job has, each ends with an error of its own
    assert code != 0
    assert (code, said) == ends("mgpu_slurm.job", part)
