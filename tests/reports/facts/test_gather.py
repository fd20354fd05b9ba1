"""Each number of a report is that of the runs' own files; what cannot be read is left out, with the reason."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from optuna.trial import TrialState

from mgpu_slurm.core import processes
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import without_nan
from mgpu_slurm.metrics.reporter import Reporter
from mgpu_slurm.reports.facts.gather import ReportOptions, gather
from mgpu_slurm.reports.facts.report_facts import Facts, RunFacts
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from tests.metrics.event_files import ended_run, opened, scalar, write
from tests.reports.facts.histories import Attempts, attempts, kept, lines
from tests.reports.sweeps import Sweeping, make_sweep
from tests.support import Project, restore_version_0_1
from tests.sweeps import sweeps


def at(minute: int) -> str:
    return f"2026-01-01T00:0{minute}:00.000+00:00"


def reported(folder: Path, *values: float, attempt: int = 1, first: int = 1, name: str = "loss") -> Path:
    reporter = Reporter(RunFolder(folder), attempt)
    for progress, value in enumerate(values, first):
        reporter.report(progress, progress * 10, {name: value})
    reporter.close(0)
    return folder


def found(*words: Path | str, **options: Any) -> Facts:
    return gather([str(word) for word in words], ReportOptions(**options))


def as_json(facts: Facts) -> dict[str, Any]:
    return dict(json.loads(json.dumps(without_nan(facts.to_json()), allow_nan=False)))


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


# -- runs


def test_run_with_two_attempts(tmp_path: Path) -> None:
    folder = reported(ended_run(tmp_path / "run-20260101-000000-abcd", config={"model": {"lr": 0.5}}), 3.0, 2.0, 1.0)
    reported(folder, 2.5, math.nan, attempt=2, first=2)
    run, nodes = RunFolder(folder), {"job_id": "7", "nodes": ["n1", "n2"]}
    records.record_event(run, "started", attempt=1, time=at(0), **nodes)
    records.record_event(run, "ended", attempt=1, time=at(2), exit_code=1)
    records.record_event(run, "started", attempt=2, time=at(5), **nodes)
    records.record_event(run, "ended", attempt=2, time=at(6), exit_code=0)
    before = contents(tmp_path)
    facts = found(folder)
    assert contents(tmp_path) == before
    assert (facts.title, facts.metric) == ("run", "loss")
    (shown,) = as_json(facts)["runs"]
    assert shown["metrics"] == {"loss": {"last": None, "best": 2.5, "direction": "minimize", "is_assumed": True}}
    assert (shown["progress"], shown["step"], shown["seconds"]) == (3, 30, 180.0)
    assert shown["config"] == {"model.lr": 0.5}
    assert (shown["run"], shown["kind"], shown["group"], shown["state"]) == (folder.name, "run", None, "COMPLETED")
    first, second = shown["attempts"]
    assert (first["seconds"], first["started"], first["ended"]) == (120.0, at(0), at(2))
    assert (second["seconds"], second["started"], second["ended"]) == (60.0, at(5), at(6))
    assert (first["job_id"], first["nodes"]) == ("7", ["n1", "n2"])
    assert first["ended_by"]
    assert (second["ended_by"], second["then"]) == ("", "")


def test_attempt_that_runs_has_no_end_of_the_one_before(tmp_path: Path) -> None:
    run = RunFolder(reported(ended_run(tmp_path / "run"), 1.0))
    records.record_event(run, "started", attempt=1, time=at(0), job_id="7", nodes=["n1"])
    records.record_event(run, "ended", attempt=1, time=at(2), exit_code=143, message="stopped at step 9, asked to end")
    records.record_event(run, "resumed", state="CANCELLED", reason="cancelled", time=at(3))
    records.record_event(run, "started", attempt=2, time=at(5), job_id="8", nodes=["n1"])
    vouched = {"host": os.uname().nodename, "supervisor": [os.getpid(), processes.started_at(os.getpid())]}
    records.update_state(run, state="RUNNING", **vouched)
    first, second = as_json(found(run.path))["runs"][0]["attempts"]
    assert (first["ended_by"], first["then"]) == ("CANCELLED: stopped at step 9, asked to end", "resumed")
    assert (first["outcome"], second["outcome"]) == ("stopped", "running")
    assert (second["ended_by"], second["ended"]) == ("", None)


@settings(max_examples=40)
@given(attempts(), some.randoms())
def test_numbers_of_random_attempts_are_those_of_the_file(history: Attempts, random: Any) -> None:
    with TemporaryDirectory() as base:
        run = RunFolder(ended_run(Path(base) / "run"))
        run.metrics.write_text("".join(f"{each}\n" for each in lines(history, random)))
        (shown,) = as_json(found(run.path))["runs"]
    expected = kept(history)
    assert (shown["progress"], shown["step"]) == ((expected[-1][0], expected[-1][0] * 10) if expected else (0, 0))
    names = {name for _, metrics in expected for name in metrics}
    assert shown["metrics"].keys() == names
    for name in names:
        values = [metrics[name] for _, metrics in expected if name in metrics]
        finite = [value for value in values if math.isfinite(value)]
        best = min(finite, default=None) if name == "loss" else max(finite, default=None)
        last = values[-1] if math.isfinite(values[-1]) else None
        assert (shown["metrics"][name]["last"], shown["metrics"][name]["best"]) == (last, best)


def test_wish_decides_on_metric_and_direction(tmp_path: Path) -> None:
    runs = [reported(ended_run(tmp_path / name), 1.0, 3.0, 2.0, name="score") for name in ("a", "b")]
    reported(runs[1], 5.0, 4.0)
    assert found(*runs).metric == "score"
    assert {run.metrics["score"].best for run in found(*runs).runs} == {3.0}
    facts = found(*runs, metric="loss", direction="maximize", title="Mine")
    assert (facts.title, facts.metric, facts.metric_names) == ("Mine", "loss", ["loss", "score"])
    metrics = facts.runs[1].metrics
    assert (metrics["loss"].best, metrics["loss"].is_assumed, metrics["score"].is_assumed) == (5.0, False, True)
    with pytest.raises(
        UserError, match=r"--metric los: no run has reported it \(did you mean 'loss'\?\); there are: score, loss"
    ):
        found(*runs, metric="los")


def test_metric_by_which_a_job_chooses_its_best_checkpoint_comes_first(tmp_path: Path) -> None:
    folder = reported(ended_run(tmp_path / "run"), 1.0, 3.0, 2.0, name="a_score")
    reported(folder, 5.0, 6.0, 7.0, name="gap")
    assert found(folder).metric == "a_score"
    records.update_state(RunFolder(folder), best_by={"gap": "minimize"})
    facts = found(folder)
    assert facts.metric == "gap"
    gap = facts.runs[0].metrics["gap"]
    assert (gap.best, gap.direction, gap.is_assumed) == (5.0, "minimize", False)
    # who asks knows better
    assert found(folder, metric="gap", direction="maximize").runs[0].metrics["gap"].best == 7.0


def test_group_folder_with_event_files_and_run_without_metrics(tmp_path: Path) -> None:
    write(tmp_path / "other" / "events.out.tfevents.1.h", [opened(1.0), scalar("acc", 2**53, 0.5), scalar("acc", 1, 1)])
    group = ended_run(tmp_path / "group", tasks=2)
    for task in (0, 1):
        RunFolder(group).of_task(task).create_task()
        records.update_state(RunFolder(group).of_task(task), state="COMPLETED", executor="local")
    reported(group / "tasks" / "1", 0.25)
    facts = found(group, tmp_path / "other")
    assert facts.title == "group, other"
    assert [(run.run, run.kind, run.group) for run in facts.runs] == [
        ("group/0", "run", "group"),
        ("group/1", "run", "group"),
        ("other", "foreign", None),
    ]
    assert facts.runs[1].metrics["loss"].last == 0.25
    assert facts.runs[2].step == facts.runs[2].series["acc"].step[-1] == 2**53
    assert facts.warnings == ["1 run without metrics: group/0"]


def test_what_names_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(UserError, match="no run found: name a run"):
        found()
    with pytest.raises(UserError, match="nothing-here"):
        found("nothing-here")
    reported(ended_run(tmp_path / "runs" / "newest"), 1.0)
    assert [run.run for run in found().runs] == ["newest"]


# -- runs of another version, or damaged


def last_line(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]))


def test_runs_of_version_0_1(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    old = restore_version_0_1(project)
    monkeypatch.chdir(project.folder)
    facts = found(*old.values())
    by_name = {run.run.partition("-")[0] if "/" not in run.run else run.run: run for run in facts.runs}
    for name in ("completed", "stopped", "failed"):
        expected = last_line(old[name])
        shown = by_name[name]
        assert (shown.progress, shown.step) == (expected["progress"], expected["step"])
        assert {metric: each.last for metric, each in shown.metrics.items()} == expected["metrics"]
    assert "the data is broken" in by_name["failed"].reason
    assert by_name["completed"].seconds > 0
    (sweep,) = facts.sweeps
    assert (sweep.study.metric, sweep.study.direction, len(sweep.study.trials)) == ("loss", "minimize", 4)
    for trial in sweep.study.trials:
        expected = last_line(old["search"] / "trials" / str(trial.row.number))
        assert by_name[f"search/trials/{trial.row.number}"].metrics["loss"].last == expected["metrics"]["loss"]
    assert len([run for run in facts.runs if run.group and run.group.startswith("group-")]) == 2


DAMAGE: dict[str, Callable[[RunFolder], object]] = {
    "attempts": lambda run: run.attempts.write_text('{"event": "started", "time": "x"}\n'),
    "attempts that are no records": lambda run: run.attempts.write_text("null\n[1]\n"),
    "metrics without times": lambda run: run.metrics.write_text("{}\nnull\n[]\n"),
    "metrics that are a folder": lambda run: (run.metrics.unlink(), run.metrics.mkdir()),
    "a step beyond all numbers": lambda run: run.metrics.write_text(
        run.metrics.read_text().replace('"step": 10', f'"step": {10**400}')
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, and a sweep with two trials."""
    base = tmp_path_factory.mktemp("whole")
    for name in ("bad", "good"):
        run = RunFolder(reported(ended_run(base / name), 2.0, 1.0))
        records.record_event(run, "started", attempt=1, time=at(0), job_id="1", nodes=["n"])
        records.record_event(run, "ended", attempt=1, time=at(1), exit_code=0)
    folder = sweeps.make(base)
    worker = sweeps.worker(folder, 0)
    for score in (0.25, 0.75):
        number = sweeps.begin(worker).number
        reported(folder.of_trial(number).path, score, name="score")
        sweeps.finish(worker, score)
    return base


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("run", ["bad", "s/trials/0"])
def test_damaged_records_leave_the_other_runs(tmp_path: Path, whole: Path, name: str, run: str) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    DAMAGE[name](RunFolder(tmp_path / run))
    facts = found(tmp_path / "bad", tmp_path / "good", tmp_path / "s")
    shown = {each.run: each for each in facts.runs}
    assert {"bad", "good", "s/trials/0", "s/trials/1"} - shown.keys() <= {run}
    assert shown["good"].metrics["loss"].last == 1.0
    assert shown["s/trials/1"].metrics["score"].last == 0.75
    if run not in shown:
        assert any(each.startswith(f"{run}: it cannot be read and is left out: ") for each in facts.warnings)
    elif name.startswith("metrics"):
        assert f"{run}: 3 damaged lines of metrics.jsonl left out" in facts.warnings


