"""The points of a run's metrics, by progress, step and minutes at work."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from mgpu_slurm.core.files import complete_lines
from mgpu_slurm.core.formatting import counted
from mgpu_slurm.metrics.event_layout import Floats, Integers
from mgpu_slurm.reports.aggregation.merging import Curve

UNKNOWN = 0
"""The attempt of a report that does not name its own."""

AXES = ("progress", "step", "minutes")
"""What the points of a metric may be drawn over."""


@dataclass(frozen=True)
class Series:
    """One metric of one run, in the order of its points; NaN for an axis that is not known."""

    progress: Floats
    step: Floats
    minutes: Floats
    """Minutes at work: without the time between two attempts."""
    value: Floats

    def best(self, direction: str) -> float | None:
        """Return the best finite value; None if there is none."""
        finite = self.value[np.isfinite(self.value)]
        if not len(finite):
            return None
        return float(finite.max() if direction == "maximize" else finite.min())

    @property
    def last(self) -> float:
        return float(self.value[-1])


@dataclass
class Points:
    """All metrics of one run."""

    series: dict[str, Series]
    progress: int = 0
    """The last ones reported."""
    step: int = 0
    notes: tuple[str, ...] = ()
    """What was not read, and why."""


@dataclass(frozen=True)
class Reports:
    """All that a run has reported, in the order in which it was written, also what a later attempt has made void."""

    progress: Integers
    step: Integers
    time: Floats
    """Seconds since 1970."""
    attempt: Integers
    """`UNKNOWN` in runs of version 0.1."""
    metrics: dict[str, tuple[Integers, Floats]]
    """By metric, which reports have it, and its values."""
    damaged: int = 0
    """Number of lines that cannot be read."""


def read(path: Path) -> Reports:
    """Return the reports in a `metrics.jsonl`; none if it does not exist."""
    rows: list[tuple[int, int, float, int]] = []
    metrics: dict[str, tuple[list[int], list[float]]] = {}
    damaged = 0
    for record in _records(path):
        try:
            values = {str(name): float(value) for name, value in record["metrics"].items()}
            time = datetime.fromisoformat(record["time"]).timestamp()
            row = (int(record["progress"]), int(record["step"]), time, int(record.get("attempt", UNKNOWN)))
            if max(map(abs, row)) >= 2**63:
                raise OverflowError
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            damaged += 1
            continue
        for name, value in values.items():
            places, column = metrics.setdefault(name, ([], []))
            places.append(len(rows))
            column.append(value)
        rows.append(row)
    progress, step, times, attempt = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Reports(
        np.asarray(progress, np.int64),
        np.asarray(step, np.int64),
        np.asarray(times, np.float64),
        np.asarray(attempt, np.int64),
        {name: (np.asarray(places), np.asarray(column)) for name, (places, column) in metrics.items()},
        damaged,
    )


def points(reports: Reports, spans: Sequence[tuple[float, float]], name: str = "metrics.jsonl") -> Points:
    """Return the points of a run; a later attempt replaces all earlier points from its first progress on.

    Args:
        spans: begin and end of each attempt, in seconds since 1970.
        name: of the file.
    """
    kept = _kept(reports)
    # by its place in the order of attempts; -1 for a report that is void
    rank = np.full(len(reports.progress), -1)
    rank[kept] = np.arange(len(kept))
    minutes = _minutes_at_work(reports.time, spans)
    found = {}
    for metric, (places, values) in reports.metrics.items():
        ranks = rank[places]
        order = np.argsort(ranks, kind="stable")[int((ranks < 0).sum()) :]
        at = places[order]
        if len(at):
            axes = (reports.progress[at].astype(np.float64), reports.step[at].astype(np.float64), minutes[at])
            found[metric] = Series(*axes, values[order])
    notes = (f"{counted(reports.damaged, 'damaged line')} of {name} left out",) if reports.damaged else ()
    if not len(kept):
        return Points(found, notes=notes)
    return Points(found, int(reports.progress[kept[-1]]), int(reports.step[kept[-1]]), notes)


def of_curves(curves: dict[str, Curve]) -> Points:
    """Return the points of a run that has event files only, which know no progress and no times at work."""
    found = {}
    for name, curve in curves.items():
        unknown = np.full(len(curve.steps), np.nan)
        steps = curve.steps.astype(np.float64)
        # its steps stand for its progress, by which curves are drawn first
        found[name] = Series(steps, steps, unknown, curve.values)
    last = max((int(curve.steps[-1]) for curve in curves.values()), default=0)
    return Points(found, last, last)


def _records(path: Path) -> Iterator[Any]:
    """Yield what the lines of a file contain; None for one that is damaged."""
    try:
        lines = complete_lines(path)
    except FileNotFoundError:
        return
    try:
        # at once, which takes half the time
        yield from json.loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                yield None


def _kept(reports: Reports) -> list[int]:
    """Return the reports that no later attempt has made void, by attempt, and in their order."""
    kept: list[int] = []
    progress, attempts = reports.progress.tolist(), reports.attempt.tolist()
    for place in np.argsort(reports.attempt, kind="stable").tolist():
        is_new = attempts[place] == UNKNOWN
        while kept and (is_new or attempts[kept[-1]] < attempts[place]) and progress[kept[-1]] >= progress[place]:
            kept.pop()
        kept.append(place)
    return kept


def _minutes_at_work(times: Floats, spans: Sequence[tuple[float, float]]) -> Floats:
    """Return how many minutes the attempts of a run have lasted at each time; NaN if no attempt is known."""
    if not spans:
        return np.full(len(times), np.nan)
    return sum((np.clip(times, begin, max(begin, end)) - begin for begin, end in spans), np.zeros(len(times))) / 60
