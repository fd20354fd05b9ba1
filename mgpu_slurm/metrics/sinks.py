"""`Sink`, the interface of everything that receives the metrics of a run, and the sinks of a run."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from typing import Any

from mgpu_slurm.core import log_lines
from mgpu_slurm.core.files import append_jsonl
from mgpu_slurm.core.formatting import short_value
from mgpu_slurm.metrics.event_writer import EventWriter
from mgpu_slurm.metrics.pace import Pace
from mgpu_slurm.rank import crash
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Report
from mgpu_slurm.run_folder.records import read_state, update_state


class Sink(ABC):
    """Receives the metrics of a run, on rank 0.

    Methods may raise any error: it becomes a warning and never ends the training (see `Tolerant`). A report that raised
    an `OSError` is repeated later. A sweep's prune callback is not a sink: the training waits for its answer and cannot
    continue without it.
    """

    @abstractmethod
    def report(self, report: Report) -> None:
        """Take a report. The training waits for it."""

    def expect(self, total: int, progress: int | None) -> None:  # noqa: B027
        """Take the progress at which the training ends.

        Args:
            progress: that of the training, if a unit of it begins now.
        """

    def choose_by(self, metric: str, direction: str) -> None:  # noqa: B027
        """Take the metric by which the best checkpoint is chosen, and whether it is to `minimize` or `maximize`."""

    def step_done(self, step: int) -> None:  # noqa: B027
        """Take the number of steps done; called about once per second."""

    def resume(self, step: int, progress: int) -> None:  # noqa: B027
        """Take the step and progress of the checkpoint that the run resumes from: later reports are void."""

    def close(self, step: int) -> None:  # noqa: B027
        """Write what is pending: the run ends at this step."""


class Tolerance:
    """Turns errors into warnings, one for each kind of error: a full disk fails many times, and in several sinks."""

    def __init__(self) -> None:
        self._warned: set[object] = set()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Ignore an error in the block, except for a warning."""
        try:
            yield
        except OSError as error:
            self._warn(error.errno, f"metrics are kept in memory for now: {error}; training continues")
        except Exception as error:
            self._warn(type(error), f"metrics cannot be written: {type(error).__name__}: {error}; training continues")

    def _warn(self, kind: object, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            # the disk that the log is on may be full too
            with suppress(OSError):
                log_lines.warn(text)


class Tolerant(Sink):
    """A sink whose errors do not end the training. Reports that a full disk does not take wait in memory."""

    def __init__(self, sink: Sink, tolerance: Tolerance) -> None:
        self._sink = sink
        self._tolerance = tolerance
        self._due: deque[Report] = deque()

    def report(self, report: Report) -> None:
        self._due.append(report)
        self._report_due()

    def expect(self, total: int, progress: int | None) -> None:
        with self._tolerance.guard():
            self._sink.expect(total, progress)

    def choose_by(self, metric: str, direction: str) -> None:
        with self._tolerance.guard():
            self._sink.choose_by(metric, direction)

    def step_done(self, step: int) -> None:
        self._report_due()
        with self._tolerance.guard():
            self._sink.step_done(step)

    def resume(self, step: int, progress: int) -> None:
        with self._tolerance.guard():
            self._sink.resume(step, progress)

    def close(self, step: int) -> None:
        self._report_due()
        with self._tolerance.guard():
            self._sink.close(step)

    def _report_due(self) -> None:
        with self._tolerance.guard():
            while self._due:
                try:
                    self._sink.report(self._due[0])
                except OSError:
                    raise
                except Exception:
                    # it would fail again, and hold up those after it
                    self._due.popleft()
                    raise
                self._due.popleft()


class MetricsFile(Sink):
    """`metrics.jsonl`, for programs."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.metrics

    def report(self, report: Report) -> None:
        append_jsonl(self._path, asdict(report))


class EventFiles(Sink):
    """Event files for TensorBoard, a new one for each attempt that reports anything."""

    def __init__(self, folder: RunFolder, begins_at: int = 0) -> None:
        """
        Args:
            begins_at: the first step that is shown here: what earlier files have of it and of later steps is void.
        """
        self._folder = folder.tensorboard
        self._writer: EventWriter | None = None
        self._begins_at = begins_at

    def resume(self, step: int, progress: int) -> None:
        self._begins_at = (step or progress) + 1

    def report(self, report: Report) -> None:
        self._writer = self._writer or EventWriter(self._folder, self._begins_at)
        self._writer.add(report.shown_step, report.values, datetime.fromisoformat(report.time).timestamp())

    def close(self, step: int) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class Screen(Sink):
    """Standard output, for people."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def report(self, report: Report) -> None:
        elapsed = time.monotonic() - self._started
        text = as_text(report.metrics)
        print(f"[{report.progress:>3}]  step {report.step:<6} {text}  ({elapsed:.1f} s)", flush=True)


def as_text(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {short_value(value)}" for name, value in metrics.items())


# -- the sink that has a thread


LIVE_STATE_INTERVAL = 1.0
"""Seconds between two writes."""


class LiveState(Sink):
    """The part of a run's state that `status` shows while it runs, written at most once per `LIVE_STATE_INTERVAL`.

    A thread writes it: on some disks a rename takes longer than the rest of a report.
    """

    def __init__(
        self, folder: RunFolder, attempt: int, tolerance: Tolerance, device: Mapping[str, object] | None = None
    ) -> None:
        """
        Args:
            tolerance: for errors in the thread.
            device: further fields, which do not change.
        """
        self._folder = folder
        self._attempt = attempt
        self._tolerance = tolerance
        self._lock = threading.Lock()
        self._due: dict[str, object] = dict(device or {})
        """Fields still to be written."""
        self._is_wanted = threading.Event()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._pace = Pace()

    def expect(self, total: int, progress: int | None) -> None:
        if progress is not None:
            self._pace.begin(progress)
        self._show(total=total)

    def choose_by(self, metric: str, direction: str) -> None:
        self._show(best_by={metric: direction})

    def report(self, report: Report) -> None:
        self._show(
            step=report.step,
            progress=report.progress,
            metrics=report.metrics,
            curves=report.curves,
            reported=report.time,
            pace=self._pace.reported(report.progress),
        )

    def step_done(self, step: int) -> None:
        self._show(step=step)

    def _show(self, **changes: Any) -> None:
        """Have these fields written soon."""
        with self._lock:
            self._due |= changes
        if self._thread is None:
            self._thread = crash.guarded_thread(self._serve, "state")
        self._is_wanted.set()

    def close(self, step: int) -> None:
        """Write what is due."""
        self._show(step=step)
        self._is_closed.set()
        self._is_wanted.set()
        if self._thread is not None:
            self._thread.join()
        self._write()

    def _serve(self) -> None:
        while not self._is_closed.is_set():
            self._is_wanted.wait()
            self._is_wanted.clear()
            self._write()
            self._is_closed.wait(LIVE_STATE_INTERVAL)

    def _write(self) -> None:
        with self._lock:
            changes = dict(self._due)
        with self._tolerance.guard():
            # a script that was not submitted has output but no state; and an attempt that still runs on an abandoned
            # node must not overwrite the state of the attempt after it
            if changes and self._folder.state.exists() and read_state(self._folder).attempts <= self._attempt:
                update_state(self._folder, sync=False, **changes)
            with self._lock:
                # fields changed during the write are still due
                self._due = {name: value for name, value in self._due.items() if value is not changes.get(name)}
