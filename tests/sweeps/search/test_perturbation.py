"""The values of a copy: those that are named change, within their ranges, and the others stay."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mgpu_slurm.sweeps.search import space_parser
from mgpu_slurm.sweeps.search.parameters import Values
from mgpu_slurm.sweeps.search.perturbation import DRAWN_ANEW, FACTORS, perturbed

SPACE = {
    "lr": {"float": [1e-4, 1.0], "log": True},
    "drop": {"float": [0.0, 0.6], "step": 0.1},
    "n": {"int": [1, 64]},
    "even": {"int": [2, 64], "step": 2},
    "opt": {"choice": ["sgd", "adam", [1, 2]]},
    "m": {"float": [0.0, 0.99], "when": {"opt": "sgd"}},
    "width": {"int": [16, 64], "step": 16},
}
POINT: Values = {"lr": 0.1, "drop": 0.3, "n": 20, "even": 20, "opt": "sgd", "m": 0.9, "width": 32}


def drawn(names: list[str], point: Values = POINT, count: int = 200) -> list[Values]:
    space = space_parser.parse(SPACE, "test")
    found = [perturbed(space, point, names, random.Random(seed)) for seed in range(count)]
    for each in found:
        values = space.restored(each)
        assert space.part(values) == values
        assert values.keys() == SPACE.keys() - (set() if values["opt"] == "sgd" else {"m"})
    return found


def test_only_named_parameters_change() -> None:
    for each in drawn(["lr"]):
        assert {name: value for name, value in each.items() if name != "lr"} == {
            name: value for name, value in POINT.items() if name != "lr"
        }


def test_numbers_are_multiplied_by_a_factor_or_drawn_anew() -> None:
    rates = [float(str(each["lr"])) for each in drawn(["lr"])]
    multiplied = [rate for rate in rates if min(abs(rate - 0.1 * factor) for factor in FACTORS) < 1e-12]
    assert len(set(multiplied)) == 2
    assert 1 - len(multiplied) / len(rates) == pytest.approx(DRAWN_ANEW, abs=0.1)


@pytest.mark.parametrize(("name", "value"), [("drop", 0.3), ("n", 2), ("even", 4), ("width", 32)])
def test_change_is_not_lost_by_rounding_to_steps(name: str, value: Any) -> None:
    changed = [each[name] for each in drawn([name], POINT | {name: value})]
    assert sum(each == pytest.approx(value) for each in changed) < 20
    assert {type(each) for each in changed} == {type(value)}


@pytest.mark.parametrize(("lr", "other"), [(1.0, 0.8), (1e-4, 1.2e-4)])
def test_values_stay_within_their_range(lr: float, other: float) -> None:
    assert {lr, other} <= {each["lr"] for each in drawn(["lr"], POINT | {"lr": lr})}


def test_parameter_that_becomes_active_is_drawn_and_one_that_does_not_is_dropped() -> None:
    from_sgd, from_adam = drawn(["opt"]), drawn(["opt"], {**POINT, "opt": "adam"} | {"m": 0.5})
    assert all(("m" in each) is (each["opt"] == "sgd") for each in [*from_sgd, *from_adam])
    assert {each["opt"] for each in from_adam} == {"sgd", "adam", "[1, 2]"}
    without = {name: value for name, value in POINT.items() if name != "m"} | {"opt": "adam"}
    assert len({each["m"] for each in drawn(["opt"], without) if "m" in each}) > 10
