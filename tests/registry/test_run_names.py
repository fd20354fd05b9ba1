"""Names that stand for runs, and those that a shell completes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.registry import lookup
from mgpu_slurm.registry.run_names import completions
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from tests.support import Project, wait_until


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty runs folder, and an index of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("MGPU_RUNS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def made(runs: Path, name: str, day: int, state: str = "COMPLETED", tasks: int | None = None) -> RunFolder:
    """Return a run, or a group with runs of which the second one is in this state."""
    folder = RunFolder(runs / name)
    folder.create()
    submitted = f"2026-11-{day:02}T12:00:00.000+00:00"
    records.update_state(folder, state=state, submitted=submitted, tasks=tasks)
    for task in range(tasks or 0):
        folder.of_task(task).create_task()
        records.update_state(folder.of_task(task), state=state if task == 1 else "COMPLETED", submitted=submitted)
    # the order in which they have changed
    os.utime(folder.state, (day, day))
    return folder


def test_last_is_the_newest_run_or_group_of_this_user(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="@last: there are no runs yet"):
        lookup.find("@last")
    made(runs, "b", 2)
    group = made(runs, "a", 3, tasks=2)
    made(runs, "c", 1, "RUNNING")
    assert lookup.find("@last") == group
    assert lookup.find("@last/1") == group.of_task(1)
    # all of them belong to somebody else
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UserError, match="there are no runs yet"):
        lookup.find("@last")


def test_last_is_the_group_of_which_a_run_was_resumed_last(runs: Path) -> None:
    group = made(runs, "group", 1, tasks=2)
    made(runs, "single", 3)
    assert lookup.find("@last").run == "single"
    records.update_state(group.of_task(1), submitted="2026-11-04T12:00:00.000+00:00")
    assert lookup.find("@last") == group


def test_newest_is_the_newest_whatever_the_time_zone(runs: Path) -> None:
    made(runs, "utc", 3)
    records.update_state(made(runs, "west", 1), submitted="2026-11-03T09:00:00.000-07:00")
    assert lookup.find("@last").run == "west"


def test_sweep_and_its_confirmation_are_one(runs: Path) -> None:
    sweep = made(runs, "digits", 2, tasks=1)
    confirmation = made(runs, "digits-confirm", 2)
    records.update_state(confirmation, tasks=1)
    confirmation.tasks.symlink_to(Path("..", "digits", "tasks"))
    assert lookup.find("dig") == lookup.find("@last") == sweep
    assert lookup.find("digits-c") == confirmation


def test_empty_name_is_no_run(runs: Path) -> None:
    made(runs, "only", 1)
    with pytest.raises(UserError, match="the name of the run is empty"):
        lookup.find("")
    with pytest.raises(UserError, match=r"^@last-fail: such names are @last and @last-failed$"):
        lookup.find("@last-fail")


def test_last_failed_is_the_newest_failed_run_also_of_a_group(runs: Path) -> None:
    made(runs, "old", 1, "FAILED")
    made(runs, "stopped", 5, "CANCELLED")
    made(runs, "good", 6)
    assert lookup.find("@last-failed").run == "old"
    made(runs, "group", 3, "TIMEOUT", tasks=3)
    assert lookup.find("@last-failed").run == "group/1"
    sweep = made(runs, "sweep", 4, "FAILED", tasks=2)
    sweep.sweep.write_text("{}")
    assert lookup.find("@last-failed") == sweep


def test_no_failed_run_is_said(runs: Path) -> None:
    made(runs, "good", 6)
    with pytest.raises(UserError, match="@last-failed: no run has failed"):
        lookup.find("@last-failed")


def test_completions_are_names_that_begin_alike_the_newest_first(runs: Path) -> None:
    assert completions("x") == []
    made(runs, "train-b", 1)
    made(runs, "train-a", 2, tasks=12)
    sweep = made(runs, "search", 3, tasks=1)
    sweep.sweep.write_text("{}")
    assert completions("") == ["@last", "@last-failed", "search", "train-a", "train-b"]
    assert completions("tr") == ["train-a", "train-b"]
    assert completions("@last-") == ["@last-failed"]
    assert completions("train-a/") == [f"train-a/{task}" for task in range(12)]
    assert completions("train-a/1") == ["train-a/1", "train-a/10", "train-a/11"]
    assert completions("train-b/") == completions("unknown/") == []
    assert completions("", only_sweeps=True) == ["search"]
    for number in (0, 2, 10):
        sweep.of_trial(number).path.mkdir(parents=True)
    sweep.of_trial(2).of_seed(7).path.mkdir(parents=True)
    assert completions("search/", trials=True) == completions("search/") == ["search/0"]
    assert completions("search/t", trials=True) == [f"search/trials/{part}" for part in ("0", "2/seeds/7", "10")]
    assert completions("search/trials/1", trials=True) == ["search/trials/10"]
    assert completions("search/t") == completions("search/t", only_sweeps=True) == []
    # the part of a name that was given will do, unless two have it
    made(runs, "seeds-20261128-191220-6bf3", 4, tasks=2)
    assert completions("seeds/") == ["seeds/0", "seeds/1"]
    made(runs, "seeds-20261129-191220-6bf3", 5, tasks=2)
    assert completions("seeds/") == []


def test_trial_is_named_below_its_sweep(runs: Path) -> None:
    sweep, group = made(runs, "search", 1, tasks=1), made(runs, "group", 2, tasks=1)
    sweep.sweep.write_text("{}")
    sweep.of_trial(3).of_seed(1).path.mkdir(parents=True)
    # by which a folder is known as a run
    sweep.spec.touch()
    assert lookup.trial("search/trials/3") == lookup.trial("runs/search/trials/3/") == sweep.of_trial(3)
    assert lookup.trial("sea/trials/3/seeds/1") == sweep.of_trial(3).of_seed(1)
    with pytest.raises(UserError, match="3 was trained with 1 seed: name one, such as search/trials/3/seeds/1"):
        lookup.single_trial("search/trials/3")
    assert lookup.single_trial("search/trials/3/seeds/1") == sweep.of_trial(3).of_seed(1)
    assert lookup.trial("search") is lookup.trial("search/0") is lookup.trial("trials/3/x") is None
    for name, problem in (
        ("search/trials/4", "search has no trial 4, or it has not started: see `.+ trials search`"),
        ("search/trials/3/seeds/2", "search has no trial 3 with seed 2, or it has not started"),
        ("other/trials/3", "there is no run 'other'"),
        (f"{group.run}/trials/3", "group is no sweep: it has no trials"),
    ):
        with pytest.raises(UserError, match=problem):
            lookup.trial(name)
    with pytest.raises(UserError, match="search/trials/3 is a trial, and only runs can be named here: see"):
        lookup.find("search/trials/3")
    with pytest.raises(UserError, match="there is no trial 'search/trials/best': name one as SWEEP/trials/NUMBER"):
        lookup.find("search/trials/best")


def test_misspelt_name_is_suggested_without_its_time(runs: Path) -> None:
    made(runs, "baseline-20261128-191220-6bf3", 1).spec.touch()
    with pytest.raises(UserError, match=r"there is no run 'basline' \(did you mean 'baseline'\?\)"):
        lookup.find("basline")


def test_bash_completes_runs(project: Project) -> None:
    """In a real interactive bash, which splits words in a way of its own."""
    program = project.folder / "bin" / "mgpu-slurm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mgpu_slurm "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    project.environ["PATH"] = f"{program.parent}:{os.environ['PATH']}"
    made(project.runs, "train-20261125-191527-49ba", 1)
    script = project.call("completion", "bash")
    assert script.returncode == 0, script.stderr
    (project.folder / "completion").write_text(script.stdout)
    reader, end = os.openpty()
    environ = os.environ | project.environ | {"TERM": "dumb", "PS1": "$ "}
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        **{"stdin": end, "stdout": end, "stderr": end, "cwd": project.folder, "env": environ},
        start_new_session=True,
    )
    os.set_blocking(reader, False)
    shown = b""

    def shows(text: bytes) -> bool:
        nonlocal shown
        with suppress(BlockingIOError):
            shown += os.read(reader, 1 << 16)
        return text in shown

    try:
        os.write(reader, b". ./completion && echo read: $((40 + 2))\n")
        wait_until(lambda: shows(b"read: 42"))
        os.write(reader, b"mgpu-slurm status tr\t")
        wait_until(lambda: shows(b"status train-20261125-191527-49ba "))
        os.write(reader, b"@last-\t")
        wait_until(lambda: shows(b"@last-failed "))
    finally:
        shell.kill()
        shell.wait()
        os.close(reader)
        os.close(end)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_of_each_shell_asks_the_program(project: Project, shell: str) -> None:
    done = project.call("completion", shell)
    assert done.returncode == 0, done.stderr
    assert f"_MGPU_SLURM_COMPLETE={shell}_complete" in done.stdout
