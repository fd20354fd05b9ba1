"""What a sweep writes for the HParams tab, read by TensorBoard's own reader; the tab itself: test_sweeps_shown."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import Trial
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import api_pb2, metadata

from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps import hparams
from tests.reports.sweeps import Sweeping, make_sweep, opened

SPAWN = multiprocessing.get_context("spawn")


def columns(made: Sweeping) -> dict[str, Any]:
    """Of the experiment: each parameter's kind and domain."""
    reader = EventAccumulator(str(made.folder.tensorboard)).Reload()
    content = reader.summary_metadata[metadata.EXPERIMENT_TAG].plugin_data.content
    experiment = metadata.parse_experiment_plugin_data(content)
    return {info.name: (api_pb2.DataType.Name(info.type)[10:], domain(info)) for info in experiment.hparam_infos}


def domain(info: Any) -> Any:
    if info.WhichOneof("domain") == "domain_interval":
        return (info.domain_interval.min_value, info.domain_interval.max_value)
    return list(info.domain_discrete) if info.WhichOneof("domain") else None


def metrics(made: Sweeping) -> list[str]:
    experiment = hparams.read_experiment(made.folder)
    assert experiment is not None
    return [info.name.tag for info in experiment.metric_infos]


def status(trial: RunFolder) -> str | None:
    """Of its session; None for one that has not ended."""
    tags = EventAccumulator(str(trial.tensorboard)).Reload().summary_metadata
    if metadata.SESSION_END_INFO_TAG not in tags:
        return None
    content = tags[metadata.SESSION_END_INFO_TAG].plugin_data.content
    return str(api_pb2.Status.Name(metadata.parse_session_end_info_plugin_data(content).status))


@pytest.mark.parametrize(
    ("parameter", "found"),
    [
        ({"float": [0.1, 0.9]}, ("FLOAT64", (0.1, 0.9))),
        ({"int": [1, 10], "step": 2}, ("FLOAT64", (1, 9))),
        ({"choice": [16, 32]}, ("FLOAT64", [16, 32])),
        # of so many the tab would want a pattern, and there is none for numbers
        ({"choice": list(range(10))}, ("FLOAT64", (0, 9))),
        ({"choice": [False, True]}, ("BOOL", [False, True])),
        ({"choice": ["a", "b"]}, ("STRING", ["a", "b"])),
        ({"choice": ["1", "2"]}, ("STRING", ["1", "2"])),
        ({"choice": [None, "null", "none"]}, ("STRING", ["null", '"null"', "none"])),
        ({"choice": [True, 2, 0.5]}, ("STRING", ["true", "2", "0.5"])),
        ({"choice": [[8], {"a": 1}]}, ("STRING", ["[8]", '{"a": 1}'])),
        # no double is 2**53 + 1
        ({"choice": [0, 2**53 + 1]}, ("STRING", ["0", "9007199254740993"])),
    ],
)
def test_column_has_one_type_that_fits_all_its_values(parameter: dict[str, Any], found: Any, tmp_path: Path) -> None:
    made = make_sweep(tmp_path, space={"x": parameter})
    assert columns(made) == {"x": found}
    number = made.begin()
    value, shown = made.values[number]["x"], hparams.parameters_of(made.folder.of_trial(number))["x"]
    kind = {"FLOAT64": float, "BOOL": bool, "STRING": str}[found[0]]
    assert isinstance(shown, kind)
    if kind is str:
        assert shown == found[1][parameter["choice"].index(value)]
    else:
        assert shown == value


def test_constant_parameter_gets_no_column(tmp_path: Path) -> None:
    space = {"x": {"float": [1, 2]}, "a": {"float": [1, 1]}, "b": {"int": [3, 3]}, "c": {"choice": ["only"]}}
    made = make_sweep(tmp_path, space=space)
    assert list(columns(made)) == ["x"]
    assert list(hparams.parameters_of(made.folder.of_trial(made.begin()))) == ["x"]


def test_metric_columns_of_trials_are_added_after_the_sweeps_own(tmp_path: Path) -> None:
    made = make_sweep(tmp_path)
    assert metrics(made) == ["loss", hparams.PRUNED]
    assert metrics(make_sweep(tmp_path, "unpruned", pruner="none")) == ["loss"]
    number = made.begin()
    made.report(number, 0.5, accuracy=0.9)
    made.end(number, "done", {"loss": 0.5, "size": 3.0})
    assert metrics(made) == ["loss", hparams.PRUNED, "accuracy", "size"]


