"""The points of a page's curves for its script: columns of numbers in base64, equal ones once."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mgpu_slurm.metrics.event_layout import Floats, Integers
from mgpu_slurm.reports.aggregation.decimation import decimated
from mgpu_slurm.reports.facts.series import AXES, Series
from mgpu_slurm.reports.page import run_charts
from mgpu_slurm.reports.page.markup import Markup
from mgpu_slurm.reports.page.shown import Shown

MOST_POINTS = 1000
"""Maximum number of points of a curve."""
FEWEST_POINTS = 100
BUDGET = 3_600_000
"""Bytes of all points in base64."""

_EXACT = 2.0**24
"""Numbers up to which float32 has all integers."""


class Columns:
    """Distinct columns of numbers."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def place(self, values: Floats) -> int:
        """Return the number of a column, which is added if it is new."""
        finite = values[np.isfinite(values)]
        kind = "f8" if len(finite) and np.abs(finite).max() > _EXACT else "f4"
        with np.errstate(over="ignore"):
            data = np.ascontiguousarray(values, f"<{kind}").tobytes()
        text = f"{kind}:{base64.b64encode(data).decode()}"
        return self._places.setdefault(text, len(self._places))

    @property
    def texts(self) -> list[str]:
        return list(self._places)


def points_per_curve(runs: Sequence[Shown]) -> int:
    """Return how many points each curve may have so that all columns fit into the budget."""
    most = MOST_POINTS
    while most > FEWEST_POINTS:
        if _size(runs, most) <= BUDGET:
            return most
        most = max(FEWEST_POINTS, most * 4 // 5)
    return most


def _size(runs: Sequence[Shown], most: int) -> float:
    """Return the bytes in base64 of all columns: each curve has its values, and its axes if it does not share them."""
    whole: set[tuple[str, bytes]] = set()
    numbers = 0
    for run in runs:
        for series in run.facts.series.values():
            count = len(series.value)
            if count > most:
                numbers += (1 + len(AXES)) * most
                continue
            numbers += count
            whole |= {(axis, getattr(series, axis).tobytes()) for axis in AXES}
    return (4 * numbers + sum(len(data) // 2 for _, data in whole)) * 4 / 3


def packed(runs: Sequence[Shown], most: int, keys: Sequence[str]) -> Markup:
    """Return the data as JSON that may stand in a page.

    Args:
        most: maximum number of points of a curve.
        keys: config values to hold.
    """
    columns = Columns()
    chosen = _Chosen(runs, most)
    shown = [_packed(run, columns, chosen, keys) for run in runs]
    data = {"axes": AXES, "runs": shown, "columns": columns.texts}
    # `<` could end the element, and U+2028 ends lines in older scripts
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Markup(text)


class _Chosen:
    """Which points of a curve are held: of runs that repeat each other the same ones, as a mean is taken over them."""

    def __init__(self, runs: Sequence[Shown], most: int) -> None:
        self._most = most
        self._together: dict[tuple[str, str], Integers] = {}
        for key, group in run_charts.repeated(runs).items():
            for name in {name for run in group for name in run.facts.series}:
                series = [run.facts.series[name] for run in group if name in run.facts.series]
                if len(series[0].value) > most and all(_same_axis(each, series[0]) for each in series):
                    each_has = max(FEWEST_POINTS // 4, most // len(series))
                    kept = [decimated(each.value, each_has) for each in series]
                    self._together[key, name] = np.unique(np.concatenate(kept))

    def of(self, run: Shown, name: str, series: Series) -> Integers:
        """Return the indices of the points."""
        together = self._together.get((run.repeats or "", name))
        return decimated(series.value, self._most) if together is None else together


def _same_axis(one: Series, other: Series) -> bool:
    return len(one.progress) == len(other.progress) and bool((one.progress == other.progress).all())


def _packed(run: Shown, columns: Columns, chosen: _Chosen, keys: Sequence[str]) -> dict[str, Any]:
    facts = run.facts
    return {
        "name": run.name,
        "state": facts.state,
        "kind": facts.kind,
        "family": run.family,
        "color": run.color,
        "repeats": run.repeats,
        "config": {key: _plain(facts.config[key]) for key in keys if key in facts.config},
        "last": {name: each.last if math.isfinite(each.last) else None for name, each in facts.metrics.items()},
        "metrics": {
            name: _places(series, columns, chosen.of(run, name, series)) for name, series in facts.series.items()
        },
    }


def _places(series: Series, columns: Columns, kept: Integers) -> list[int]:
    """Return the columns of a curve: one for each axis, and its values."""
    axes = [getattr(series, axis)[kept] for axis in AXES]
    return [columns.place(each) for each in (*axes, series.value[kept])]


def _plain(value: Any) -> Any:
    """Return a config value as JSON has it; text for what it has not."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool)) or value is None else json.dumps(value, default=str)
