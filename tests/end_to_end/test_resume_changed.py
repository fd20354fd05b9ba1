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


def test_resume_keeps_the_original_code(failed: tuple[Project, Path]) -> None:
    project, folder = failed
    assert resume(project, folder) == "FAILED"
    assert log(folder, 0, attempt=2) == "1 nodes: wrong\n"


def test_new_code_replaces_the_old_and_the_old_is_kept(failed: tuple[Project, Path]) -> None:
    project, folder = failed
    before = json.loads((folder / "environment.json").read_text())
    assert resume(project, folder, "--code", "new") == "COMPLETED"
    assert log(folder, 0, attempt=2) == "1 nodes: right\n"
    assert (folder / "code-1" / "words.txt").read_text() == "wrong\n"
    assert json.loads((folder / "environment.json").read_text())["digest"] != before["digest"]


def test_changed_resources_apply_to_the_next_attempt(failed: tuple[Project, Path]) -> None:
    project, folder = failed
    assert resume(project, folder, "--nodes", "2", "--time", "5", "--code", "new") == "COMPLETED"
    assert log(folder, 1, attempt=2) == "2 nodes: right\n"
    spec = read_spec(RunFolder(folder))
    # a fifth of the limit
    assert (spec.resources.nodes, spec.resources.time, spec.lead) == (2, "5", 60)
    (facts,) = project.json("status", folder.name)
    assert (facts["nodes"], facts["ranks"], facts["attempts"]) == (2, 2, 2)


def test_restart_options_can_be_changed_on_resume(failed: tuple[Project, Path]) -> None:
    project, folder = failed
    again = ("--stuck-after", "45", "--retries", "1", "--max-requeues", "3", "--time", "10", "--signal", "USR1@30")
    assert resume(project, folder, *again) == "FAILED"
    spec = read_spec(RunFolder(folder))
    assert (spec.stuck_after, spec.retries, spec.max_requeues) == (45.0, 1, 3)
    assert (spec.signal, spec.lead) == ("USR1", 30)
    # tried once more
    (facts,) = project.json("status", folder.name)
    assert facts["attempts"] == 3


def test_rejected_change_leaves_the_run_folder_unchanged(project: Project) -> None:
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


def test_requested_lead_time_is_kept_on_resume(project: Project) -> None:
    """A save needs that long, whatever the time limit is."""
    folder, _ = project.run("--time", "10", "--signal", "USR2@200", "--", "false")
    assert resume(project, folder, "--time", "20") == "FAILED"
    assert (read_spec(RunFolder(folder)).resources.time, read_spec(RunFolder(folder)).lead) == ("20", 200)
    done = project.call("resume", folder.name, "--time", "2")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "the lead of 200 s must be shorter than the time limit of 120 s" in done.stderr


def test_change_is_refused_while_another_run_of_the_group_is_running(project: Project) -> None:
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


def test_resume_with_other_resources_keeps_logs_and_drops_warnings(project: Project) -> None:
    words = ("--nodes", "2", "--cpus-per-task", "999", "--", "sh", "-c", "echo attempt $MGPU_ATTEMPT; exit 1")
    folder, _ = project.run(*words)
    assert "requested 999 cores" in project.call("wait", folder.name).stdout
    done = project.call("resume", folder.name, "--nodes", "1", "--cpus-per-task", "1", "--follow")
    assert done.returncode == 1
    assert "warning" not in done.stdout
    assert "attempt 1\n" in project.call("logs", folder.name, "--rank", "1").stdout
    assert project.call("logs", folder.name).stderr == ""
    assert "has ranks 0 to 0" in project.call("logs", folder.name, "--rank", "2").stderr
