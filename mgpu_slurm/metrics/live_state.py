"""Rank 0's part of `state.json`, written by a thread: on some disks a rename takes longer than the rest of a report."""

from __future__ import annotations

import threading
from typing import Any

from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.core.records import read_state, update_state
from mgpu_slurm.metrics.sinks import Report, Sink, Tolerance
from mgpu_slurm.rank import crash

INTERVAL = 1.0
"""Seconds between two writes."""


class LiveState(Sink):
    """The part of a run's state that `status` shows while it runs, written at most once per `INTERVAL`."""

    def __init__(self, folder: RunFolder, attempt: int, tolerance: Tolerance) -> None:
        """
        Args:
            tolerance: for errors in the thread.
        """
        self._folder = folder
        self._attempt = attempt
        self._tolerance = tolerance
        self._lock = threading.Lock()
        self._due: dict[str, object] = {}
        """Fields still to be written."""
        self._is_wanted = threading.Event()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def report(self, report: Report) -> None:
        self._show(step=report.step, progress=report.progress, metrics=report.metrics)

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
            self._is_closed.wait(INTERVAL)

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
