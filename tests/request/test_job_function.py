"""Which config a function takes, how it is called with it, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request import job_function

if TYPE_CHECKING:
    from mgpu_slurm import Run

HERE = Path("/here")


@dataclass
class Model:
    width: int = 16
    data: Path = Path("data")


def called(function: Callable[..., Any], values: dict[str, Any]) -> Any:
    """What a function that returns its values is called with."""
    job = job_function.from_callable(function, "job:train")
    return job.call("run", job.fill(values, HERE))


def plain(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    return job_function.from_callable(function, "job:train").fill_plain(values, HERE)


def by_name(run: Run, lr: float = 0.1, epochs=3, *, name="x", data: Path = Path("d"), kind: Literal["a", "b"] = "a"):  # type: ignore[no-untyped-def]
    return run, lr, epochs, name, data, kind


def test_values_are_passed_by_name_with_annotated_or_default_types() -> None:
    given = {"lr": "1e-2", "epochs": 5, "name": "y", "data": "sub", "kind": "b"}
    assert called(by_name, given) == ("run", 0.01, 5, "y", HERE / "sub", "b")
    assert called(by_name, {}) == ("run", 0.1, 3, "x", HERE / "d", "a")
    assert plain(by_name, {"lr": 1}) == {"lr": 1.0, "epochs": 3, "name": "x", "data": "/here/d", "kind": "a"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lr": "fast"}, "config of job:train: lr='fast': expected a valid number"),
        ({"epochs": 1.5}, "config of job:train: epochs=1.5: expected a valid integer"),
        ({"name": 3}, "name=3: expected a valid string"),
        ({"kind": "c"}, "kind='c': expected 'a' or 'b'"),
        ({"lrr": 1}, r"unknown key 'lrr' \(did you mean 'lr'\?\)"),
    ],
)
def test_invalid_value_is_rejected_with_its_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        called(by_name, values)


def test_parameter_without_a_default_is_required() -> None:
    def train(run: Any, lr: float, *, epochs: int) -> Any:
        return lr, epochs

    assert called(train, {"lr": 1, "epochs": 2}) == (1.0, 2)
    with pytest.raises(UserError, match="'epochs' has no default and was not given: add epochs=VALUE"):
        called(train, {"lr": 1})

    def one(run: Any, steps: int) -> int:
        return steps

    assert called(one, {"steps": "4"}) == 4


def test_dataclass_list_and_function_defaults_are_supported() -> None:
    def train(run, *, model: Model, layers=[1], loss=print, table={}, seed=None, on=False):  # type: ignore[no-untyped-def]  # noqa: B006
        layers.append(9)
        return model, layers, loss, table, seed, on

    given = {"model": {"width": 3}, "seed": 7, "on": True}
    expected = (Model(3, HERE / "data"), [1, 9], print, {}, 7, True)
    assert called(train, given) == expected
    # a default that is changed is changed for one call
    assert called(train, given) == expected
    assert "loss" not in plain(train, given)
    with pytest.raises(UserError, match="unknown key 'loss'"):
        called(train, given | {"loss": 1})
    with pytest.raises(UserError, match=r"unknown key 'model.widht' \(did you mean 'width'\?\)"):
        called(train, {"model": {"widht": 3}})


def test_argument_set_by_functools_partial_is_a_default() -> None:
    def train(run: Any, lr: float = 0.1, epochs: int = 3) -> Any:
        return lr, epochs

    assert called(functools.partial(train, lr=0.5), {"epochs": 4}) == (0.5, 4)


def untyped(run, config):  # type: ignore[no-untyped-def]
    return config


def emptied(run, config=None):  # type: ignore[no-untyped-def]
    return config


def mapped(run: Any, values: Mapping[str, Any], verbose: bool = False) -> Any:
    return values


def wrapped(*words: Any, **more: Any) -> Any:
    return words[1]


def after_run(run: Any, *words: Any) -> Any:
    return words[0]


@pytest.mark.parametrize("function", [untyped, emptied, mapped, wrapped, after_run, lambda run, c, /: c])
def test_config_parameter_receives_the_whole_mapping(function: Any) -> None:
    assert called(function, {"lr": "fast", "model": {"width": 1}}) == {"lr": "fast", "model": {"width": 1}}
    assert called(function, {}) == {}


def test_config_parameter_receives_the_whole_dataclass() -> None:
    def train(run: Any, config: Model, verbose: bool = False) -> Any:
        return config, verbose

    def optional(run: Any, config: Model | None = None) -> Any:
        return config

    assert called(train, {"width": "2"}) == (Model(2, HERE / "data"), False)
    assert called(optional, {"width": "2"}) == Model(2, HERE / "data")
    with pytest.raises(UserError, match="'verbose' is a parameter besides the one for all config values"):
        called(train, {"verbose": True})


def test_two_dataclass_parameters_are_two_values() -> None:
    def both(run: Any, model: Model, other: Model) -> Any:
        return model.width, other.width

    assert called(both, {"model": {"width": 1}, "other": {"width": 2}}) == (1, 2)


def test_key_of_a_parameter_next_to_the_mapping_is_rejected() -> None:
    with pytest.raises(UserError, match="config of job:train: 'verbose' is a parameter besides the one"):
        called(mapped, {"verbose": True})


@pytest.mark.parametrize("values", [{"lr": 0.5}, {"epochs": 4, "lr": 0.5}])
def test_value_for_an_untyped_config_parameter_is_rejected(values: dict[str, Any]) -> None:
    def train(run, lr, epochs=3):  # type: ignore[no-untyped-def]
        return lr

    with pytest.raises(UserError, match=r"parameter 'lr' has no .*: annotate it \(lr: float\) to pass 0.5"):
        called(train, values)
    # one that is said to take them all may have a key of its own name
    assert called(mapped, {"values": 1}) == {"values": 1}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda run: None,
            r"is <lambda>\(run\): it must take the run and a config, as in train\(run, config\)",
        ),
        (lambda: None, r"is <lambda>\(\): it must take the run and a config"),
        (lambda *, run, lr: None, "it must take the run and a config"),
        (lambda run, **values: None, r"the config values that \*\*values takes are unknown"),
        (lambda run, lr=0.1, **values: None, r"the config values that \*\*values takes"),
        (lambda run, lr=0.1, /: None, "config values are passed by name, but 'lr' is positional-only: remove the /"),
        (3, r"target 'job:train' is of type int, not a function"),
    ],
)
def test_function_with_an_unsupported_signature_is_rejected(function: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        job_function.from_callable(function, "job:train")


def test_annotation_that_cannot_be_resolved_is_named() -> None:
    def train(run: Any, lr: Nothing = 1) -> None:  # type: ignore[name-defined]  # noqa: F821
        pass

    with pytest.raises(UserError, match="annotation of 'lr' in train cannot be resolved: name 'Nothing'"):
        job_function.from_callable(train, "job:train")
