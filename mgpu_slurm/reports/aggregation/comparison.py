"""Compare two groups of runs by pairs with the same seed."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import counted, short_value
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.reports.aggregation import history, run_sources
from mgpu_slurm.reports.aggregation.aggregate import grouped, is_seed
from mgpu_slurm.reports.aggregation.history import History, On
from mgpu_slurm.reports.aggregation.merging import Curve
from mgpu_slurm.reports.aggregation.statistics import CONFIDENCE, is_minimized


@dataclass(frozen=True)
class Difference:
    """One metric of both sides, over the pairs of runs that have it."""

    metric: str
    pairs: int
    step: int | None
    """The last step that all runs have; None if there is none, so that each run's last value counts."""
    a: float
    """Mean over the runs of the first side."""
    b: float
    difference: float
    """Mean of a - b."""
    low: float
    """Lower end of the difference's interval, Student's for pairs."""
    high: float
    p_a_better: float
    """How likely the first side is better on average, given the differences: Student's t, without prior knowledge."""
    lower_is_better: bool


@dataclass(frozen=True)
class Comparison:
    on: On
    a: str
    b: str
    differences: list[Difference]
    notes: list[str]

    @property
    def facts(self) -> dict[str, Any]:
        """Return the machine-readable facts."""
        metrics = {each.metric: {k: v for k, v in asdict(each).items() if k != "metric"} for each in self.differences}
        return {"on": self.on, "a": self.a, "b": self.b, "metrics": metrics, "notes": self.notes}

    def lines(self) -> list[str]:
        """Return the comparison as a table for people."""
        from tabulate import tabulate

        header = [
            "METRIC",
            "AT",
            "PAIRS",
            "A",
            "B",
            "A - B",
            f"{CONFIDENCE:.0%} INTERVAL",
            "BETTER IF",
            "P(A IS BETTER)",
        ]
        rows = [
            [
                each.metric,
                "end of each" if each.step is None else f"{self.on} {each.step}",
                str(each.pairs),
                *(short_value(value) for value in (each.a, each.b, each.difference)),
                f"{short_value(each.low)} to {short_value(each.high)}",
                "lower" if each.lower_is_better else "higher",
                f"{each.p_a_better:.3f}",
            ]
            for each in self.differences
        ]
        table = tabulate(rows, header, tablefmt="plain", disable_numparse=True).splitlines()
        return [f"A         {self.a}", f"B         {self.b}", *table, *(f"note      {note}" for note in self.notes)]


def compare(words: Sequence[str], on: On = "step", by: Sequence[str] = (), note: Note = quiet) -> Comparison:
    """Return how two groups of runs differ, over the seeds that both have.

    Args:
        words: two to compare; or runs of which `by` makes two groups.
        by: names of config values.
        note: called if a cluster does not answer.

    Raises:
        UserError: there are not two groups, or they have no pairs of runs.
    """
    if len(words) == 2 and not by:
        sides = [(word, history.read(run_sources.sources([word]), on, note)) for word in words]
    else:
        sides = [(group.name, group.runs) for group in grouped(history.read(run_sources.sources(words), on, note), by)]
    if len(sides) != 2:
        raise UserError(
            f"--compare: {counted(len(sides), 'group')} found: name two groups, or one with `--by KEY` of two values"
        )
    (a, of_a), (b, of_b) = ((name, _by_seed(name, runs)) for name, runs in sides)
    seeds = [seed for seed in of_a if seed in of_b]
    if len(seeds) < 2:
        raise UserError(
            f"--compare: {a} and {b} have {counted(len(seeds), 'seed')} in common: two at least are needed,"
            f" such as of `--seeds 3` for both"
        )
    pairs = [(of_a[seed], of_b[seed]) for seed in seeds]
    metrics = dict.fromkeys(name for pair in pairs for name in pair[0].curves if name in pair[1].curves)
    found = [_difference(metric, pairs) for metric in metrics]
    left_out = [
        run.name for side, other in ((of_a, of_b), (of_b, of_a)) for seed, run in side.items() if seed not in other
    ]
    notes = [f"without a partner of the same seed: {', '.join(left_out)}"] if left_out else []
    differences = [each for each in found if each is not None]
    if not differences:
        raise UserError(f"--compare: {a} and {b} have no metric that two pairs of runs have")
    return Comparison(on, a, b, differences, notes)


def _by_seed(name: str, runs: Sequence[History]) -> dict[str, History]:
    """Return the runs with a seed by it."""
    found: dict[str, History] = {}
    for run in runs:
        seed = ", ".join(str(run.config[key]) for key in sorted(run.config) if is_seed(key))
        if seed in found:
            raise UserError(f"--compare: {name} has two runs with seed {seed}: name runs of one config")
        if seed:
            found[seed] = run
    return found


def _difference(metric: str, pairs: Sequence[tuple[History, History]]) -> Difference | None:
    curves = [(a.curves[metric], b.curves[metric]) for a, b in pairs if metric in a.curves and metric in b.curves]
    if len(curves) < 2:
        return None
    steps = functools.reduce(np.intersect1d, [curve.steps for pair in curves for curve in pair])
    step = int(steps[-1]) if len(steps) else None
    a, b = (np.asarray([_value(pair[side], step) for pair in curves]) for side in (0, 1))
    lower = is_minimized(metric)
    # a run that diverged has an infinite loss, or none
    with np.errstate(invalid="ignore", over="ignore"):
        differences = a - b
        mean, error = float(differences.mean()), float(differences.std(ddof=1)) / math.sqrt(len(curves))
        means = float(a.mean()), float(b.mean())
    half, p_below = _student(mean, error, len(curves) - 1)
    p_a_better = p_below if lower else 1 - p_below
    return Difference(metric, len(curves), step, *means, mean, mean - half, mean + half, p_a_better, lower)


def _student(mean: float, error: float, degrees: int) -> tuple[float, float]:
    """Return half of the interval's width, and how likely the true mean is below 0."""
    from scipy.special import stdtr, stdtrit  # type: ignore[import-untyped]

    half = float(stdtrit(degrees, 1 - (1 - CONFIDENCE) / 2)) * error
    if error == 0:
        return half, 0.5 - math.copysign(0.5, mean) * (mean != 0)
    return half, float(stdtr(degrees, -mean / error))


def _value(curve: Curve, step: int | None) -> float:
    return float(curve.values[-1 if step is None else np.searchsorted(curve.steps, step)])
