"""Spans of time on a device: how long a rank waits for batches, or, if it has a GPU, for how long that has nothing to
do meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

MOST_EVENTS = 256
"""Number of spans of a kind that are timed on a GPU between two looks at their sum."""

_UNTIMED = object()
"""Mark of a span that is counted, but not timed."""


class Spans:
    """Adds up spans of time on a device. A GPU computes later than it is told to, so it marks the times by itself."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []
        self._count = 0

    def mark(self) -> Any:
        """Return a mark of this moment."""
        if not self._is_gpu:
            return time.perf_counter()
        return _UNTIMED if len(self._events) >= MOST_EVENTS else event()

    def add(self, begun: Any, ended: Any) -> None:
        """Add the time between two marks."""
        self._count += 1
        if not self._is_gpu:
            self._seconds += ended - begun
        elif _UNTIMED not in (begun, ended):
            self._events.append((begun, ended))

    def take(self) -> float:
        """Return the seconds of all spans since the last call; waits for the GPU."""
        if self._events:
            self._events[-1][1].synchronize()
            timed = sum(begun.elapsed_time(ended) for begun, ended in self._events) / 1e3
            # if there were too many, the others took as long
            self._seconds = timed / len(self._events) * self._count
        taken, self._seconds, self._count = self._seconds, 0.0, 0
        self._events.clear()
        return taken


@dataclass(frozen=True)
class Fetch:
    """The fetch of a batch."""

    begun: float
    """By `time.perf_counter`."""
    told: Any
    """Mark of that moment; on a GPU, after all work that it was given before."""


class DataWaits:
    """Adds up the waits of one rank, with that for the copy to the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._spans = Spans(device)

    def begin(self) -> Fetch:
        """Return the begin of a fetch."""
        begun = time.perf_counter()
        return Fetch(begun, event() if self._is_gpu else begun)

    def end(self, fetch: Fetch) -> None:
        """Add a fetch whose batch has come."""
        self._spans.add(fetch.told, self._spans.mark())

    def take(self) -> float:
        """Return the seconds since the last call; waits for the GPU."""
        return self._spans.take()


def event() -> Any:
    """Return an event of this moment on the GPU."""
    made = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    made.record()
    return made
