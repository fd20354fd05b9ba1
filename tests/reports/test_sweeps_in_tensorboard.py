"""A sweep in TensorBoard and under `aggregate`: real servers, asked by the interface that the HParams tab uses."""

from __future__ import annotations

import json
import math
import urllib.request
from typing import Any

import numpy as np
import pytest

from mgpu_slurm.reports.tensorboard_server import choose, linked
from mgpu_slurm.sweeps.hparams import PRUNED
from tests.metrics.event_files import ended_run
from tests.reports.sweeps import Sweeping, make_sweep
from tests.reports.test_tensorboard_server import Shown, curves, shown, without_data_server
from tests.support import Project, wait_until

ALL = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"]


def asked(server: Shown, what: str, **request: Any) -> Any:
    address = f"{server.facts['address']}data/plugin/hparams/{what}"
    headers = {"Content-Type": "application/json"}
    call = urllib.request.Request(address, json.dumps(request).encode(), headers)
    with urllib.request.urlopen(call, timeout=30) as answer:
        return json.load(answer)


def sessions(server: Shown, **request: Any) -> dict[str, Any]:
    """By name; each is a group of its own."""
    whole = {"allowedStatuses": ALL, "colParams": [], "startIndex": 0, "sliceSize": 10_000} | request
    groups = asked(server, "session_groups", **whole).get("sessionGroups", [])
    assert all(len(group["sessions"]) == 1 for group in groups)
    return {group["name"]: group for group in groups}


def status(session: Any) -> str:
    return str(session["sessions"][0].get("status", "STATUS_UNKNOWN"))


def metrics(session: Any) -> dict[str, Any]:
    return {metric["name"]["tag"]: metric.get("value", 0.0) for metric in session.get("metricValues", [])}


def columns(server: Shown) -> list[str]:
    return [info["name"] for info in asked(server, "experiment").get("hparamInfos", [])]


def as_shown(values: dict[str, Any]) -> dict[str, Any]:
    """What the tab is to say of a trial's parameters."""
    texts = {"layers", "clip"}
    return {name: json.dumps(value) if name in texts else value for name, value in values.items() if name != "epochs"}


def stored(value: float) -> float:
    """As a point of a curve, which has four bytes."""
    return float(np.float32(value))


@pytest.mark.parametrize("loader", ["fast", "slow"])
def test_tab_shows_each_trial_with_its_values_and_status(project: Project, loader: str) -> None:
    if loader == "slow":
        without_data_server(project)
    made = make_sweep(project.runs)
    name = made.folder.run
    done = [made.run("done", 0.5, 1 / 3) for _ in range(6)]
    pruned, running = made.run("pruned", 0.9), made.begin()
    made.report(running, 0.7, accuracy=0.25)
    failed = made.begin()
    made.end(failed, "failed")
    retried = made.begin()
    made.report(retried, 0.9, 0.8, 0.7)
    # its worker died, and it goes on from a checkpoint
    made.start(retried)
    made.report(retried, 0.6, 0.1, attempt=2, first=2)
    afresh = made.begin()
    made.report(afresh, 0.9, 0.8, accuracy=0.5)
    # another one kept no checkpoint
    made.start(afresh)
    made.report(afresh, 0.4, attempt=2)
    curves(ended_run(made.folder.path / "tasks" / "0"))
    curves(ended_run(project.runs / "unnamed"))
    with shown(project, "digits") as server:
        numbers = [*done, pruned, running, failed, retried, afresh]
        assert server.facts["runs"] == [f"{name}/trials/{number}" for number in numbers]
        wait_until(lambda: len(sessions(server)) == len(numbers), pause=0.2)
        assert sorted(server.get("runs")) == sorted([*server.facts["runs"], "hparams"])
        # those that each trial has come first, and are what is shown at first
        expected = ["batch_size", "clip", "layers", "lr", "optimizer", "width", "momentum", "nesterov"]
        assert columns(server) == expected
        found = sessions(server)
        for number, values in made.values.items():
            assert found[f"{name}/trials/{number}"]["hparams"] == as_shown(values)
        assert {"momentum" in values for values in made.values.values()} == {True, False}
        assert {status(found[f"{name}/trials/{number}"]) for number in done} == {"STATUS_SUCCESS"}
        states = [status(found[f"{name}/trials/{number}"]) for number in (pruned, running, failed, retried)]
        assert states == ["STATUS_SUCCESS", "STATUS_UNKNOWN", "STATUS_FAILURE", "STATUS_UNKNOWN"]
        assert metrics(found[f"{name}/trials/{done[0]}"]) == {"loss": stored(1 / 3), PRUNED: 0}
        assert metrics(found[f"{name}/trials/{pruned}"]) == {"loss": stored(0.9), PRUNED: 1}
        assert metrics(found[f"{name}/trials/{running}"]) == {"loss": stored(0.7)}
        assert metrics(found[f"{name}/trials/{failed}"]) == {}
        assert metrics(found[f"{name}/trials/{afresh}"])["loss"] == stored(0.4)
        # what comes while one looks: ends, a trial, a metric
        made.end(running, "pruned")
        made.end(retried, "done", {"loss": 0.1})
        late = made.run("done", 0.3)
        wait_until(lambda: f"{name}/trials/{late}" in sessions(server), pause=0.2)
        wait_until(lambda: status(sessions(server)[f"{name}/trials/{retried}"]) == "STATUS_SUCCESS", pause=0.2)
        last = {"loss": stored(0.7), PRUNED: 1, "accuracy": 0.25}
        wait_until(lambda: metrics(sessions(server)[f"{name}/trials/{running}"]) == last, pause=0.2)
        assert metrics(sessions(server)[f"{name}/trials/{retried}"]) == {"loss": stored(0.1), PRUNED: 0}
        points = server.get("plugin/scalars/scalars", run=f"{name}/trials/{retried}", tag="loss")
        assert [(point[1], point[2]) for point in points] == [(10, stored(0.9)), (20, stored(0.6)), (30, stored(0.1))]
        assert columns(server) == expected


