"""The search space: what the file may say, what is drawn from it, and what a grid of it is."""

from __future__ import annotations

import itertools
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as some

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request.config import parse_yaml
from mgpu_slurm.sweeps.search import space, space_parser
from mgpu_slurm.sweeps.search.parameters import Choice, Float, Int, Values
from mgpu_slurm.sweeps.search.space import Space

FILE = "sweep.yaml"

WHOLE = """
momentum: {float: [0.0, 0.9], step: 0.3, when: {optimizer: sgd}}
betas: {choice: [[0.9, 0.99], [0.9, 0.999]], when: {optimizer: [adam, adamw]}}
lr: {float: [1e-4, 1], log: true}
optimizer: {choice: [sgd, adam, adamw]}
width: {int: [16, 100], step: 16}
nesterov: {choice: [true, false], when: {optimizer: sgd, width: [32, 64]}}
"""


def parse(text: str) -> Space:
    return space_parser.parse(parse_yaml(text, FILE), FILE)


def drawn(made: Space, trials: int = 200) -> list[Values]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    return [made.suggest(study.ask()) for _ in range(trials)]


def test_sampled_values_respect_ranges_and_conditions() -> None:
    found = drawn(parse(WHOLE))
    for values in found:
        assert 1e-4 <= values["lr"] <= 1
        assert values["width"] in (16, 32, 48, 64, 80, 96)
        is_sgd = values["optimizer"] == "sgd"
        assert ("momentum" in values) == is_sgd
        assert ("betas" in values) == (not is_sgd)
        assert ("nesterov" in values) == (is_sgd and values["width"] in (32, 64))
        assert values.get("betas", [0.9, 0.99]) in ([0.9, 0.99], [0.9, 0.999])
        assert values.get("nesterov", True) in (True, False)
    # log: half of them lie below the geometric mean
    assert 70 < sum(values["lr"] < 1e-2 for values in found) < 130
    assert {round(values["momentum"], 9) for values in found if "momentum" in values} == {0.0, 0.3, 0.6, 0.9}


def test_lines_list_each_parameter_after_those_it_depends_on() -> None:
    assert parse(WHOLE).lines() == [
        "lr         float 0.0001 to 1, log",
        'optimizer  one of "sgd", "adam", "adamw"',
        'momentum   float 0 to 0.9, step 0.3, when optimizer is "sgd"',
        'betas      one of [0.9, 0.99], [0.9, 0.999], when optimizer is "adam" or "adamw"',
        "width      int 16 to 96, step 16",
        'nesterov   one of true, false, when optimizer is "sgd" and width is 32 or 64',
    ]


class TestGrid:
    def test_grid_has_each_combination_once_and_respects_conditions(self) -> None:
        made = parse(
            """
            optimizer: {choice: [sgd, adam]}
            momentum: {float: [0.1, 0.5], step: 0.2, when: {optimizer: sgd}}
            width: {int: [8, 16], step: 8}
            """
        )
        assert made.grid() == [
            *({"optimizer": "sgd", "momentum": m, "width": w} for m in (0.1, 0.3, 0.5) for w in (8, 16)),
            *({"optimizer": "adam", "width": w} for w in (8, 16)),
        ]

    @given(
        some.dictionaries(some.sampled_from("abcde"), some.lists(some.integers(), min_size=1, max_size=3, unique=True))
    )
    def test_grid_without_conditions_is_the_cartesian_product(self, choices: dict[str, list[int]]) -> None:
        made = Space(tuple(Choice(name, {}, tuple(values)) for name, values in choices.items()))
        expected = [dict(zip(choices, point, strict=True)) for point in itertools.product(*choices.values())]
        assert made.grid() == expected

    def test_float_range_needs_a_step(self) -> None:
        with pytest.raises(UserError, match=r"^space lr: a grid needs to know which values: give `step: ...` to"):
            parse("lr: {float: [0.1, 1]}").grid()

    def test_oversized_grid_is_rejected_before_it_is_built(self) -> None:
        with pytest.raises(UserError, match="more than 100,000 points"):
            parse("\n".join(f"p{number}: {{int: [1, 100]}}" for number in range(40))).grid()


def test_probes_cover_both_ends_of_every_parameter() -> None:
    made = parse("lr: {float: [1, 2]}\nwidth: {int: [16, 100], step: 16}\nact: {choice: [relu, null]}")
    found = made.probes()
    assert {(probe["lr"], probe["width"], probe["act"]) for probe in found} == {
        (1.0, 16, "relu"),
        (2.0, 16, "relu"),
        # no whole number
        (1.381966, 16, "relu"),
        (1.0, 96, "relu"),
        (1.0, 16, None),
    }
    # the kind counts too: 1 is no float
    assert {type(probe["lr"]) for probe in found} == {float}


def test_probes_include_a_parameter_only_if_its_condition_holds() -> None:
    made = parse("""
        optimizer: {choice: [adam, sgd]}
        momentum: {float: [0, 1], when: {optimizer: sgd}}
        nesterov: {choice: [true], when: {momentum_kind: [heavy]}}
        momentum_kind: {choice: [light, heavy], when: {optimizer: sgd}}
    """)
    found = made.probes()
    assert {"optimizer": "adam"} in found
    assert {"optimizer": "sgd", "momentum": 1.0, "momentum_kind": "light"} in found
    assert {"optimizer": "sgd", "momentum": 0.0, "momentum_kind": "heavy", "nesterov": True} in found


