"""`status --filter` and `--sort` choose among runs by what they show, their metrics and their config."""

from __future__ import annotations

import os
import re
from datetime import datetime, timezone
from pathlib import Path

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.reports.live import status
from mgpu_slurm.reports.live.status_choice import Choice
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from tests.support import Project

NOW = datetime.now(timezone.utc).isoformat()
RUNS = [
    RunState(run="resnet-a", state="RUNNING", step=10, metrics={"loss": 0.5, "top1": 71.0}),
    RunState(run="resnet-b", state="FAILED", step=9, metrics={"loss": float("nan")}, reason="rank 1: ValueError"),
    RunState(run="vit", state="RUNNING", step=100, metrics={"loss": 0.25}, total=9, pace=(5.0, 5.0), reported=NOW),
    RunState(run="group", state="COMPLETED", metrics={"loss": "0.3±0.01"}),
    RunState(run="new", state="PENDING"),
]


def names(*filters: str, sort: str | None = None) -> str:
    return " ".join(entry.run for entry in Choice(filters, sort).of(RUNS))


@pytest.mark.parametrize(
    ("conditions", "chosen"),
    [
        (["state:running"], "resnet-a vit"),
        (["state=FAILED"], "resnet-b"),
        (["state!=running"], "resnet-b group new"),
        (["loss<0.4"], "vit group"),
        (["loss<0.4 state:run"], "vit"),
        (["loss<=0.5", "resnet"], "resnet-a"),
        (["valueerror"], "resnet-b"),
        (["step>=10"], "resnet-a vit"),
        (["step=10"], "resnet-a"),
        (["left>1"], "vit"),
        (["left>10s", "left<1h30m"], "vit"),
        (["left>1d"], ""),
        (["nothing-like-it"], ""),
    ],
)
def test_all_conditions_hold(conditions: list[str], chosen: str) -> None:
    assert names(*conditions) == chosen


@pytest.mark.parametrize(
    ("key", "order"),
    [
        # numbers first, what is none of them behind, and what has no value last
        ("loss", "vit group resnet-a resnet-b new"),
        ("-loss", "resnet-a group vit resnet-b new"),
        ("top1", "resnet-a resnet-b vit group new"),
        ("-step", "vit resnet-a resnet-b group new"),
        ("name", "group new resnet-a resnet-b vit"),
        ("left", "vit resnet-a resnet-b group new"),
    ],
)
def test_runs_are_sorted_by_any_value(key: str, order: str) -> None:
    assert names(sort=key) == order


@pytest.mark.parametrize("given", [{"sort": "lost"}, {"sort": "-lost"}, {"filters": ["lost<3"]}])
def test_value_that_no_run_has_is_an_error(given: dict[str, str]) -> None:
    choice = Choice(**given)  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match=r"no run has .* value 'lost' \(did you mean 'loss'\?\); columns: attempt, name, "
    ):
        choice.check(RUNS)
    # as long as nothing was reported, it may be a metric
    fresh = [RunState(run="new", state="RUNNING")]
    choice.check(fresh)
    assert choice.of(fresh) == ([] if choice.filters else fresh)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("state:complted", "there is no such state (did you mean 'COMPLETED'?)"),
        ("STATE=fail", "there is no such state (did you mean 'FAILED'?)"),
        ("state!=typo", "there is no such state (known: CANCELLED, COMPLETED, FAILED, "),
    ],
)
def test_state_that_there_is_not_is_an_error(word: str, told: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"--filter {word!r}: {told}")):
        Choice(filters=[word]).check(RUNS)


@pytest.mark.parametrize("word", ["state:out_of", "state=timeout", "state!=COMPLETED", "state:fail"])
def test_state_that_no_run_has(word: str) -> None:
    Choice(filters=[word]).check(RUNS)


@pytest.mark.parametrize(
    "given", [{"sort": "-LEFT"}, {"filters": ["state:failed", "top1>1"]}, {"filters": ["ATTEMPT=0"]}]
)
def test_value_counts_that_any_run_has_whether_it_is_chosen_or_not(given: dict[str, str]) -> None:
    Choice(**given).check(RUNS)  # type: ignore[arg-type]


def test_named_runs_of_which_none_is_chosen(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    found = [(folder, RunState(run="run", state="COMPLETED", metrics={"loss": 1.0}))]
    for room in (None, os.terminal_size((80, 24))):
        assert status.lines(found, [folder], room, ["state:failed"]) == ["none of 1 run fulfils --filter"]


def test_sweep_has_no_filter(tmp_path: Path) -> None:
    sweep = RunFolder(tmp_path / "sweep")
    sweep.create()
    sweep.sweep.write_text("{}")
    with pytest.raises(UserError, match="sweep is a sweep: --filter 'loss<1' is for runs; "):
        status.lines([], [sweep], None, ["loss<1"])


@pytest.mark.parametrize("word", ["loss<abc", "age>2x"])
def test_comparison_needs_a_number(word: str) -> None:
    with pytest.raises(UserError, match=f"^--filter '{word}': expected a number after [<>], or a time such as 1h30m"):
        Choice([word]).check(RUNS)


def test_runs_are_chosen_by_their_config(project: Project) -> None:
    project.write("job.py", "def train(run, lr: float = 0.1):\n    run.report(1, loss=lr)\n")
    for folder in [project.submit("job.py", f"lr={lr}", "--name", f"lr{lr}") for lr in ("0.1", "0.01", "0.2")]:
        project.finish(folder)
    found = project.json("status", "--filter", "lr<0.15", "--sort", "-lr")
    assert [facts["run"][:6] for facts in found] == ["lr0.1-", "lr0.01"]
    lines = project.call("status", "--sort", "lr").stdout.splitlines()
    assert [line[:6] for line in lines[1:]] == ["lr0.01", "lr0.1-", "lr0.2-"]
    none = project.call("status", "--filter", "state:failed")
    assert (none.returncode, none.stdout) == (0, "none of 3 runs fulfils --filter\n")
    wrong = project.call("status", "--filter", "rl<0.15")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("mgpu-slurm: --filter 'rl<0.15': no run has a column, metric or config value 'rl'; ")
    assert wrong.stderr.endswith("; metrics: loss\n")


def test_members_of_a_named_group_are_chosen_and_its_line_stays(tmp_path: Path) -> None:
    runs = [RunState(run=f"group/{n}", state="RUNNING", metrics={"loss": 1.0 - n / 10}) for n in range(3)]
    table = status.table(runs, {"group"}, None, Choice(["loss<1"], "loss"))
    assert [line.split()[0] for line in table.splitlines()] == ["RUN", "group/2", "group/1", "group"]
