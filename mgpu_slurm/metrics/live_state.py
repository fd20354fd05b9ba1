"""Rank 0's part of `state.json`, written by a thread: on some disks a rename takes longer than the rest of a report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.core.records import read_state, update_state
from mgpu_slurm.rank import crash

INTERVAL = 1.0
"""Seconds between two writes."""


class LiveState:
    """The part of a run's state that `status` shows while it runs, written at most once per `INTERVAL`."""

    def __init__(
        self, folder: RunFolder, attempt: int, disk_may_fail: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """
        Args:
            disk_may_fail: Wraps each write.
        """
        self._folder = folder
        self._attempt = attempt
        self._disk_may_fail = disk_may_fail
        self._lock = threading.Lock()
        self._due: dict[str, object] = {}
        """Fields still to be written."""
        self._shown_at = 0.0
        self._is_wanted = threading.Event()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_stale(self) -> bool:
        """Whether nothing was shown for at least `INTERVAL`, so a step should be."""
        return time.monotonic() - self._shown_at >= INTERVAL

    def show(self, **changes: Any) -> None:
        """Have these fields written soon."""
        self._shown_at = time.monotonic()
        with self._lock:
            self._due |= changes
        if self._thread is None:
            self._thread = crash.guarded_thread(self._serve, "state")
        self._is_wanted.set()

    def close(self) -> None:
        """Write what is due."""
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
        with self._disk_may_fail():
            # a script that was not submitted has output but no state; and an attempt that still runs on an abandoned
            # node must not overwrite the state of the attempt after it
            if changes and self._folder.state.exists() and read_state(self._folder)["attempts"] <= self._attempt:
                update_state(self._folder, sync=False, **changes)
            with self._lock:
                # fields changed during the write are still due
                self._due = {name: value for name, value in self._due.items() if value is not changes.get(name)}
