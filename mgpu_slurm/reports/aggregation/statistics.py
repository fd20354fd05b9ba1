"""Statistics of one metric over several runs, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mgpu_slurm.metrics.event_layout import Floats, Integers
from mgpu_slurm.reports.aggregation.history import Curve

RESAMPLES = 2000
CONFIDENCE = 0.95
SEED = 0

NAMES = ("mean", "std", "min", "max", "median", "ci_low", "ci_high")
"""Names of the statistics in files."""

_AT_ONCE = 4_000_000
"""Maximum number of resampled means in memory at a time."""


@dataclass(frozen=True)
class Summary:
    """Statistics by step, over the runs that have that step."""

    steps: Integers
    count: Integers
    """Number of runs at each step."""
    values: dict[str, Floats]
    """Statistics by the names in `NAMES`; NaN if undefined, as are the std and interval of a single run."""


def summarize(curves: Sequence[Curve]) -> Summary:
    """Return statistics over curves of one metric, one curve per run.

    The steps are those of any run; nothing is interpolated. Non-finite values propagate: the mean is NaN if one run is
    NaN. The standard deviation is that of a sample (n - 1).
    """
    steps, values = aligned(curves)
    present = ~np.isnan(values) | _is_nan(steps, curves)
    count = present.sum(axis=0)
    found = {name: np.full(len(steps), np.nan) for name in NAMES}
    # steps with the same set of runs are computed together
    patterns, which = np.unique(present, axis=1, return_inverse=True)
    for number, pattern in enumerate(patterns.T):
        columns = np.flatnonzero(which.ravel() == number)
        for name, result in _statistics(values[np.ix_(pattern, columns)]).items():
            found[name][columns] = result
    return Summary(steps, count, found)


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


def _statistics(values: Floats) -> dict[str, Floats]:
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
            found["ci_low"], found["ci_high"] = confidence_interval(values)
    return found


def confidence_interval(values: Floats) -> tuple[Floats, Floats]:
    """Return a bootstrap confidence interval of the mean over runs at each step.

    This is the percentile interval of Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13: whole
    runs are drawn with replacement, `RESAMPLES` times, and the interval contains the middle `CONFIDENCE` of the sample
    means. The draws are the same for every step, metric and call. The interval is too narrow for few runs: with five, a
    nominal 95% interval contains the mean in about 84% of cases.

    Args:
        values: a row for each run, a column for each step.

    Returns:
        The lower and the upper end at each step; NaN if a value is not finite.
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
