"""The table that `aggregate` prints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from mgpu_slurm.core.formatting import short_value
from mgpu_slurm.reports.aggregation.aggregate import Aggregate
from mgpu_slurm.reports.aggregation.history import On
from mgpu_slurm.reports.aggregation.statistics import Summary

_HEADER = ["GROUP", "METRIC", "AT", "RUNS", "MEAN", "STD", "95% INTERVAL", "MIN", "MEDIAN", "MAX"]


def table(found: Aggregate) -> str:
    """Return a table of each group's metrics: at the last common step, at each run's own end, and the best values."""
    from tabulate import tabulate

    rows = [
        [group.name, metric, *cells]
        for group in found.groups
        for metric, summary in group.metrics.items()
        for cells in _rows(summary, found.on)
    ]
    return tabulate([_HEADER, *rows], tablefmt="plain", disable_numparse=True)


def _rows(summary: Summary, on: On) -> Iterator[list[str]]:
    at = summary.common
    at_common = {name: float(column[at]) for name, column in summary.values.items()}
    yield _row(f"{on} {summary.steps[at]}", int(summary.count[at]), at_common)
    if not _same(summary.final, at_common):
        yield _row("end of each", summary.runs, summary.final)
    if not _same(summary.best, summary.final):
        yield _row(f"{'lowest' if summary.minimized else 'highest'} of each", summary.runs, summary.best)


def _same(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return all(one[name] == other[name] or (math.isnan(one[name]) and math.isnan(other[name])) for name in one)


def _row(at: str, runs: int, values: Mapping[str, float]) -> list[str]:
    mean, std, low, high, *rest = (
        short_value(values[name]) for name in ("mean", "std", "ci_low", "ci_high", "min", "median", "max")
    )
    spread = ["", ""] if runs == 1 else [std, f"{low} to {high}"]
    return [at, str(runs), mean, *spread, *rest]
