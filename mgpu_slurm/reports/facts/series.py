"""The points of a run's metrics, by progress, step and minutes at work."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mgpu_slurm.core.files import complete_lines
from mgpu_slurm.core.formatting import counted
from mgpu_slurm.metrics.event_layout import Floats
from mgpu_slurm.reports.aggregation.merging import Curve

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


class _Report(NamedTuple):
    progress: int
    step: int
    time: float
    attempt: int
    metrics: dict[str, float]


def read(path: Path, spans: Sequence[tuple[int, float, float]]) -> Points:
    """Return the points in a `metrics.jsonl`; a later attempt replaces all earlier points from its first progress on.

    Args:
        spans: number, begin and end of each attempt, in seconds since 1970.
    """
    reports, damaged = _reports(path)
    kept = _kept(reports)
    works = _Work(spans)
    minutes = [works.minutes(each.time) for each in kept]
    rows: dict[str, list[tuple[float, float, float, float]]] = {}
    for report, at in zip(kept, minutes, strict=True):
        for name, value in report.metrics.items():
            rows.setdefault(name, []).append((report.progress, report.step, at, value))
    series = {name: Series(*np.asarray(points, np.float64).T) for name, points in rows.items()}
    notes = (f"{counted(damaged, 'damaged line')} of {path.name} left out",) if damaged else ()
    last = kept[-1] if kept else _Report(0, 0, 0.0, 0, {})
    return Points(series, last.progress, last.step, notes)


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


def _reports(path: Path) -> tuple[list[_Report], int]:
    """Return the reports in a file in their order, and the number of lines that cannot be read."""
    found, damaged = [], 0
    try:
        lines = complete_lines(path)
    except FileNotFoundError:
        return [], 0
    for record in _records(lines):
        try:
            metrics = {str(name): float(value) for name, value in record["metrics"].items()}
            time = datetime.fromisoformat(record["time"]).timestamp()
            attempt = int(record.get("attempt", 1))
            found.append(_Report(int(record["progress"]), int(record["step"]), time, attempt, metrics))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            damaged += 1
    return found, damaged


def _records(lines: Sequence[bytes]) -> Iterator[Any]:
    """Yield what the lines contain; None for one that is damaged."""
    try:
        # at once, which takes half the time
        yield from json.loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                yield None


def _kept(reports: Sequence[_Report]) -> list[_Report]:
    """Return the reports that no later attempt has made void, by attempt and progress."""
    kept: list[_Report] = []
    by_attempt = sorted(reports, key=lambda report: report.attempt)
    for report in by_attempt:
        while kept and kept[-1].attempt < report.attempt and kept[-1].progress >= report.progress:
            kept.pop()
        kept.append(report)
    return kept


class _Work:
    """How long a run has been at work at a time."""

    def __init__(self, spans: Sequence[tuple[int, float, float]]) -> None:
        self._spans = sorted((begin, end) for _, begin, end in spans)

    def minutes(self, time: float) -> float:
        """Return the minutes that the attempts have lasted until then; NaN if no attempt is known."""
        if not self._spans:
            return float("nan")
        return sum(max(0.0, min(end, time) - begin) for begin, end in self._spans) / 60
