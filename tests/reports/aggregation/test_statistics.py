"""Statistics over runs, step by step."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from scipy.stats import t

from mgpu_slurm.metrics.event_layout import Floats
from mgpu_slurm.reports.aggregation.merging import Curve
from mgpu_slurm.reports.aggregation.statistics import (
    FEW_RUNS,
    NAMES,
    RESAMPLES,
    SEED,
    Interval,
    Summary,
    confidence_interval,
    is_minimized,
    summarize,
)


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
            # Student's interval, as scipy has it
            half = t.ppf(0.975, len(values) - 1) * found["std"] / math.sqrt(len(values))
            expected = (found["mean"] - half, found["mean"] + half)
            assert (found["ci_low"], found["ci_high"]) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_interval_is_bootstrapped_from_whole_runs() -> None:
    values = np.random.default_rng(5).normal(size=(4, 3))
    low, high = confidence_interval(values, "bootstrap")
    draws = np.random.default_rng(SEED).multinomial(4, [0.25] * 4, size=RESAMPLES)
    for step in range(3):
        means = sorted(sum(draw * values[:, step]) / 4 for draw in draws)
        assert low[step] == pytest.approx(np.percentile(means, 2.5))
        assert high[step] == pytest.approx(np.percentile(means, 97.5))


def test_interval_of_few_runs_is_students_and_covers_the_mean() -> None:
    values = np.random.default_rng(4).normal(size=(3, 4000))
    covered = {kind: _covers(values, 0, kind) for kind in (None, "t", "bootstrap")}
    assert covered[None] == covered["t"] == pytest.approx(0.95, abs=0.015)
    # which is why it is not the default for few runs
    assert covered["bootstrap"] < 0.8
    many = np.random.default_rng(4).normal(size=(FEW_RUNS, 10))
    assert np.array_equal(confidence_interval(many), confidence_interval(many, "bootstrap"))


def _covers(values: Floats, mean: float, kind: Interval | None) -> float:
    low, high = confidence_interval(values, kind)
    return float(np.mean((low < mean) & (high > mean)))


def test_interval_of_many_runs_covers_the_mean_in_about_95_percent() -> None:
    values = np.random.default_rng(1).exponential(size=(40, 1500))
    assert 0.90 < _covers(values, 1, None) < 0.965


def test_interval_does_not_depend_on_the_number_of_steps() -> None:
    values = np.random.default_rng(2).normal(size=(7, 5000))
    whole, part = (confidence_interval(chosen, "bootstrap") for chosen in (values, values[:, 4000:4001]))
    assert [whole[0][4000], whole[1][4000]] == pytest.approx([part[0][0], part[1][0]], rel=1e-12)


@pytest.mark.parametrize("interval", ["t", "bootstrap"])
def test_interval_of_equal_runs_has_no_width(interval: Interval) -> None:
    summary = summarize([curve({1: 0.1}) for _ in range(7)], interval=interval)
    found = at(summary, 1)
    assert (found["ci_low"], found["ci_high"]) == pytest.approx((0.1, 0.1), rel=1e-15)


def test_ends_and_best_values_are_those_of_each_run() -> None:
    runs = [curve({1: 3.0, 2: 1.0, 3: 2.0}), curve({1: 5.0, 2: 4.0}), curve({2: math.nan, 5: 0.5})]
    summary = summarize(runs)
    assert (summary.steps[summary.common], summary.count[summary.common], summary.runs) == (2, 3, 3)
    assert summary.final["mean"] == pytest.approx(statistics.fmean([2.0, 4.0, 0.5]))
    assert summary.best["mean"] == pytest.approx(statistics.fmean([1.0, 4.0, 0.5]))
    assert summarize(runs, minimized=False).best["mean"] == pytest.approx(statistics.fmean([3.0, 5.0, 0.5]))
    apart = summarize([curve({1: 1.0, 2: 1.0}), curve({3: 1.0})])
    assert apart.steps[apart.common] == 3


MINIMIZED = ["loss", "valid/loss", "val_loss", "trainLoss", "top5_error", "test.perplexity", "WER", "rmse", "nll"]
MAXIMIZED = ["accuracy", "power", "lossless", "answers", "merit", "f1", "steps_per_second"]


@pytest.mark.parametrize(("metric", "expected"), [*((m, True) for m in MINIMIZED), *((m, False) for m in MAXIMIZED)])
def test_direction_is_taken_from_the_name(metric: str, expected: bool) -> None:
    assert is_minimized(metric) == expected


def test_non_finite_value_affects_only_its_step() -> None:
    runs = [curve({1: 1.0, 2: math.nan, 3: math.inf, 4: 1.0}), curve({1: 3.0, 2: 3.0, 3: 3.0, 4: 3.0})]
    summary = summarize(runs)
    assert summary.count.tolist() == [2, 2, 2, 2]
    assert [at(summary, step)["mean"] for step in (1, 3, 4)] == [2, math.inf, 2]
    diverged = at(summary, 2)
    assert all(math.isnan(diverged[name]) for name in NAMES)
    assert [math.isnan(at(summary, step)["ci_low"]) for step in (1, 2, 3, 4)] == [False, True, True, False]
