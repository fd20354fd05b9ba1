"""Runs that are submitted together, one per seed, on the local executor."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import Project, processes_of, wait_until

SAYS_SEED = "echo seed {seed} of $MGPU_RUN_FOLDER; exit $(({seed} == 1))"


def group(project: Project, seeds: str, script: str, *words: str) -> Path:
    return project.submit("--seeds", seeds, *words, "--", "sh", "-c", script)


def until(gate: Path) -> str:
    return f"until test -e {gate}; do sleep 0.05; done"


def states(project: Project, name: str) -> list[str]:
    return [facts["state"] for facts in project.json("status", name)]


def test_each_seed_is_its_own_run_and_the_group_summarizes_all(project: Project) -> None:
    folder = group(project, "3", SAYS_SEED)
    done = project.call("wait", folder.name)
    assert done.returncode == 1
    assert "3 runs: 2 COMPLETED, 1 FAILED" in done.stdout
    runs = project.json("status", folder.name)
    assert [facts["run"] for facts in runs] == [f"{folder.name}/{seed}" for seed in range(3)]
    assert {facts["group"] for facts in runs} == {folder.name}
    assert [facts["state"] for facts in runs] == ["COMPLETED", "FAILED", "COMPLETED"]
    for seed in range(3):
        said = project.call("logs", f"{folder.name}/{seed}").stdout
        assert said == f"seed {seed} of {folder / 'tasks' / str(seed)}\n"
    followed = project.call("logs", folder.name, "--follow")
    assert (followed.returncode, followed.stderr) == (0, "")
    assert f"-- {folder.name}/1  FAILED: " in followed.stdout
    assert "3 runs: 2 COMPLETED, 1 FAILED" in followed.stdout
    # one line in the list of all runs
    assert [line.split()[0] for line in project.call("status").stdout.splitlines()] == ["RUN", folder.name]


def test_resume_starts_only_runs_that_did_not_complete(project: Project) -> None:
    mark = project.folder / "second-time"
    folder = group(project, "3", f"test {{seed}} != 1 || test -e {mark}")
    project.call("wait", folder.name)
    assert states(project, folder.name) == ["COMPLETED", "FAILED", "COMPLETED"]
    mark.touch()
    assert project.call("resume", folder.name, "--no-follow").returncode == 0
    assert project.call("wait", folder.name).returncode == 0
    assert [facts["attempts"] for facts in project.json("status", folder.name)] == [1, 2, 1]
    again = project.call("resume", folder.name)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "has already completed: submit a new run" in again.stderr


def test_concurrency_limit_is_kept_and_cancel_ends_all_runs(project: Project) -> None:
    folder = group(project, "4%2", "exec sleep 60{seed}")
    wait_until(lambda: states(project, folder.name).count("RUNNING") == 2)
    assert sorted(states(project, folder.name)) == ["PENDING", "PENDING", "RUNNING", "RUNNING"]
    # one that waits for its turn, then all
    assert project.call("cancel", f"{folder.name}/3").returncode == 0
    assert states(project, folder.name)[3] == "CANCELLED"
    assert project.call("cancel", folder.name).returncode == 0
    assert project.call("wait", folder.name).returncode == 1
    assert states(project, folder.name) == ["CANCELLED"] * 4


def test_running_group_cannot_be_resumed_until_it_has_ended(project: Project) -> None:
    gate = project.folder / "gate"
    folder = group(project, "4%1", f"test {{seed}} != 0 || test $MGPU_ATTEMPT = 2 || exit 1; {until(gate)}")
    wait_until(lambda: states(project, folder.name)[:2] == ["FAILED", "RUNNING"])
    for name in (folder.name, f"{folder.name}/0"):
        done = project.call("resume", name, "--no-follow")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"group {folder.name} is running" in done.stderr
        assert f"cancel {folder.name}` first" in done.stderr
    assert states(project, folder.name) == ["FAILED", "RUNNING", "PENDING", "PENDING"]
    gate.touch()
    project.call("wait", folder.name)
    assert project.call("resume", folder.name, "--no-follow").returncode == 0
    assert project.call("wait", folder.name).returncode == 0
    assert [facts["attempts"] for facts in project.json("status", folder.name)] == [2, 1, 1, 1]


def test_ended_group_from_another_host_can_be_resumed(project: Project) -> None:
    gate = project.folder / "gate"
    folder = group(project, "2", f"test -e {gate} # {{seed}}")
    project.call("wait", folder.name)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"host": "elsewhere"}))
    gate.touch()
    assert project.call("resume", folder.name, "--no-follow").returncode == 0
    assert project.call("wait", folder.name).returncode == 0


def test_cancel_while_a_run_is_being_started_takes_effect(project: Project) -> None:
    gate = project.folder / "gate"
    folder = group(project, "2%1", f"{until(gate)} # {{seed}}")
    wait_until(lambda: states(project, folder.name) == ["RUNNING", "PENDING"])
    second = folder / "tasks" / "1"
    second.mkdir()
    # as a cancel leaves it that looked a moment before the run was given to its supervisor
    (second / "cancel").touch()
    gate.touch()
    project.call("wait", folder.name)
    facts = project.json("status", folder.name)
    assert [(each["state"], each["attempts"]) for each in facts] == [("COMPLETED", 1), ("CANCELLED", 0)]
    # and it is over with that
    assert project.call("resume", f"{folder.name}/1", "--no-follow").returncode == 0
    assert project.call("wait", folder.name).returncode == 0


def test_group_seeds_count_up_from_the_seed_in_the_config(project: Project) -> None:
    project.write(
        "job.py",
        """
        from dataclasses import dataclass

        @dataclass
        class Config:
            seed: int = 0

        def train(run, config: Config):
            return {"seed": config.seed}
        """,
    )
    done = project.call("submit", "--executor", "local", "job.py", "--seeds", "2", "seed=7")
    assert done.returncode == 0, done.stderr
    (folder,) = project.runs.iterdir()
    results = [json.loads((folder / "tasks" / str(task) / "result.json").read_text()) for task in range(2)]
    assert [result["result"] for result in results] == [{"seed": 7.0}, {"seed": 8.0}]
    assert f"{folder.name}/1  COMPLETED" in done.stdout


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--seeds", "3", "--", "true"], "the command does not use the seed; write {seed}"),
        (["--seeds", "0", "--", "true", "{seed}"], "--seeds '0': expected a number of runs"),
        (["--seeds", "3%", "--", "true", "{seed}"], "--seeds '3%': expected a number of runs"),
    ],
)
def test_unused_or_invalid_seeds_are_refused(project: Project, words: list[str], error: str) -> None:
    done = project.call("submit", "--executor", "local", *words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert error in done.stderr
    assert not project.runs.exists() or not list(project.runs.iterdir())


def test_logs_needs_a_single_run_and_clean_needs_the_whole_group(project: Project) -> None:
    folder = group(project, "2", "true {seed}")
    project.call("wait", folder.name)
    for words, error in [
        (["logs", folder.name], f"is a group of 2 runs: name one of them, such as {folder.name}/0"),
        (["logs", f"{folder.name}/2"], f"has runs {folder.name}/0 to {folder.name}/1, not 2"),
        (["clean", "--yes", f"{folder.name}/1"], f"is part of group {folder.name}"),
    ]:
        done = project.call(*words)
        assert done.returncode == 2, words
        assert error in done.stderr
    # what its runs share is counted once
    assert [line.split()[0] for line in project.call("clean").stdout.splitlines()[:2]] == ["RUN", folder.name]
    assert project.call("clean", "--yes", folder.name).returncode == 0
    assert not folder.exists()


class TestAfter:
    def facts(self, project: Project, folder: Path) -> dict[str, Any]:
        (facts,) = project.json("status", folder.name)
        return dict(facts)

    def test_run_starts_after_the_other_run_has_completed(self, project: Project) -> None:
        gate = project.folder / "gate"
        first = project.submit("--", "sh", "-c", f"until test -e {gate}; do sleep 0.05; done; date +%s%N > {gate}")
        second = project.submit("--after", first.name, "--", "sh", "-c", f"cat {gate}")
        assert self.facts(project, second)["state"] == "PENDING"
        gate.touch()
        assert project.finish(second)["state"] == "COMPLETED"
        # the first had written its last word
        assert project.call("logs", second.name).stdout.strip().isdigit()

    def test_run_after_a_failed_run_is_cancelled_unless_after_any(self, project: Project) -> None:
        gate = project.folder / "gate"
        first = project.submit("--", "sh", "-c", f"until test -e {gate}; do sleep 0.05; done; false")
        strict = project.submit("--after", first.name, "--", "true")
        lax = project.submit("--after-any", first.name, "--", "true")
        gate.touch()
        facts = project.finish(strict)
        assert (facts["state"], facts["attempts"]) == ("CANCELLED", 0)
        assert facts["reason"] == f"waited for run {first.name}, which is FAILED"
        told = project.json("why", strict.name)[0]["why"]
        assert (told["cause"], told["error"]) == ("dependency", facts["reason"])
        assert told["words"] == "the run it waited for did not complete"
        assert project.finish(lax)["state"] == "COMPLETED"

    def test_cancel_ends_the_wait(self, project: Project) -> None:
        first = project.submit("--", "sleep", "600")
        second = project.submit("--after", first.name, "--", "true")
        assert f"{second.name}: cancelled; continue later" in project.call("cancel", second.name).stdout
        assert project.finish(second)["state"] == "CANCELLED"
        assert f"resume {second.name}` submits it again" in project.call("why", second.name).stdout
        assert project.call("logs", second.name).stderr.endswith("has printed nothing; the run is CANCELLED\n")
        project.call("cancel", first.name)
        assert project.finish(first)["state"] == "CANCELLED"

    @pytest.mark.parametrize("runs", [("",), ("/0", "/1", "/2")], ids=["whole", "run by run"])
    def test_waiting_group_cancelled_and_resumed_starts_each_run_once(
        self, project: Project, runs: tuple[str, ...]
    ) -> None:
        gate, marks = project.folder / "gate", project.folder / "marks"
        first = project.submit("--", "sh", "-c", until(gate))
        folder = group(project, "3", f"echo {{seed}} >> {marks}", "--after", first.name)
        assert project.call("cancel", *(f"{folder.name}{run}" for run in runs)).returncode == 0
        assert states(project, folder.name) == ["CANCELLED"] * 3
        assert project.call("resume", folder.name, "--no-follow").returncode == 0
        assert states(project, folder.name) == ["PENDING"] * 3
        wait_until(lambda: len(processes_of(folder)) == 1)
        gate.touch()
        assert project.call("wait", folder.name).returncode == 0
        assert sorted(marks.read_text().split()) == ["0", "1", "2"]
        assert [facts["attempts"] for facts in project.json("status", folder.name)] == [1, 1, 1]

    def test_dependency_on_a_deleted_run_cancels_with_advice(self, project: Project) -> None:
        first = project.submit("--", "sleep", "600")
        waiting = [project.submit("--after", first.name, "--", "true")]
        waiting.append(group(project, "2", "true {seed}", "--after", first.name))
        project.call("cancel", *(folder.name for folder in (first, *waiting)))
        project.finish(first)
        assert project.call("clean", "--yes", first.name).returncode == 0
        for folder in waiting:
            project.call("wait", folder.name)
            assert project.call("resume", folder.name, "--no-follow").returncode == 0
            project.call("wait", folder.name)
            for facts in project.json("status", folder.name):
                assert (facts["state"], facts["attempts"]) == ("CANCELLED", 0)
                assert f"there is no run '{first.name}'" in facts["reason"]
                assert facts["reason"].endswith("submit it again without --after")
            told = project.json("why", folder.name)[0]["why"]
            assert (told["cause"], told["words"]) == ("dependency-gone", "the run it waited for is gone")

    def test_resumed_group_whose_runs_have_started_does_not_wait_again(self, project: Project) -> None:
        first, _ = project.run("--", "true")
        mark = project.folder / "second-time"
        folder = group(project, "3%1", f"test -e {mark} # {{seed}}", "--after", first.name)
        project.call("wait", folder.name)
        assert states(project, folder.name) == ["FAILED"] * 3
        assert project.call("clean", "--yes", first.name).returncode == 0
        mark.touch()
        # as one that never got its turn
        shutil.rmtree(folder / "tasks" / "2")
        for name in (f"{folder.name}/0", folder.name):
            assert project.call("resume", name, "--no-follow").returncode == 0
            project.call("wait", name)
        assert states(project, folder.name) == ["COMPLETED"] * 3

    @pytest.mark.parametrize("damage", ["a torn file", "a folder in its place"])
    def test_dependency_with_unreadable_state_is_waited_for(self, project: Project, damage: str) -> None:
        gate = project.folder / "gate"
        first = project.submit("--", "sh", "-c", until(gate))
        wait_until(lambda: self.facts(project, first)["state"] == "RUNNING")
        state, kept = first / "state.json", first / "kept"
        state.rename(kept)
        if damage == "a torn file":
            state.write_text("{")
        else:
            state.mkdir()
        second = project.submit("--after", first.name, "--", "true")
        # it is there to hear of a cancel, after a look at the least
        assert project.call("cancel", second.name).returncode == 0
        facts = project.finish(second)
        assert (facts["state"], facts["reason"]) == ("CANCELLED", "cancelled")
        assert project.call("resume", second.name, "--no-follow").returncode == 0
        if state.is_dir():
            state.rmdir()
        kept.rename(state)
        gate.touch()
        assert project.finish(second)["state"] == "COMPLETED"

    def test_dependency_on_an_unknown_run_is_an_error(self, project: Project) -> None:
        done = project.call("submit", "--executor", "local", "--after", "nothing", "--", "true")
        assert done.returncode == 2
        # as it was called
        assert done.stderr == f"mgpu-slurm: there is no run 'nothing': see `{sys.executable} -m mgpu_slurm status`\n"
