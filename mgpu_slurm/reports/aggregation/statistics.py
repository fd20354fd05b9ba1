"""Statistics of one metric over several runs: step by step, at their ends and of their best values."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mgpu_slurm.metrics.event_layout import Floats, Integers
from mgpu_slurm.reports.aggregation.merging import Curve

Interval = Literal["t", "bootstrap"]

FEW_RUNS = 10
"""Below this number of runs the default interval is Student's: a bootstrap's is too narrow."""
RESAMPLES = 2000
CONFIDENCE = 0.95
SEED = 0

NAMES = ("mean", "std", "min", "max", "median", "ci_low", "ci_high")
"""Names of the statistics in files."""

_LOWER_IS_BETTER = re.compile(
    r"(?<![a-z])(?:[a-z]*loss|losses|errors?|err|[a-z]*perplexity|ppl|[bw]er|cer|r?mse|ma[p]?e|nll|fid|bp[cd]|[a-z]*entropy)"
    r"(?![a-z])"
)

_AT_ONCE = 4_000_000
"""Maximum number of resampled means in memory at a time."""


@dataclass(frozen=True)
class Summary:
    """Statistics by step, over the runs that have that step."""

    steps: Integers
    count: Integers
    """Number of runs at each step."""
    runs: int
    """Number of all runs."""
    values: dict[str, Floats]
    """Statistics by the names in `NAMES`; NaN if undefined, as are the std and interval of a single run."""
    final: dict[str, float]
    """Statistics of each run's own last value."""
    best: dict[str, float]
    """Statistics of each run's best value."""
    minimized: bool

    @property
    def common(self) -> int:
        """The index of the last step that all runs have; if there is none, of the last one that most have."""
        return int(np.flatnonzero(self.count == self.count.max())[-1])


def is_minimized(metric: str) -> bool:
    """Return whether lower values of a metric are better, which its name suggests: `valid/loss`, `top5_error`."""
    return _LOWER_IS_BETTER.search(metric.lower()) is not None


def summarize(curves: Sequence[Curve], minimized: bool = True, interval: Interval | None = None) -> Summary:
    """Return statistics over curves of one metric, one curve per run.

    The steps are those of any run; nothing is interpolated. Non-finite values propagate: the mean is NaN if one run is
    NaN. The standard deviation is that of a sample (n - 1).

    Args:
        curves: none is empty.
        minimized: whether lower values are better.
        interval: how the interval of the mean is computed, see `confidence_interval`.
    """
    steps, values = aligned(curves)
    present = ~np.isnan(values) | _is_nan(steps, curves)
    count = present.sum(axis=0)
    found = {name: np.full(len(steps), np.nan) for name in NAMES}
    # steps with the same set of runs are computed together
    patterns, which = np.unique(present, axis=1, return_inverse=True)
    for number, pattern in enumerate(patterns.T):
        columns = np.flatnonzero(which.ravel() == number)
        for name, result in _statistics(values[np.ix_(pattern, columns)], interval).items():
            found[name][columns] = result
    final = _of_values([curve.values[-1] for curve in curves], interval)
    best = _of_values([best_of(curve.values, minimized) for curve in curves], interval)
    return Summary(steps, count, len(curves), found, final, best, minimized)


def best_of(values: Floats, minimized: bool) -> float:
    """Return the best value of a run; NaN if all are."""
    known = values[~np.isnan(values)]
    if not len(known):
        return math.nan
    return float(known.min() if minimized else known.max())


def _of_values(values: Sequence[float], interval: Interval | None) -> dict[str, float]:
    """Return statistics of a value of each run."""
    found = _statistics(np.asarray(values, np.float64)[:, None], interval)
    return {name: float(found[name][0]) if name in found else math.nan for name in NAMES}


def aligned(curves: Sequence[Curve]) -> tuple[Integers, Floats]:
    """Return all steps, and a row of values for each curve; NaN at steps that a curve does not have."""
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    values = np.full((len(curves), len(steps)), np.nan)
    for row, curve in zip(values, curves, strict=True):
        row[np.searchsorted(steps, curve.steps)] = curve.values
    return steps, values


def _is_nan(steps: Integers, curves: Sequence[Curve]) -> NDArray[np.bool_]:
    """Return a mask of the steps at which a curve has the value NaN, not just no value."""
    found = np.zeros((len(curves), len(steps)), bool)
    for row, curve in zip(found, curves, strict=True):
        row[np.searchsorted(steps, curve.steps[np.isnan(curve.values)])] = True
    return found


def _statistics(values: Floats, interval: Interval | None) -> dict[str, Floats]:
    """Return statistics of runs (rows) at steps (columns) that all of them have."""
    # a diverged run reports infinite losses, which is not a reason for warnings
    with np.errstate(invalid="ignore", over="ignore"):
        found = {
            "mean": values.mean(axis=0),
            "min": values.min(axis=0),
            "max": values.max(axis=0),
            "median": np.median(values, axis=0),
        }
        if len(values) > 1:
            found["std"] = values.std(axis=0, ddof=1)
            found["ci_low"], found["ci_high"] = confidence_interval(values, interval)
    return found


def confidence_interval(values: Floats, interval: Interval | None = None) -> tuple[Floats, Floats]:
    """Return a confidence interval of the mean over runs at each step.

    Args:
        values: a row for each run, two at least, and a column for each step.
        interval: None for Student's below `FEW_RUNS` runs, and a bootstrap from there on.

    Returns:
        The lower and the upper end at each step; NaN if a value is not finite.
    """
    if interval == "bootstrap" or (interval is None and len(values) >= FEW_RUNS):
        return _bootstrap(values)
    return _student(values)


def _student(values: Floats) -> tuple[Floats, Floats]:
    """Return Student's interval, which assumes that the values of runs are normally distributed."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    mean, runs = values.mean(axis=0), len(values)
    mean = np.where(np.isfinite(mean), mean, np.nan)
    half = stdtrit(runs - 1, 1 - (1 - CONFIDENCE) / 2) * values.std(axis=0, ddof=1) / math.sqrt(runs)
    return mean - half, mean + half


def _bootstrap(values: Floats) -> tuple[Floats, Floats]:
    """Return a bootstrap's interval.

    This is the percentile interval of Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13: whole
    runs are drawn with replacement, `RESAMPLES` times, and the interval contains the middle `CONFIDENCE` of the sample
    means. The draws are the same for every step, metric and call. The interval is too narrow for few runs: with five, a
    nominal 95% interval contains the mean in about 84% of cases.
    """
    runs, steps = values.shape
    weights = np.random.default_rng(SEED).multinomial(runs, np.full(runs, 1 / runs), size=RESAMPLES) / runs
    tail = (1 - CONFIDENCE) / 2
    ends = np.full((2, steps), np.nan)
    finite = np.flatnonzero(np.isfinite(values).all(axis=0))
    for columns in np.array_split(finite, max(1, -(-len(finite) * RESAMPLES // _AT_ONCE))):
        if len(columns):
            chosen = values[:, columns]
            found = np.quantile(weights @ chosen, [tail, 1 - tail], axis=0)
            # weights add up to 1 except for rounding errors
            ends[:, columns] = np.clip(found, chosen.min(axis=0), chosen.max(axis=0))
    return ends[0], ends[1]
