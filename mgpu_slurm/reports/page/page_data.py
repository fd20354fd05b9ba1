"""The points of a page's curves for its script: columns of numbers in base64, equal ones once."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mgpu_slurm.metrics.event_layout import Floats
from mgpu_slurm.reports.aggregation.decimation import decimated
from mgpu_slurm.reports.facts.series import AXES, Series
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

    @property
    def size(self) -> int:
        return sum(map(len, self._places))


def points_per_curve(runs: Sequence[Shown]) -> int:
    """Return how many points each curve may have within the budget."""
    lengths = [len(series.value) for run in runs for series in run.facts.series.values()]
    most = MOST_POINTS
    while most > FEWEST_POINTS:
        # a column of its own for the values; the others are often shared
        shared = sum(min(length, most) for length in lengths) * 4 * 4 / 3
        # of a decimated curve none is
        alone = sum(3 * most * 4 * 4 / 3 for length in lengths if length > most)
        minutes = (
            sum(min(most, max((len(s.value) for s in run.facts.series.values()), default=0)) for run in runs)
            * 4
            * 4
            / 3
        )
        if shared + alone + minutes <= BUDGET:
            return most
        most = max(FEWEST_POINTS, most * 4 // 5)
    return most


def packed(runs: Sequence[Shown], most: int, directions: dict[str, str]) -> Markup:
    """Return the data as JSON that may stand in a page.

    Args:
        most: maximum number of points of a curve.
    """
    columns = Columns()
    shown = [_packed(run, columns, most) for run in runs]
    data = {"axes": AXES, "runs": shown, "directions": directions, "columns": columns.texts}
    # `<` could end the element, and U+2028 ends lines in older scripts
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Markup(text)


def _packed(run: Shown, columns: Columns, most: int) -> dict[str, Any]:
    facts = run.facts
    return {
        "name": run.name,
        "state": facts.state,
        "kind": facts.kind,
        "family": run.family,
        "color": run.color,
        "config": {key: _plain(value) for key, value in facts.config.items()},
        "metrics": {name: _places(series, columns, most) for name, series in facts.series.items()},
    }


def _places(series: Series, columns: Columns, most: int) -> list[int]:
    """Return the columns of a curve: one for each axis, and its values."""
    kept = decimated(series.value, most)
    axes = [getattr(series, axis)[kept] for axis in AXES]
    return [columns.place(each) for each in (*axes, series.value[kept])]


def _plain(value: Any) -> Any:
    """Return a config value as JSON has it; text for what it has not."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool)) or value is None else json.dumps(value, default=str)