def test_tab_filters_and_sorts_by_columns_that_some_trials_lack(project: Project) -> None:
    made = make_sweep(project.runs)
    for _ in range(12):
        made.run("done", 0.5)
    lost = f"{made.folder.run}/trials/{made.run('pruned', math.nan)}"
    with shown(project, "digits") as server:
        wait_until(lambda: len(sessions(server)) == 13, pause=0.2)
        assert metrics(sessions(server)[lost]) == {"loss": "NaN", PRUNED: 1}
        orders = [{"hparam": name, "order": "ORDER_ASC"} for name in columns(server)]
        for order in orders:
            assert len(sessions(server, colParams=[order])) == 13
        found = list(sessions(server, colParams=[{"hparam": "momentum", "order": "ORDER_ASC"}]).values())
        shown_momenta = [session["hparams"]["momentum"] for session in found if "momentum" in session["hparams"]]
        assert shown_momenta == sorted(shown_momenta)
        layers = {"hparam": "layers", "filterDiscrete": ["[8, 8]"]}
        some = sessions(server, colParams=[layers])
        own = {number for number, values in made.values.items() if values["layers"] == [8, 8]}
        assert some.keys() == {f"{made.folder.run}/trials/{number}" for number in own}


@pytest.mark.parametrize("loader", ["fast", "slow"])
def test_several_sweeps_share_one_experiment_with_all_their_columns(project: Project, loader: str) -> None:
    if loader == "slow":
        without_data_server(project)
    one = make_sweep(project.runs, "one", space={"lr": {"float": [0.1, 1]}, "depth": {"choice": [1, 2]}})
    other = make_sweep(project.runs, "other", space="space:function", metric="accuracy", direction="maximize")
    one.run("done", 0.5)
    with shown(project, "one", "other") as server:
        wait_until(lambda: len(sessions(server)) == 1, pause=0.2)
        assert columns(server) == ["depth", "lr"]
        number = other.begin(lambda trial: {"lr": trial.suggest_float("lr", 1, 2), "width": 8})
        wait_until(lambda: len(sessions(server)) == 2, pause=0.2)
        wait_until(lambda: columns(server) == ["depth", "lr", "width"], pause=0.2)
        (lr,) = [info for info in asked(server, "experiment")["hparamInfos"] if info["name"] == "lr"]
        assert lr["domainInterval"] == {"minValue": 0.1, "maxValue": 2}
        assert sessions(server)[f"other/trials/{number}"]["hparams"] == other.values[number]
        # the one that they have shared before is gone
        wait_until(lambda: sorted(server.get("runs")) == ["hparams-2", "one/trials/0", "other/trials/0"], pause=0.2)
        tags = [info["name"]["tag"] for info in asked(server, "experiment")["metricInfos"]]
        assert tags == ["loss", PRUNED, "accuracy"]