@pytest.mark.parametrize("file", ["sweep.yaml", "study.journal"])
def test_damaged_sweep_leaves_the_other_runs(tmp_path: Path, whole: Path, file: str) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (tmp_path / "s" / file).write_text("[1,\n")
    facts = found(tmp_path / "s", tmp_path / "good")
    assert ([run.run for run in facts.runs], facts.sweeps) == (["good"], [])
    (warning,) = [each for each in facts.warnings if each.startswith("s: ")]
    assert warning.startswith("s: its study cannot be read and is left out: ")


# -- sweeps


def test_worker_and_its_trials(whole: Path) -> None:
    (sweep,) = as_json(found(whole / "s"))["sweeps"]
    worker = sweep["workers"][0]
    assert [piece["trial"] for piece in worker["trials"]] == [0, 1]
    assert all(piece["begin"] <= piece["end"] for piece in worker["trials"])
    assert [(trial["number"], trial["state"], trial["value"], trial["worker"]) for trial in sweep["trials"]] == [
        (0, "COMPLETE", 0.25, 0),
        (1, "COMPLETE", 0.75, 0),
    ]
    assert (sweep["best"], sweep["metric"], sweep["direction"]) == (1, "score", "maximize")
    assert sweep["importance"]["values"] == {}
    assert sweep["importance"]["missing"]


