"""How long a rank waits for batches, or, if it has a GPU, for how long that has nothing to do meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

MOST_EVENTS = 256
"""Number of fetches that are timed on a GPU between two looks at their sum."""


@dataclass(frozen=True)
class Fetch:
    """The fetch of a batch."""

    begun: float
    """By `time.perf_counter`."""
    told: Any
    """Event after all work that a GPU was given before; None on a CPU."""


class DataWaits:
    """Adds up the waits of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._timed: list[tuple[Any, Any]] = []
        """Events before and after each wait, which includes that for the copy to the GPU."""
        self._count = 0

    def begin(self) -> Fetch:
        """Return the begin of a fetch."""
        return Fetch(time.perf_counter(), event() if self._is_gpu else None)

    def end(self, fetch: Fetch) -> None:
        """Add a fetch whose batch has come."""
        if not self._is_gpu:
            self._seconds += time.perf_counter() - fetch.begun
            return
        self._count += 1
        if len(self._timed) < MOST_EVENTS:
            self._timed.append((fetch.told, event()))

    def take(self) -> float:
        """Return the seconds since the last call; waits for the GPU."""
        taken, self._seconds = self._seconds, 0.0
        if self._timed:
            self._timed[-1][1].synchronize()
            timed = sum(told.elapsed_time(came) for told, came in self._timed) / 1e3
            # if there were too many, the others took as long
            taken = timed / len(self._timed) * self._count
        self._timed.clear()
        self._count = 0
        return taken


def event() -> Any:
    """Return an event of this moment on the GPU."""
    made = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    made.record()
    return made
