"""Turn what a job reports and returns into numbers, and pass reports to the sinks of rank 0."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Mapping
from typing import Any

from mgpu_slurm.metrics.sinks import (
    LIVE_STATE_INTERVAL,
    EventFiles,
    LiveState,
    MetricsFile,
    Screen,
    Tolerance,
    Tolerant,
)
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Report
from mgpu_slurm.run_folder.records import now


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
    return f"the job function returned {shown}, which is not a number: the result omits it"


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


class Reporter:
    """Rank 0's output. The other ranks have none."""

    def __init__(self, folder: RunFolder, attempt: int, device: Mapping[str, object] | None = None) -> None:
        """
        Args:
            device: what the run's state says of the GPU.
        """
        self._attempt = attempt
        tolerance = Tolerance()
        sinks = [MetricsFile(folder), EventFiles(folder), LiveState(folder, attempt, tolerance, device), Screen()]
        self._sinks = [Tolerant(sink, tolerance) for sink in sinks]
        self._passed_at = 0.0
        """When the sinks last received anything."""

    def report(
        self, progress: int, step: int, metrics: dict[str, float], curves: dict[str, float] | None = None
    ) -> None:
        """Pass a report to the sinks.

        Args:
            curves: what was measured besides, such as the time of a step.
        """
        self._passed_at = time.monotonic()
        report = Report(progress, step, now(), self._attempt, metrics, curves or {})
        for sink in self._sinks:
            sink.report(report)

    def expect(self, total: int, progress: int | None = None) -> None:
        """Pass on the progress at which the training ends.

        Args:
            progress: that of the training, if a unit of it begins now.
        """
        for sink in self._sinks:
            sink.expect(total, progress)

    def choose_by(self, metric: str, direction: str) -> None:
        """Pass on the metric by which the best checkpoint is chosen, and its direction."""
        for sink in self._sinks:
            sink.choose_by(metric, direction)

    def step_done(self, step: int) -> None:
        """Pass the step to the sinks, at most once per interval."""
        if time.monotonic() - self._passed_at >= LIVE_STATE_INTERVAL:
            self._passed_at = time.monotonic()
            for sink in self._sinks:
                sink.step_done(step)

    def resume(self, step: int, progress: int) -> None:
        """Tell the sinks that the run resumes from a checkpoint of this step and progress."""
        for sink in self._sinks:
            sink.resume(step, progress)

    def close(self, step: int) -> None:
        for sink in self._sinks:
            sink.close(step)
