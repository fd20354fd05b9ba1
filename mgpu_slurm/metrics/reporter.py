"""Rank 0's reports: TensorBoard event files, `metrics.jsonl` for programs, a line for people, and the live state."""

from __future__ import annotations

import reprlib
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from mgpu_slurm.core.files import append_jsonl
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.core.records import now
from mgpu_slurm.metrics.event_writer import EventWriter
from mgpu_slurm.metrics.live_state import LiveState


def as_numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    """Return metrics as plain numbers; tensors of one element are accepted.

    Raises:
        TypeError: A metric is not a number; the message names it.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = _number(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise TypeError(f"metric {name!r}: expected a number, got {_shown(value)}") from None
    return numbers


def _number(value: Any) -> float:
    # a loss still has its autograd graph
    return float(value.detach() if hasattr(value, "detach") else value)


def result_of(returned: Any, last_metrics: dict[str, float], has_trained: bool = True) -> dict[str, float]:
    """Return a job function's return value as numbers by name: the last metrics if it is None, `value` for a number.

    Args:
        has_trained: False for an attempt that was restored at the end of its training. Its loop did not run, so values
            computed there still have their initial values, and the metrics reported before are used instead.
    """
    result, others = _told_apart(returned)
    if not result and (returned is None or others):
        return last_metrics
    if has_trained:
        return result
    return {name: last_metrics.get(name, value) for name, value in result.items()}


def odd_result(returned: Any) -> str | None:
    """Return a warning that names the returned values that are not numbers; None if there are none."""
    _, others = _told_apart(returned)
    if not others:
        return None
    shown = ", ".join(f"{name} = {_shown(value)} ({type(value).__name__})" for name, value in others.items())
    return f"the job function returned what is not a number: {shown}: the result is without it"


def _told_apart(returned: Any) -> tuple[dict[str, float], dict[str, object]]:
    """Split a job function's return value into numbers and other values, by name."""
    if returned is None:
        return {}, {}
    numbers: dict[str, float] = {}
    others: dict[str, object] = {}
    for key, value in (returned if isinstance(returned, dict) else {"value": returned}).items():
        # JSON accepts no other keys, such as NumPy integers and tuples
        name = str(key)
        try:
            numbers |= as_numbers({name: value})
        except TypeError:
            others[name] = value
    return numbers, others


def _shown(value: Any) -> str:
    """Return a short representation of a value."""
    try:
        return reprlib.repr(value)
    except ValueError:
        # Python refuses to convert an integer of thousands of digits
        return "..."


def as_text(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


@dataclass(frozen=True)
class Report:
    """A line of `metrics.jsonl`."""

    progress: int
    step: int
    time: str
    attempt: int
    metrics: dict[str, float]


class Reporter:
    """Rank 0's output. The other ranks have none."""

    def __init__(self, folder: RunFolder, attempt: int) -> None:
        self._folder = folder
        self._attempt = attempt
        self._writer: EventWriter | None = None
        self.begins_at = 0
        """Step of the first point to come."""
        self._due: deque[Report] = deque()
        """Reports still to be appended to `metrics.jsonl`."""
        self._due_points: deque[Report] = deque()
        """Reports still to be written to event files."""
        self._state = LiveState(folder, attempt, self._disk_may_fail)
        self._has_warned = False
        self._started = time.monotonic()

    def report(self, progress: int, step: int, metrics: dict[str, float]) -> None:
        report = Report(progress, step, now(), self._attempt, metrics)
        self._due.append(report)
        self._due_points.append(report)
        self._write_due()
        self._state.show(step=step, progress=progress, metrics=metrics)
        elapsed = time.monotonic() - self._started
        print(f"[{progress:>3}]  step {step:<6} {as_text(metrics)}  ({elapsed:.1f} s)", flush=True)

    def step_done(self, step: int) -> None:
        """Update the live state's step, at most once per interval."""
        if self._state.is_stale:
            self._write_due()
            self._state.show(step=step)

    def close(self, step: int) -> None:
        self._write_due()
        self._state.show(step=step)
        self._state.close()
        if self._writer is not None:
            with self._disk_may_fail():
                self._writer.close()
            self._writer = None

    def _write_due(self) -> None:
        """Write all pending reports; those that a full disk does not accept stay pending."""
        with self._disk_may_fail():
            while self._due:
                append_jsonl(self._folder.metrics, asdict(self._due[0]))
                self._due.popleft()
        with self._disk_may_fail():
            while self._due_points:
                report = self._due_points[0]
                self._writer = self._writer or EventWriter(self._folder.tensorboard, self.begins_at)
                self._writer.add(report.step, report.metrics, datetime.fromisoformat(report.time).timestamp())
                self._due_points.popleft()

    @contextmanager
    def _disk_may_fail(self) -> Iterator[None]:
        """Ignore a full disk, warning once: curves wait in memory and must not stop the training."""
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                print(f"mgpu_slurm: WARNING: metrics have to wait in memory: {error}; training goes on", flush=True)
            self._has_warned = True
