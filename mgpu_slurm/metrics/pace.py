"""How fast a training makes progress, from which `status` estimates when it ends."""

from __future__ import annotations

import statistics
import time
from collections import deque
from itertools import pairwise

REPORTS = 10
"""Number of reports that the estimate is based on: it follows a training that becomes slower, and ignores one that was
slow once."""


class Pace:
    """The pace of one attempt. An attempt that resumes may have other nodes, and waits for its own first reports."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=REPORTS + 1)
        """When the training was at which progress."""

    def begin(self, progress: int) -> None:
        """Record that a unit of progress begins, unless reports have told the pace already."""
        if len(self._seen) < 2:
            self._seen.clear()
            self._seen.append((time.monotonic(), progress))

    def reported(self, progress: int) -> tuple[float, float] | None:
        """Record a report; return the seconds for one unit of progress and from one report to the next, as medians.

        None after the first report, if it is unknown when the training began to work for it.
        """
        self._seen.append((time.monotonic(), progress))
        took = [(later - before, after - at) for (before, at), (later, after) in pairwise(self._seen)]
        if not took:
            return None
        of_one = statistics.median(seconds / units for seconds, units in took)
        return round(of_one, 6), round(statistics.median(seconds for seconds, _ in took), 6)
