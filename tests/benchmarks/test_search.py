"""The simulated problems are what the benchmark says of them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.search.clock import MARKS, RESOURCE
from benchmarks.search.problems import CONTINUOUS, FAMILIES, WORST, Family, Problem
from benchmarks.search.simulation import METHODS, Sweep


def points(problem: Problem, count: int = 50) -> list[tuple[float, ...]]:
    draw = np.random.default_rng(problem.seed)
    return [(*map(float, draw.uniform(0, 1, CONTINUOUS)), float(draw.integers(3))) for _ in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_curves_begin_with_the_worst_loss_and_end_with_the_final_one(family: Family) -> None:
    problem = Problem(family, 3, RESOURCE)
    for point in points(problem):
        losses = [problem.loss(point, epoch) for epoch in range(RESOURCE + 1)]
        assert losses[0] == pytest.approx(WORST)
        assert losses[-1] == pytest.approx(problem.final(point))
        assert losses == sorted(losses, reverse=True)


def test_regret_of_the_median_configuration_is_one_and_none_is_below_zero() -> None:
    problem = Problem("plain", 3, RESOURCE)
    regrets = [problem.regret(point) for point in points(problem, 2000)]
    assert np.median(regrets) == pytest.approx(1, abs=0.05)
    assert min(regrets) >= 0


@pytest.mark.parametrize(("family", "is_misled"), [("plain", False), ("misleading", True)])
def test_best_configurations_look_worse_at_first_in_the_misleading_family(family: Family, is_misled: bool) -> None:
    problem = Problem(family, 3, RESOURCE)
    ordered = sorted(points(problem, 3000), key=problem.final)
    best, good = ordered[0], ordered[60]
    assert problem.final(best) < problem.final(good)
    assert (problem.loss(best, 1) > problem.loss(good, 1)) is is_misled


def test_simulated_sweep_repeats_itself() -> None:
    def regrets() -> list[float]:
        return Sweep(METHODS["asha"], "noisy", 3, workers=4, whole_trials=6).regrets()

    found = regrets()
    assert len(found) == len(MARKS)
    assert found == regrets()
    assert 0 <= found[-1] <= 1
