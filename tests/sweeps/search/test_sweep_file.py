"""The sweep file: what it may say, and what is refused before anything is queued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request.config import merge, parse_overrides, parse_yaml, read_yaml
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.sweeps.search import sweep_file, trial_command
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.search.sweep_options import Budget, Pruner, Sampler

FILE = "sweep.yaml"

WHOLE = """
study: digits
job: jobs.digits
metric: accuracy
direction: maximize
sampler: {name: tpe, seed: 1}
pruner: {name: hyperband, min_resource: 1, max_resource: 27, reduction_factor: 3}
trials: 60
workers: 8
budget: {hours: 4, gpu_hours: 12, target: 0.99, patience: 20}
resources: {nodes: 1, gpus-per-node: 1, cpus-per-task: 4, time: 60}
fixed: {epochs: 27}
space:
  lr: {float: [1.0e-4, 1.0], log: true}
  optimizer: {choice: [sgd, adam]}
  momentum: {float: [0.0, 0.99], when: {optimizer: sgd}}
storage: postgresql://me:${PASSWORD}@db/optuna
max_retries: 1
"""
LEAST = {"study": "s", "job": "train.py", "metric": "accuracy", "trials": 3, "space": {"lr": {"float": [0.1, 1]}}}
COMMAND = LEAST | {"job": {"command": "python train.py --lr {lr}"}}


def parse(values: dict[str, Any], **changes: Any) -> Sweep:
    return sweep_file.parse(merge(values, changes), FILE)


def test_every_key_of_a_file_is_parsed() -> None:
    made = sweep_file.parse(parse_yaml(WHOLE, FILE), FILE)
    assert (made.study, made.job, made.metric, made.direction) == ("digits", "jobs.digits", "accuracy", "maximize")
    assert made.sampler == Sampler("tpe", seed=1)
    assert made.pruner == Pruner("hyperband", 1, 27, 3)
    assert (made.trials, made.workers, made.max_retries) == (60, 8, 1)
    assert made.budget == Budget(4, 12, 0.99, 20)
    assert made.resources == Resources(gpus_per_node=1, cpus_per_task=4, time="60")
    assert made.fixed == {"epochs": 27}
    assert isinstance(made.space, Space)
    assert [parameter.name for parameter in made.space.parameters] == ["lr", "optimizer", "momentum"]
    # a password is not looked up here
    assert made.storage == "postgresql://me:${PASSWORD}@db/optuna"


def test_minimal_file_gets_defaults() -> None:
    made = parse(LEAST)
    assert (made.sampler, made.pruner, made.budget) == (Sampler("tpe"), Pruner("none"), Budget())
    assert (made.workers, made.max_retries, made.storage, made.direction) == (1, 2, None, "maximize")


def test_sampler_and_pruner_may_be_given_by_name() -> None:
    made = parse(LEAST, sampler="random", pruner="median")
    assert (made.sampler, made.pruner) == (Sampler("random"), Pruner("median"))
    assert parse(LEAST, sampler="optuna.samplers.QMCSampler").sampler.name == "optuna.samplers.QMCSampler"


def test_overrides_replace_values_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_text(WHOLE)
    changes = parse_overrides(["trials=100", "space.lr.float=[0.1, 0.2]", "sampler.seed=5"])
    made = sweep_file.parse(sweep_file.laid_over(read_yaml(path), changes), str(path))
    assert isinstance(made.space, Space)
    assert made.space.lines()[0] == "lr         float 0.1 to 0.2, log"
    assert (made.trials, made.sampler.seed) == (100, 5)


def test_partial_override_keeps_the_sampler_and_pruner_name() -> None:
    changes = {"sampler": {"seed": 3}, "pruner": {"min_resource": 2}}
    made = sweep_file.parse(sweep_file.laid_over(LEAST | {"sampler": "random", "pruner": "median"}, changes), FILE)
    assert (made.sampler, made.pruner) == (Sampler("random", seed=3), Pruner("median", min_resource=2))


class TestValuesFromAProgram:
    def test_numpy_numbers_are_accepted(self) -> None:
        plain = sweep_file.plain({"trials": np.int64(3), "space": {"x": {"float": [np.float32(0.5), 1]}}}, "here")
        assert plain == {"trials": 3, "space": {"x": {"float": [0.5, 1]}}}
        assert (type(plain["trials"]), type(plain["space"]["x"]["float"][0])) == (int, float)

    def test_objects_and_functions_are_rejected_with_their_key(self) -> None:
        with pytest.raises(UserError, match=r"^here: trials: .* of type object: use plain values there$"):
            sweep_file.plain({"trials": object()}, "here")
        with pytest.raises(UserError, match=r"^here: space: name the function: 'module:function'"):
            sweep_file.plain({"space": lambda trial: {}}, "here")


def test_grid_has_at_most_as_many_trials_as_points() -> None:
    space = {"lr": {"choice": [0.1, 0.2]}, "width": {"int": [1, 3]}}
    without = {key: value for key, value in LEAST.items() if key != "trials"} | {"sampler": "grid", "space": space}
    assert parse(without).trials == 6
    assert parse(without, trials=4).trials == 4
    assert parse(without, trials=40).trials == 6


class TestCommands:
    def test_placeholders_are_replaced_by_parameters(self) -> None:
        made = parse(COMMAND)
        assert (made.job, made.command) == (None, ("python", "train.py", "--lr", "{lr}"))
        assert trial_command.words_of(made.command, {"lr": 0.25}) == ("python", "train.py", "--lr", "0.25")

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"lr": 1e-05, "m": 0.5, "o": "a b"}, "python t.py --lr=1e-05 --m 0.5 o:a b --last"),
            ({"lr": 1, "o": "x"}, "python t.py --lr=1 o:x --last"),
            ({"lr": True, "m": None, "o": [1, "y"]}, 'python t.py --lr=true --m null o:[1, "y"] --last'),
            ({"m": 1}, "python t.py --m 1 --last"),
        ],
    )
    def test_option_of_an_inactive_parameter_is_dropped(self, values: dict[str, Any], words: str) -> None:
        command = ["python", "t.py", "--lr={lr}", "--m", "{m}", "o:{o}", "--last"]
        assert " ".join(trial_command.words_of(command, values)) == words

    def test_braces_that_are_not_placeholders_are_kept(self) -> None:
        words = ["sh", "-c", "echo ${HOME} {} { {1} {lr}"]
        assert trial_command.words_of(words, {"lr": 2})[2] == "echo ${HOME} {} { {1} 2"
        assert parse(LEAST | {"job": {"command": words}}).command == tuple(words)


def without(key: str) -> dict[str, Any]:
    return {"values": {name: value for name, value in LEAST.items() if name != key}}


def change(**changes: Any) -> dict[str, Any]:
    return {"values": LEAST | changes}


PBT: dict[str, Any] = {"name": "pbt", "interval": 2, "max_resource": 9, "perturb": ["lr"]}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "metric and metrics": (change(metrics={"score": "maximize"}), "metrics: it contains metric and direction"),
    "no metric": (without("metric"), "no metric: add `metric: NAME`"),
    "metrics without a direction": (
        change(metric=None, metrics={"score": "up"}),
        "metrics.score='up': expected 'maximize' or 'minimize'",
    ),
    "cmaes for several metrics": (
        change(metric=None, metrics={"a": "maximize", "b": "minimize"}, sampler="cmaes"),
        "sampler cmaes: it takes one metric and no constraints: choose tpe, random, grid, gp",
    ),
    "cmaes with constraints": (
        change(sampler="cmaes", constraints={"gib": "<= 7"}),
        "sampler cmaes: it takes one metric and no constraints",
    ),
    "tpe for several metrics with pauses": (
        change(metric=None, metrics={"a": "maximize", "b": "minimize"}, pruner={"name": "asha", "max_resource": 9}),
        "would draw at random while trials are paused: choose random, grid, or set `pause: false`",
    ),
    "no seeds": (change(seeds=0), "seeds 0: expected at least 1"),
    "seeds with a pruner that does not compare at rungs": (
        change(seeds=2, pruner="median"),
        "seeds 2: pruner median does not compare trials at rungs: choose none, hyperband, asha",
    ),
    "seed as a parameter too": (
        change(seeds=2, space={"seed": {"int": [0, 1]}}),
        "space: seed is not a parameter if `seeds` is set",
    ),
    "seed that is no number": (change(seeds=2, fixed={"seed": "a"}), "fixed seed 'a': the seeds count up from it"),
    "confirmation with one seed": (change(confirm={"seeds": 1}), "confirm: seeds 1: expected at least 2"),
    "confirmation of no trial": (change(confirm={"top": 0}), "confirm: top 0: expected at least 1"),
    "confirmation by a command without the seed": (
        change(confirm={}, job={"command": "python t.py {lr}"}, space={"lr": {"float": [0, 1]}}),
        "seed: the command does not take it: write {seed} where it belongs",
    ),
    "confirmation of a population": (
        change(confirm={}, pruner=PBT, trials=None),
        "confirm: trials of pbt change their values while they are trained",
    ),
    "confirmation by several metrics": (
        {"values": without("metric")["values"] | {"confirm": {}, "metrics": {"loss": "minimize", "size": "minimize"}}},
        "confirm: it compares trials by one metric",
    ),
    "command without the seed": (
        change(seeds=2, job={"command": "python t.py {lr}"}, space={"lr": {"float": [0, 1]}}),
        "seed: the command does not take it: write {seed} where it belongs",
    ),
    "bound without a direction": (change(constraints={"gib": 70}), "constraints: gib: 70: expected '<= NUMBER' or"),
    "missing study": (without("study"), "'study' has no default and was not given"),
    "invalid study name": (change(study="a/b"), "run name 'a/b'"),
    "unknown key": (change(trails=3), "unknown key 'trails' (did you mean 'trials'?)"),
    "no stopping condition": (without("trials"), "no stopping condition: add `trials:`"),
    "zero trials": (change(trials=0), "trials 0: expected at least 1"),
    "zero workers": (change(workers=0), "workers 0: expected at least 1"),
    "trials is not a number": (change(trials="many"), "trials='many'"),
    "invalid direction": (change(direction="up"), "direction='up'"),
    "unknown sampler": (change(sampler="tpee"), "sampler: 'tpee': expected tpe, random"),
    "unknown sampler key": (change(sampler={"name": "tpe", "sed": 1}), "unknown key 'sampler.sed'"),
    "loss to maximize": (change(metric="val_loss"), "metric val_loss: add `direction: minimize`; without it"),
    "unknown pruner": (
        change(pruner="medan"),
        "'medan': expected none, median, hyperband, asha, pbt, or package.module.Class (d",
    ),
    "gp with pauses": (
        change(sampler="gp", pruner={"name": "asha", "max_resource": 9}),
        "sampler gp: it learns from ended trials only, and would draw at random while trials are paused: choose tpe,"
        " random, grid, or set `pause: false` in the pruner",
    ),
    "asha without max_resource": (change(pruner="asha"), "asha needs max_resource: the progress of a complete trial"),
    "pause of median": (
        change(pruner={"name": "median", "pause": False}),
        "pause, hedge and keep_gb are keys of asha, not of median: remove them",
    ),
    "room without pauses": (
        change(pruner={"name": "asha", "max_resource": 9, "pause": False, "keep_gb": 5}),
        "keep_gb 5: expected more than 0, and pause: true",
    ),
    "pbt without perturb": (
        change(pruner=PBT | {"perturb": []}),
        "pbt needs perturb: the parameters that a copy changes",
    ),
    "pbt with unknown perturb": (
        change(pruner=PBT | {"perturb": ["lrr"]}, trials=None),
        "perturb: 'lrr' is not a param",
    ),
    "pbt without interval": (change(pruner=PBT | {"interval": None}), "pbt needs interval: the progress between two"),
    "small population": (change(pruner=PBT | {"population": 3}), "population 3: expected at least 4"),
    "pbt with trials": (change(pruner=PBT), "pruner pbt has `population: N`, and adds copies: remove it"),
    "population of asha": (
        change(pruner={"name": "asha", "max_resource": 9, "population": 4}),
        "population, interval and perturb are keys of pbt, not of asha: remove them",
    ),
    "options of median pruner": (change(pruner={"name": "median", "options": {"a": 1}}), "median has keys of its own"),
    "hyperband without max_resource": (change(pruner="hyperband"), "hyperband needs max_resource"),
    "max_resource below min_resource": (
        change(pruner={"name": "hyperband", "min_resource": 9, "max_resource": 3}),
        "max_resource 3: expected more than min_resource 9",
    ),
    "min_resource of 0": (change(pruner={"name": "median", "min_resource": 0}), "progress counts from 1"),
    "reduction_factor of 1": (
        change(pruner={"name": "hyperband", "max_resource": 9, "reduction_factor": 1}),
        "reduction_factor 1: expected at least 2",
    ),
    "sqlite": (change(storage="sqlite:///a.db"), "storage 'sqlite': expected the URL"),
    "storage is not a URL": (change(storage="secret"), "storage 'secret': expected the URL"),
    "budget of zero hours": (change(budget={"hours": 0}), "hours 0.0: expected more than 0"),
    "unknown budget key": (change(budget={"minutes": 3}), "unknown key 'budget.minutes'"),
    "unknown resource": (change(resources={"gpu": 1}), "unknown flag 'gpu'"),
    "negative max_retries": (change(max_retries=-1), "max_retries -1"),
    "fixed parameter of the space": (change(fixed={"lr": 1}), "fixed lr: it is also a parameter of the space"),
    "empty space": (change(space={}), "space: expected at least one parameter"),
    "reversed range": (change(space={"lr": {"float": [2, 1]}}), "space lr: float [2, 1]"),
    "grid of a function": (change(sampler="grid", space="mine:space"), "whose points are unknown"),
    "grid without steps": (change(sampler="grid"), "a grid needs to know which values"),
    "invalid job": (change(job={"comand": "x"}), "expected a job function, or {command:"),
    "empty command": (change(job={"command": ""}), "command: it is empty"),
    "unknown placeholder": (
        change(job={"command": "t --lr {lr} {lrr}"}),
        "{lrr} is not a parameter (did you mean 'lr'?)",
    ),
    "parameter without placeholder": (change(job={"command": "t"}), "lr: the command does not take it: write {lr}"),
}


@pytest.mark.parametrize(("given", "said"), REFUSED.values(), ids=REFUSED)
def test_invalid_file_is_rejected_in_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        sweep_file.parse(given["values"], FILE)
    told = str(refused.value)
    assert told.startswith(f"{FILE}: ")
    assert said in told
    assert "\n" not in told


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2@db/optuna",
        "postgresql://me:hunter2${PASSWORD}@db/optuna",
        "postgresql+psycopg://me:hun/ter2@hunter2@db:5432/optuna",
        "mysql://:hunter2@db/optuna",
        "postgresql://db/optuna?user=me&password=hunter2",
    ],
)
def test_a_password_in_the_file_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UserError, match=r"it contains a password, .*: write \$\{VARIABLE\} instead") as refused:
        parse(LEAST, storage=url)
    assert "ter2" not in str(refused.value)


def test_population_needs_another_sampler_and_has_no_other_remedy() -> None:
    with pytest.raises(UserError, match=r"sampler gp: it does not go with pruner pbt: choose tpe, random$"):
        sweep_file.parse(change(sampler="gp", pruner=PBT, trials=None)["values"], FILE)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:${PASSWORD}@db:5432/optuna",
        "postgresql://${USER}:${PASSWORD}@${HOST}/optuna",
        "postgresql://me@db/optuna",
        "postgresql:///optuna?host=/run/postgresql",
        "mysql://db:3306/optuna?passwd=${PASSWORD}",
    ],
)
def test_storage_url_without_a_literal_password_is_accepted(url: str) -> None:
    assert parse(LEAST, storage=url).storage == url