def told(sweep: Sweeping, state: TrialState, *values: float) -> None:
    """Play a trial, and tell the study its end."""
    number = sweep.run("done", *values)
    for progress, value in enumerate(values, 1):
        sweep.trials[number].report(value, progress)
    sweep.study.tell(number, values[-1] if state == TrialState.COMPLETE else None, state)


def of_trial(facts: Facts, number: int) -> RunFacts:
    (run,) = [run for run in facts.runs if run.run.endswith(f"/trials/{number}")]
    return run


def test_trials_are_those_of_the_study(tmp_path: Path) -> None:
    made = make_sweep(tmp_path, space={"lr": {"float": [0.1, 1.0]}, "width": {"int": [2, 2]}})
    made.study.enqueue_trial({"lr": 1.0, "width": 2})
    told(made, TrialState.COMPLETE, 3.0, 0.5)
    told(made, TrialState.PRUNED, 4.0)
    told(made, TrialState.FAIL, 5.0)
    told(made, TrialState.COMPLETE, 2.0, 1.0)
    facts = found(made.folder.path)
    (study,) = [each.study for each in facts.sweeps]
    own = optuna.load_study(study_name=made.study.study_name, storage=made.study._storage).trials
    assert [each.row.number for each in study.trials] == [each.number for each in own]
    for trial, row in zip(own, (each.row for each in study.trials), strict=True):
        assert (row.state, row.params["lr"]) == (trial.state.name, trial.params["lr"])
        assert row.value == (trial.value if trial.value is not None else [*trial.intermediate_values.values()][-1])
        assert of_trial(facts, row.number).config["lr"] == trial.params["lr"]
    assert [of_trial(facts, number).state for number in range(4)] == ["COMPLETED", "PRUNED", "FAILED", "COMPLETED"]
    assert study.best == 0
    assert [each.name for each in study.parameters] == ["lr"]
    assert [each.is_enqueued for each in study.trials] == [True, False, False, False]
    metric = of_trial(facts, 0).metrics["loss"]
    assert (metric.last, metric.best, metric.direction, metric.is_assumed) == (0.5, 0.5, "minimize", False)


