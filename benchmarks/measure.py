"""Measuring side by side: cases take turns in one run, and what is reported is a median with its interval.

A shared machine slows down and speeds up by itself. Cases that take turns see the same weather, so the ratio of two
neighbouring measurements is steadier than either of them.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

RESAMPLES = 5000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A median and the interval that holds it with 95% confidence."""

    value: float
    low: float
    high: float
    count: int
    """Measurements, or pairs of them."""

    def scaled(self, factor: float) -> Estimate:
        """The same in another unit."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.count)


def interleave(cases: Mapping[str, Callable[[], float]], rounds: int, warm_ups: int = 1) -> dict[str, list[float]]:
    """What each case returned in each round, by name; item i of every list is of the same round.

    Args:
        cases: each measures once and returns what it measured.
        rounds: every other one runs the cases in reverse, so that none always comes after the same other one.
        warm_ups: rounds before those that count, which fill caches.
    """
    names = list(cases)
    measured: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(-warm_ups, rounds):
        for name in reversed(names) if round_ % 2 else names:
            value = cases[name]()
            if round_ >= 0:
                measured[name].append(value)
    return measured


def median(samples: Sequence[float]) -> Estimate:
    """The median, its interval by bootstrap over the samples."""
    if not samples:
        raise ValueError("no samples: a median needs at least one")
    # the same samples give the same interval, in every process
    chance = random.Random(0)
    found = sorted(statistics.median(chance.choices(samples, k=len(samples))) for _ in range(RESAMPLES))
    tail = round(RESAMPLES * (1 - CONFIDENCE) / 2)
    return Estimate(statistics.median(samples), found[tail], found[-1 - tail], len(samples))


def ratio(samples: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """The median of the paired ratios `samples[i] / baseline[i]`, its interval by bootstrap over the pairs."""
    return median([ours / theirs for ours, theirs in zip(samples, baseline, strict=True)])


def difference(samples: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """The median of the paired differences `samples[i] - baseline[i]`, its interval by bootstrap over the pairs."""
    return median([ours - theirs for ours, theirs in zip(samples, baseline, strict=True)])