def test_single_trial_and_sweep_without_trials_can_be_shown(project: Project) -> None:
    made = make_sweep(project.runs)
    with shown(project, "digits") as server:
        assert server.facts["runs"] == []
        made.run("done", 0.5)
        made.run("done", 0.5)
        wait_until(lambda: len(sessions(server)) == 2, pause=0.2)
    for word in ("digits/trials/1", "runs/digits/trials/1"):
        with shown(project, word) as server:
            wait_until(lambda server=server: server.get("runs") == ["digits/trials/1"], pause=0.2)
    done = project.call("tensorboard", "digits/trials/2")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "digits has no trial 2, or it has not started: see" in done.stderr


# -- aggregate


def aggregated(project: Project, *words: str) -> dict[str, Any]:
    return dict(project.json("aggregate", *words, "--out", str(project.folder / "out")))


def with_ends(project: Project) -> Sweeping:
    made = make_sweep(project.runs, space={"width": {"choice": [8, 16]}, "lr": {"float": [0.1, 1]}})
    for end in ("done", "done", "pruned", "done", "done", "done", "done"):
        made.run(end, 0.5, 0.25)
    failed, _ = made.begin(), made.begin()
    made.end(failed, "failed")
    made.report(failed + 1, 0.5)
    return made


def test_each_trial_is_aggregated_as_a_run_with_its_own_config(project: Project) -> None:
    made = with_ends(project)
    found = aggregated(project, "digits", "--by", "width")
    runs = {run["run"]: run["state"] for group in found["groups"] for run in group["runs"]}
    states = ["COMPLETED", "COMPLETED", "PRUNED", *["COMPLETED"] * 4, "FAILED", "UNKNOWN"]
    assert runs == {f"digits/trials/{number}": state for number, state in enumerate(states)}
    for group in found["groups"]:
        widths = {made.values[int(run["run"].rpartition("/")[2])]["width"] for run in group["runs"]}
        assert widths == {group["config"]["width"]}
    assert sum(group["metrics"]["loss"]["count"] for group in found["groups"]) >= 2
    assert any("1 of" in note and "not ended yet: digits/trials/8" in note for note in found["notes"])
    assert any("without metrics: digits/trials/7 (FAILED)" in note for note in found["notes"])


def test_named_trial_is_shown_with_the_runs_of_its_seeds(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGPU_RUNS", str(project.runs))
    made = make_sweep(project.runs)
    number = made.run("done", 0.5)
    seeds = [made.folder.of_trial(number).of_seed(seed).tensorboard for seed in range(2)]
    seeds[0].mkdir(parents=True)
    with linked(choose([f"{made.folder.run}/trials/{number}"])) as links:
        seeds[1].mkdir(parents=True)
        links.refresh()
        shown = {str(path.relative_to(links.folder)) for path in links.folder.rglob("*") if path.is_symlink()}
    name = f"{made.folder.run}/trials/{number}"
    assert shown == {name, f"{name}-seed-0", f"{name}-seed-1"}


def test_trials_that_differ_only_in_the_seed_form_one_group(project: Project) -> None:
    made = make_sweep(project.runs, space={"seed": {"int": [0, 10**6]}, "width": {"choice": [8, 16]}})
    for _ in range(8):
        made.run("done", 0.5, 0.25)
    found = aggregated(project, "digits")
    assert sorted(group["name"] for group in found["groups"]) == ["width=16", "width=8"]
    assert sum(len(group["runs"]) for group in found["groups"]) == 8
    assert all(math.isclose(group["metrics"]["loss"]["mean"], 0.25) for group in found["groups"])


def test_trial_without_a_config_file_has_its_parameters_as_config(project: Project) -> None:
    made = make_sweep(project.runs, space={"width": {"choice": [8, 16]}})
    number = made.run("done", 0.5)
    made.folder.of_trial(number).config.unlink()
    (group,) = aggregated(project, "digits")["groups"]
    assert group["config"] == {"width": made.values[number]["width"]}