def test_config_of_a_trial_has_what_was_not_searched(tmp_path: Path) -> None:
    made = make_sweep(tmp_path, space={"lr": {"float": [0.1, 1.0]}})
    for _ in range(2):
        told(made, TrialState.COMPLETE, 1.0)
    first, second = made.folder.of_trial(0), made.folder.of_trial(1)
    first.config.write_text("lr: 0.5\nmodel: {width: 8}\n")
    second.config.write_text("lr: [\n")
    facts = found(made.folder.path)
    assert of_trial(facts, 0).config == {"lr": 0.5, "model.width": 8}
    assert of_trial(facts, 1).config == {"lr": made.study.trials[1].params["lr"]}
    (warning,) = [each for each in facts.warnings if "config" in each]
    assert warning.startswith("digits/trials/1: of its config only what was searched is shown: ")


def test_several_objectives_have_a_front(tmp_path: Path) -> None:
    objectives = {"loss": "minimize", "accuracy": "maximize"}
    made = make_sweep(tmp_path, metric=None, direction=None, metrics=objectives, pruner="none")
    for values in ((1.0, 0.5), (2.0, 0.25), (3.0, 0.75)):
        number = made.begin()
        made.report(number, values[0], accuracy=values[1])
        made.study.tell(number, values)
    (sweep,) = as_json(found(made.folder.path))["sweeps"]
    assert sweep["metrics"] == objectives
    assert sweep["front"] == [0, 2]
    assert [each["values"] for each in sweep["trials"]] == [
        {"loss": 1.0, "accuracy": 0.5},
        {"loss": 2.0, "accuracy": 0.25},
        {"loss": 3.0, "accuracy": 0.75},
    ]


def test_trial_with_several_seeds_is_several_runs(tmp_path: Path) -> None:
    made = make_sweep(tmp_path, seeds=2, pruner="none", space={"lr": {"float": [0.1, 1.0]}})
    number = made.begin()
    for seed in (0, 1):
        run = made.folder.of_trial(number).path / "seeds" / str(seed)
        run.mkdir(parents=True)
        reported(run, 2.0 + seed)
    made.study.tell(number, 2.5)
    facts = found(made.folder.path)
    assert [(run.run, run.config["seed"], run.metrics["loss"].last) for run in facts.runs] == [
        ("digits/trials/0/seeds/0", 0, 2.0),
        ("digits/trials/0/seeds/1", 1, 3.0),
    ]
    assert list(facts.sweeps[0].study.seeds) == [0, 1]
