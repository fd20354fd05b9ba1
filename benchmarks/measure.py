"""Measuring side by side: cases take turns in one run, and what is reported is a median with its interval.

A shared machine slows down and speeds up by itself. Cases that take turns see the same weather, so the ratio of two
neighbouring measurements is steadier than either of them.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Measured = TypeVar("Measured")

RESAMPLES = 2000
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


def interleave(
    cases: Mapping[str, Callable[[], Measured]], rounds: int, warm_ups: int = 1
) -> dict[str, list[Measured]]:
    """What each case returned in each round, by name; item i of every list is of the same round.

    Args:
        cases: each measures once and returns what it measured.
        rounds: each in an order of its own, so that no case always comes after the same other one.
        warm_ups: rounds before those that count, which fill caches.
    """
    measured: dict[str, list[Measured]] = {name: [] for name in cases}
    # the same orders in every process, because ranks that measure together have to take the same turns
    chance = random.Random(0)
    for _ in range(warm_ups + rounds):
        for name in chance.sample(list(cases), k=len(cases)):
            measured[name].append(cases[name]())
    return {name: values[warm_ups:] for name, values in measured.items()}


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
