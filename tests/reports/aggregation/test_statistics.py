"""Statistics over runs, step by step."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from mgpu_slurm.reports.aggregation.history import Curve
from mgpu_slurm.reports.aggregation.statistics import NAMES, RESAMPLES, SEED, Summary, confidence_interval, summarize


def curve(points: dict[int, float]) -> Curve:
    return Curve(np.asarray(sorted(points), np.int64), np.asarray([points[step] for step in sorted(points)], float))


def at(summary: Summary, step: int) -> dict[str, float]:
    place = summary.steps.tolist().index(step)
    return {name: float(summary.values[name][place]) for name in NAMES} | {"count": int(summary.count[place])}


RUNS = some.lists(some.dictionaries(some.integers(0, 12), some.floats(-1e6, 1e6), min_size=1), min_size=1, max_size=6)


@given(RUNS)
def test_each_step_has_the_statistics_of_the_runs_that_have_it(runs: list[dict[int, float]]) -> None:
    summary = summarize([curve(points) for points in runs])
    assert summary.steps.tolist() == sorted({step for points in runs for step in points})
    for step in summary.steps.tolist():
        values = [points[step] for points in runs if step in points]
        found = at(summary, step)
        assert found["count"] == len(values)
        assert found["mean"] == pytest.approx(statistics.fmean(values), abs=1e-6)
        assert found["median"] == pytest.approx(statistics.median(values), abs=1e-6)
        assert (found["min"], found["max"]) == (min(values), max(values))
        if len(values) == 1:
            assert all(math.isnan(found[name]) for name in ("std", "ci_low", "ci_high"))
        else:
            assert found["std"] == pytest.approx(statistics.stdev(values), abs=1e-6)
            assert min(values) <= found["ci_low"] <= found["ci_high"] <= max(values)


def test_interval_is_bootstrapped_from_whole_runs() -> None:
    values = np.random.default_rng(5).normal(size=(4, 3))
    low, high = confidence_interval(values)
    draws = np.random.default_rng(SEED).multinomial(4, [0.25] * 4, size=RESAMPLES)
    for step in range(3):
        means = sorted(sum(draw * values[:, step]) / 4 for draw in draws)
        assert low[step] == pytest.approx(np.percentile(means, 2.5))
        assert high[step] == pytest.approx(np.percentile(means, 97.5))


def test_interval_of_many_runs_covers_the_mean_in_about_95_percent() -> None:
    values = np.random.default_rng(1).exponential(size=(40, 1500))
    low, high = confidence_interval(values)
    assert 0.90 < np.mean((low < 1) & (high > 1)) < 0.965


def test_interval_does_not_depend_on_the_number_of_steps() -> None:
    values = np.random.default_rng(2).normal(size=(7, 5000))
    whole, part = confidence_interval(values), confidence_interval(values[:, 4000:4001])
    assert [whole[0][4000], whole[1][4000]] == pytest.approx([part[0][0], part[1][0]], rel=1e-12)


def test_interval_of_equal_runs_has_no_width() -> None:
    summary = summarize([curve({1: 0.1}) for _ in range(7)])
    found = at(summary, 1)
    assert (found["ci_low"], found["ci_high"]) == (0.1, 0.1)


def test_non_finite_value_affects_only_its_step() -> None:
    runs = [curve({1: 1.0, 2: math.nan, 3: math.inf, 4: 1.0}), curve({1: 3.0, 2: 3.0, 3: 3.0, 4: 3.0})]
    summary = summarize(runs)
    assert summary.count.tolist() == [2, 2, 2, 2]
    assert [at(summary, step)["mean"] for step in (1, 3, 4)] == [2, math.inf, 2]
    diverged = at(summary, 2)
    assert all(math.isnan(diverged[name]) for name in NAMES)
    assert [math.isnan(at(summary, step)["ci_low"]) for step in (1, 2, 3, 4)] == [False, True, True, False]
