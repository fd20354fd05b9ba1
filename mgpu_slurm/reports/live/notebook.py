"""Handles in a notebook: the table of `status`, and a small curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from mgpu_slurm.core.files import read_jsonl
from mgpu_slurm.core.formatting import short_value
from mgpu_slurm.registry import sweep_state
from mgpu_slurm.reports.live.status_table import cells, summary
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState

MOST_RUNS = 20
"""Number of a group's runs that are shown."""
_WIDTH, _HEIGHT, _MARGIN = 320, 80, 4
_POINTS = 160
"""Maximum points of a curve: two for each pixel would not be seen."""

Points = list[tuple[float, float]]


def html(folder: RunFolder, found: Sequence[tuple[RunFolder, RunState]]) -> str:
    """Return a run, group or sweep as HTML without scripts and styles of its own."""
    states = [state for _, state in found]
    if sweep_state.is_sweep(folder):
        return _table([sweep_state.state_of(folder, states)])
    shown = [*found[:MOST_RUNS]]
    entries: list[RunState] = [state for _, state in shown]
    if len(found) > 1:
        entries.append(summary(folder.run, states))
    names = [name for state in states for name in state.metrics]
    if not names:
        return _table(entries)
    curves = [_points(each, names[0]) for each, _ in shown]
    return _table(entries) + _curve(names[0], [each for each in curves if each])


def _table(entries: Sequence[RunState]) -> str:
    header, *lines = [[escape(cell) for cell in row] for row in cells(list(entries))]
    head = "".join(f"<th>{cell}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _points(folder: RunFolder, name: str) -> Points:
    """Return a metric of a run by its progress."""
    found: Points = []
    for line in read_jsonl(folder.metrics):
        # a resumed attempt takes back what earlier ones have reported of the same progress and later
        while found and found[-1][0] >= line["progress"]:
            found.pop()
        value = line["metrics"].get(name)
        if value is not None and math.isfinite(value):
            found.append((line["progress"], value))
    step = max(1, -(-len(found) // _POINTS))
    # the last one is the one in the table
    return found[:-1][::step] + found[-1:]


def _curve(name: str, curves: Sequence[Points]) -> str:
    """Return a chart with a line for each run; empty if there is nothing to draw."""
    points = [point for curve in curves for point in curve]
    if not points:
        return ""
    (left, right), (low, high) = [(min(each), max(each)) for each in zip(*points, strict=True)]
    lines = "".join(
        f'<polyline points="{_path(curve, left, right, low, high)}" fill="none" stroke="currentColor"/>'
        for curve in curves
    )
    title = escape(f"{name}: {short_value(low)} to {short_value(high)}")
    return (
        f'<svg role="img" width="{_WIDTH}" height="{_HEIGHT}" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{title}</title>{lines}</svg><div>{title}</div>"
    )


def _path(curve: Points, left: float, right: float, low: float, high: float) -> str:
    def place(value: float, first: float, last: float, room: int) -> float:
        # the ends may be so far apart that their difference is infinite
        share = (value / 2 - first / 2) / (last / 2 - first / 2) if last > first else 0.5
        return _MARGIN + share * (room - 2 * _MARGIN)

    places = [(place(x, left, right, _WIDTH), _HEIGHT - place(y, low, high, _HEIGHT)) for x, y in curve]
    if len(places) == 1:
        # a line of one point would not be seen
        places = [(_MARGIN, places[0][1]), (_WIDTH - _MARGIN, places[0][1])]
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
