"""What a sweep is after: objectives and constraints as the sweep file has them."""

from __future__ import annotations

import math

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.sweeps.search.goals import Constraint, Objective, constraints_of, objectives_of


def test_objectives_are_one_metric_or_several() -> None:
    assert objectives_of("score", None, {}) == (Objective("score", "maximize"),)
    assert objectives_of("loss", "minimize", {}) == (Objective("loss", "minimize"),)
    several = objectives_of(None, None, {"score": "maximize", "size": "minimize"})
    assert [(each.metric, each.loss(2.0)) for each in several] == [("score", -2.0), ("size", 2.0)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((None, None, {}), "add `metric: NAME`, or `metrics:"),
        (("loss", None, {}), "metric loss: add `direction: minimize`"),
        (("score", None, {"score": "maximize"}), "metrics: it contains metric and direction: remove these"),
        ((None, "minimize", {"score": "maximize"}), "metrics: it contains metric and direction: remove these"),
    ],
)
def test_unclear_objectives_are_refused(given: tuple[object, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        objectives_of(*given)  # type: ignore[arg-type]


def test_violation_is_the_distance_beyond_the_bound() -> None:
    upper, lower = constraints_of({"gib": "<= 70", "rate": ">=  1.5e3"})
    assert (upper, lower) == (Constraint("gib", True, 70.0), Constraint("rate", False, 1500.0))
    assert [upper.violation(value) for value in (70, 71, math.nan)] == [0, 1, math.inf]
    assert [lower.violation(value) for value in (1500, 1400, math.nan)] == [0, 100, math.inf]
    assert (str(upper), str(lower)) == ("gib <= 70", "rate >= 1500")


@pytest.mark.parametrize("text", ["70", "< 70", "<= much", ">= nan", "<= inf", ""])
def test_invalid_bound_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"constraints: gib: .*: expected '<= NUMBER' or '>= NUMBER'"):
        constraints_of({"gib": text})