def test_dotted_names_become_a_nested_config() -> None:
    assert space.nested({"lr": 1, "model.width": 2, "model.head.depth": 3}) == {
        "lr": 1,
        "model": {"width": 2, "head": {"depth": 3}},
    }


def test_differences_between_spaces_are_described() -> None:
    old = parse("lr: {float: [0.1, 1]}\nwidth: {int: [1, 8]}\nact: {choice: [a, b]}")
    new = parse("lr: {float: [0.1, 1], log: true}\nact: {choice: [a, b]}\ndepth: {int: [1, 2], when: {act: a}}")
    assert space.differences(old, new) == [
        "width is gone",
        "depth is new",
        "lr was float 0.1 to 1 and is float 0.1 to 1, log",
    ]
    assert space.differences(old, old) == []


@given(
    some.integers(-50, 50), some.integers(0, 100), some.integers(1, 30), some.booleans(), some.integers(0, 2**32 - 1)
)
def test_stepped_range_ends_at_its_last_step(low: int, size: int, step: int, is_float: bool, seed: int) -> None:
    """So every sample is a point of the grid, whatever the numbers."""
    kind, parts = ("float", 10) if is_float else ("int", 1)
    # as somebody writes them: 0.3
    numbers: list[Any] = [number / parts if is_float else number for number in (low, low + size, step)]
    options: dict[str, Any] = {kind: numbers[:2], "step": numbers[2]}
    made = space_parser.parse({"x": options}, FILE)
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed)).ask()
    value = made.suggest(trial)["x"]
    assert any(abs(value - point["x"]) < 1e-9 for point in made.grid())
    assert len(made.grid()) == size // step + 1


REFUSED = {
    "": "space: expected at least one parameter",
    "[1, 2]": "space: expected at least one parameter",
    "lr: 0.1": "space lr: expected a mapping such as .*; put a constant into `fixed:`",
    "lr: {}": "space lr: no kind: give one of float, int and choice",
    "lr: {float: [0, 1], int: [0, 1]}": "space lr: both float and int: give one",
    "lr: {flaot: [0, 1]}": "space lr: unknown key 'flaot' .did you mean 'float'",
    "lr: {float: [0, 1], lgo: true}": r"space lr: unknown key 'lgo' \(did you mean 'log'\?\)",
    "lr: {choice: [0, 1], log: true}": "space lr: unknown key 'log'",
    "lr: {float: [1, 0.5]}": r"space lr: float \[1, 0.5\]: the lower end comes first: swap them",
    "lr: {float: [1]}": r"space lr: float \[1\]: expected two numbers",
    "lr: {float: [a, 1]}": "expected two numbers",
    "lr: {float: [0, .inf]}": "expected two numbers",
    "lr: {int: [0.5, 1]}": "expected two whole numbers",
    "lr: {int: [false, true]}": "expected two whole numbers",
    "lr: {float: [0, 1], log: true}": "log needs both ends above 0",
    "lr: {float: [1, 2], log: maybe}": "log 'maybe': expected true or false",
    "lr: {float: [1, 2], log: true, step: 0.1}": "log and step cannot be combined",
    "lr: {float: [1, 2], step: 0}": "step 0: expected a number above 0",
    "lr: {int: [1, 2], step: 0.5}": "step 0.5: expected a whole number above 0",
    "act: {choice: []}": r"choice \[\]: expected a list",
    "act: {choice: relu}": "choice 'relu': expected a list",
    "act: {choice: [1, 2, 1]}": "choice 1 is listed twice",
    "act: {choice: [1, true]}": "choice true is listed twice",
    "a: {int: [1, 2], when: b}": "space a: when 'b': expected a mapping",
    "a: {int: [1, 2], when: {c: 1}}": "space a: when c: there is no such parameter",
    "a: {int: [1, 2], when: {b: 1}}\nb: {float: [1, 2]}": "space a: when b: a condition on a range of floats",
    "a: {int: [1, 2], when: {b: z}}\nb: {choice: [x, y]}": "space a: when b is 'z': it never has this value, it is",
    "a: {int: [1, 2], when: {b: 1}}\nb: {int: [1, 2], when: {a: 1}}": "space: a, b depend on each other",
}


@pytest.mark.parametrize(("text", "said"), REFUSED.items(), ids=[text or "empty" for text in REFUSED])
def test_invalid_space_is_rejected_in_one_line(text: str, said: str) -> None:
    with pytest.raises(UserError, match=rf"^{FILE}: .*{said}") as refused:
        parse(text)
    assert "\n" not in str(refused.value)


def test_spaces_are_compared_by_value() -> None:
    assert parse("a: {float: [1, 2]}") == Space((Float("a", {}, 1.0, 2.0),))
    assert parse("a: {int: [1, 9], step: 4}") == Space((Int("a", {}, 1, 9, step=4),))