def test_pruned_column_is_added_for_a_trial_pruned_without_a_pruner(tmp_path: Path) -> None:
    made = make_sweep(tmp_path, pruner="none")
    made.run("done", 0.5)
    assert metrics(made) == ["loss"]
    pruned = made.run("pruned", float("nan"))
    assert metrics(made) == ["loss", hparams.PRUNED]
    points = EventAccumulator(str(made.folder.of_trial(pruned).tensorboard)).Reload().Scalars(hparams.PRUNED)
    assert [point.value for point in points] == [1]


# -- ends


def test_session_status_is_that_of_the_latest_attempt(tmp_path: Path) -> None:
    made = make_sweep(tmp_path)
    number = made.begin()
    trial = made.folder.of_trial(number)
    made.report(number, 0.5)
    assert status(trial) is None
    started = hparams.parameters_of(trial)
    made.end(number, "failed")
    assert status(trial) == "STATUS_FAILURE"
    made.start(number)
    assert status(trial) is None
    made.end(number, "done")
    assert status(trial) == "STATUS_SUCCESS"
    assert hparams.parameters_of(trial) == started
    assert len(list(trial.tensorboard.glob("*session*"))) == 2


def test_result_that_was_not_reported_becomes_the_last_point(tmp_path: Path) -> None:
    made = make_sweep(tmp_path)
    number = made.begin()
    made.report(number, 0.5, 0.75)
    made.end(number, "done", {"loss": 0.5, "size": 3.0})
    points = EventAccumulator(str(made.folder.of_trial(number).tensorboard)).Reload()
    assert [(point.step, point.value) for point in points.Scalars("loss")][-1] == (20, 0.5)
    assert [point.value for point in points.Scalars("size")] == [3.0]
    again = made.run("done", 0.5, 0.75)
    points = EventAccumulator(str(made.folder.of_trial(again).tensorboard)).Reload()
    assert [point.step for point in points.Scalars("loss")] == [10, 20]
    # without optimizer steps, reports are shown at their progress
    number = made.begin()
    made.report(number, 0.5, 0.75, steps_each=0)
    made.end(number, "done", {"loss": 0.5})
    points = EventAccumulator(str(made.folder.of_trial(number).tensorboard)).Reload()
    assert [(point.step, point.value) for point in points.Scalars("loss")] == [(1, 0.5), (2, 0.75), (2, 0.5)]


def test_partial_event_file_is_never_visible_to_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_sweep(tmp_path)
    before = sorted(tmp_path.rglob("*"))

    def full(source: Any, target: Any) -> None:
        assert "tfevents" not in Path(source).name
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="disk full"):
        hparams.write_experiment(made.folder, made.sweep)
    assert sorted(tmp_path.rglob("*")) == before


# -- a space that is a function


def chosen(trial: Trial) -> dict[str, Any]:
    kind = trial.suggest_categorical("kind", ["a", None])
    values = {"kind": kind, "x": trial.suggest_float("x", 0, 1), "log_lr": 10 ** trial.suggest_int("power", -4, -1)}
    return values if kind is None else values | {"only": trial.suggest_categorical("only", [True, False])}


def test_columns_of_a_space_function_come_from_its_trials(tmp_path: Path) -> None:
    made = make_sweep(tmp_path, space="space:chosen")
    assert columns(made) == {}
    for _ in range(12):
        made.begin(chosen)
    found = columns(made)
    rates = [values["log_lr"] for values in made.values.values()]
    assert found == {
        "kind": ("STRING", ["a", "null"]),
        "x": ("FLOAT64", (0, 1)),
        "log_lr": ("FLOAT64", (min(rates), max(rates))),
        "only": ("BOOL", [True, False]),
    }
    assert {"only" in values for values in made.values.values()} == {True, False}
    for number, values in made.values.items():
        shown = hparams.parameters_of(made.folder.of_trial(number))
        assert shown == values | {"kind": "null" if values["kind"] is None else "a"}


def test_column_with_mixed_types_becomes_text(tmp_path: Path) -> None:
    made = make_sweep(tmp_path, space="space:chosen")
    for value in (3, [4]):
        made.begin(lambda trial, value=value: {"x": value})
    assert columns(made) == {"x": ("STRING", None)}
    assert hparams.parameters_of(made.folder.of_trial(1)) == {"x": "[4]"}


def bring(folder: Path, worker: int) -> None:
    """Ten metrics of one worker's own."""
    made = opened(folder)
    for metric in range(10):
        trial = made.folder.of_trial(worker * 10 + metric)
        hparams.write_end(trial, made.sweep, "done", {f"m{worker}-{metric}": 1.0})


def test_workers_that_add_columns_concurrently_lose_none(tmp_path: Path) -> None:
    made = make_sweep(tmp_path)
    with SPAWN.Pool(3) as pool:
        pool.starmap(bring, [(made.folder.path, worker) for worker in range(3)], chunksize=1)
    assert len(metrics(made)) == 2 + 30
