"""A run goes on with other resources, or with its project's code as it is now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder.layout import RunFolder
from tests.support import Project, log, wait_until

TELLS = "echo $SLURM_JOB_NUM_NODES nodes: $(cat words.txt); grep -q right words.txt"


@pytest.fixture
def failed(project: Project) -> tuple[Project, Path]:
    """A project with a run that failed because of its code."""
    project.write("words.txt", "wrong\n")
    folder, facts = project.run("--", "sh", "-c", TELLS)
    assert facts["state"] == "FAILED"
    project.write("words.txt", "right\n")
    return project, folder


def resume(project: Project, folder: Path, *words: str) -> str:
    """The state in which the resumed run ended."""
    done = project.call("resume", folder.name, "--no-follow", *words)
    assert done.returncode == 0, done.stderr
    return str(project.finish(folder)["state"])


def test_it_keeps_its_own_code(failed: tuple[Project, Path]) -> None:
    project, folder = failed
    assert resume(project, folder) == "FAILED"
    assert log(folder, 0, attempt=2) == "1 nodes: wrong\n"


def test_new_code_takes_the_place_of_the_old_which_is_kept(failed: tuple[Project, Path]) -> None:
    project, folder = failed
    before = json.loads((folder / "environment.json").read_text())
    assert resume(project, folder, "--code", "new") == "COMPLETED"
    assert log(folder, 0, attempt=2) == "1 nodes: right\n"
    assert (folder / "code-1" / "words.txt").read_text() == "wrong\n"
    assert json.loads((folder / "environment.json").read_text())["digest"] != before["digest"]


def test_other_resources_are_those_of_the_next_attempt(failed: tuple[Project, Path]) -> None:
    project, folder = failed
    assert resume(project, folder, "--nodes", "2", "--time", "5", "--code", "new") == "COMPLETED"
    assert log(folder, 1, attempt=2) == "2 nodes: right\n"
    spec = read_spec(RunFolder(folder))
    # a fifth of the limit
    assert (spec.resources.nodes, spec.resources.time, spec.lead) == (2, "5", 60)
    (facts,) = project.json("status", folder.name)
    assert (facts["nodes"], facts["ranks"], facts["attempts"]) == (2, 2, 2)


def test_what_makes_it_start_again_can_be_changed(failed: tuple[Project, Path]) -> None:
    project, folder = failed
    again = ("--stuck-after", "45", "--retries", "1", "--max-requeues", "3", "--time", "10", "--signal", "USR1@30")
    assert resume(project, folder, *again) == "FAILED"
    spec = read_spec(RunFolder(folder))
    assert (spec.stuck_after, spec.retries, spec.max_requeues) == (45.0, 1, 3)
    assert (spec.signal, spec.lead) == ("USR1", 30)
    # tried once more
    (facts,) = project.json("status", folder.name)
    assert facts["attempts"] == 3


def test_a_change_that_does_not_fit_changes_nothing(project: Project) -> None:
    project.write(
        "job.py",
        """
        from dataclasses import dataclass

        @dataclass
        class Config:
            width: int = 3

        def train(run, config: Config):
            raise RuntimeError("not today")
        """,
    )
    folder, facts = project.run("job.py", "width=4")
    assert facts["state"] == "FAILED"
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    project.write("job.py", "def train(run, config: int): ...")
    for words, error in [
        (["--code", "new"], "config"),
        (["--nodes", "0"], "--nodes 0: expected a whole number of at least 1"),
        (["--time", "soon"], "--time 'soon': expected minutes"),
        (["width=5"], "width=5: a run keeps its config"),
    ]:
        done = project.call("resume", folder.name, *words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert error in done.stderr
        assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith((".", "code"))) == ["code"]


def test_a_lead_that_was_asked_for_stays(project: Project) -> None:
    """It is what a save needs, whatever the limit."""
    folder, _ = project.run("--time", "10", "--signal", "USR2@200", "--", "false")
    assert resume(project, folder, "--time", "20") == "FAILED"
    assert (read_spec(RunFolder(folder)).resources.time, read_spec(RunFolder(folder)).lead) == ("20", 200)
    done = project.call("resume", folder.name, "--time", "2")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "the lead of 200 s must be shorter than the time limit of 120 s" in done.stderr


def test_a_change_waits_for_all_that_share_it(project: Project) -> None:
    gate = project.folder / "gate"
    script = f"test {{seed}} = 0 || until test -e {gate}; do sleep 0.05; done; exit 1"
    folder = project.submit("--seeds", "2%2", "--", "sh", "-c", script)
    wait_until(lambda: project.json("status", f"{folder.name}/0")[0]["state"] == "FAILED")
    done = project.call("resume", folder.name, "--time", "5")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"run {folder.name}/1 is RUNNING, and group {folder.name} shares its resources" in done.stderr
    gate.touch()
    assert project.call("wait", folder.name).returncode == 1
    done = project.call("resume", folder.name, "--time", "5", "--json", "--no-follow")
    assert done.returncode == 0, done.stderr
    assert project.call("wait", folder.name).returncode == 1
    assert [facts["attempts"] for facts in project.json("status", folder.name)] == [2, 2]


def test_of_attempts_with_other_resources_logs_stay_and_warnings_go(project: Project) -> None:
    words = ("--nodes", "2", "--cpus-per-task", "999", "--", "sh", "-c", "echo attempt $MGPU_ATTEMPT; exit 1")
    folder, _ = project.run(*words)
    assert "requested 999 cores" in project.call("wait", folder.name).stdout
    done = project.call("resume", folder.name, "--nodes", "1", "--cpus-per-task", "1", "--follow")
    assert done.returncode == 1
    assert "warning" not in done.stdout
    assert "attempt 1\n" in project.call("logs", folder.name, "--rank", "1").stdout
    assert project.call("logs", folder.name).stderr == ""
    assert "has ranks 0 to 0" in project.call("logs", folder.name, "--rank", "2").stderr
