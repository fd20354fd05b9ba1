"""Turn what the ranks have measured into curves, and name a rank that holds up the others."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from mgpu_slurm.request.parallelism import Layout
from mgpu_slurm.run_folder.speed_records import Interval

REPORTS = 3
"""Number of consecutive reports after which a rank is named."""
LEAST_SHARE = 0.1
"""Part of a step by which a rank has to be slower than the others."""
LEAST_RATIO = 1.5
"""How many times as long as the others it has to take."""


def curves(ranks: Sequence[Interval], layout: Layout) -> dict[str, float]:
    """Return figures of the steps since the last report, by name; none if there was no step.

    Shares are parts of the time of a step.
    """
    if not all(rank.steps and rank.seconds for rank in ranks):
        return {}
    seconds = statistics.fmean(rank.seconds for rank in ranks)
    found = {"speed/step_seconds": seconds / ranks[0].steps}
    # a job may read its data without a run.loader
    if samples := sum(rank.samples for rank in ranks):
        found["speed/samples_per_second"] = samples / layout.ranks_per_batch / seconds
        found["speed/data_wait"] = max(rank.waited / rank.seconds for rank in ranks)
    if any(rank.forward for rank in ranks):
        found["speed/forward"] = statistics.fmean(rank.forward / rank.seconds for rank in ranks)
    if tokens := sum(rank.tokens for rank in ranks):
        found["speed/tokens_per_second"] = tokens / layout.ranks_per_batch / seconds
    if layout.waits_in_backward and any(rank.backward for rank in ranks):
        least = min(rank.backward for rank in ranks)
        found["speed/communication_wait"] = statistics.fmean((rank.backward - least) / rank.seconds for rank in ranks)
    if reserved := max(rank.reserved for rank in ranks):
        found["memory/peak_allocated_gib"] = max(rank.allocated for rank in ranks) / 2**30
        found["memory/peak_reserved_gib"] = reserved / 2**30
    if used := max(rank.gpu_memory for rank in ranks):
        found["gpu/utilization"] = statistics.fmean(rank.gpu_utilization for rank in ranks)
        found["gpu/power_watts"] = statistics.fmean(rank.gpu_power for rank in ranks)
        found["gpu/memory_gib"] = used / 2**30
    return found


class Stragglers:
    """Finds a rank that is slower than the others in several reports in a row."""

    def __init__(self, layout: Layout) -> None:
        self._reasons = ["waited", "forward"] if layout.waits_in_backward else ["waited"]
        self._found: tuple[int, str] | None = None
        self._reports = 0
        self._named: set[tuple[int, str]] = set()

    def see(self, ranks: Sequence[Interval]) -> str | None:
        """Take the figures of a report; return a sentence if a rank is found for the first time."""
        found = self._slowest(ranks)
        self._reports = self._reports + 1 if found is not None and found == self._found else 1
        self._found = found
        if found is None or self._reports < REPORTS or found in self._named:
            return None
        self._named.add(found)
        rank, reason = found
        own, usual, step = (1e3 * seconds for seconds in self._times(ranks, rank, reason))
        what = "waits for its data" if reason == "waited" else "is in its forward pass"
        return (
            f"rank {rank} holds up the others: of each step of {step:.0f} ms, it {what} for {own:.0f} ms, they for"
            f" {usual:.0f} ms"
        )

    def _slowest(self, ranks: Sequence[Interval]) -> tuple[int, str] | None:
        """Return the rank that was slower than the others, and in what."""
        if len(ranks) < 2 or not all(rank.steps for rank in ranks):
            return None
        for reason in self._reasons:
            rank = max(range(len(ranks)), key=lambda rank: getattr(ranks[rank], reason))
            own, usual, step = self._times(ranks, rank, reason)
            if own - usual > LEAST_SHARE * step and own > LEAST_RATIO * usual:
                return rank, reason
        return None

    @staticmethod
    def _times(ranks: Sequence[Interval], rank: int, reason: str) -> tuple[float, float, float]:
        """Return the seconds per step of a rank, of the others, and of a whole step."""
        steps = ranks[0].steps
        others = [getattr(each, reason) for number, each in enumerate(ranks) if number != rank]
        seconds = statistics.fmean(each.seconds for each in ranks)
        return getattr(ranks[rank], reason) / steps, statistics.median(others) / steps, seconds / steps
