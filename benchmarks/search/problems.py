"""Families of learning curves, as trials of a simulated sweep.

Each problem has continuous parameters in 0..1, the first of which is a learning rate on a logarithmic scale, and one
choice of three. A configuration has a final loss, the better the closer it is to an optimum, and a curve to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

Family = Literal["plain", "crossing", "misleading", "noisy"]
FAMILIES: tuple[Family, ...] = get_args(Family)

CONTINUOUS = 6
"""Number of continuous parameters."""

WORST, LEAST = 0.95, 0.05
"""Loss of an untrained model, and of the best configuration."""

_SAMPLES = 3000

Point = tuple[float, ...]
"""The continuous parameters in 0..1, and the index of the choice."""


@dataclass(frozen=True)
class Problem:
    """One problem of a family."""

    family: Family
    seed: int
    resource: int
    """Epochs of a whole trial."""

    @cached_property
    def _shape(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        draw = np.random.default_rng([self.seed, FAMILIES.index(self.family)])
        optimum = draw.uniform(0.15, 0.85, CONTINUOUS)
        weights = draw.dirichlet(np.ones(CONTINUOUS)) * 3 + 0.1
        return optimum, weights, draw.permutation([0.0, 0.12, 0.35]), draw.uniform(-0.8, 0.8)

    def _distance(self, point: Point) -> float:
        optimum, weights, choices, mix = self._shape
        away = np.array(point[:-1]) - optimum
        together = mix * away[0] * away[1] * 0.8 * min(1, weights[0] * weights[1])
        return 4 * float((weights * away * away).sum() + together + choices[int(point[-1])])

    def final(self, point: Point) -> float:
        """Return the loss after all epochs."""
        return LEAST + 0.85 * (1 - math.exp(-max(0.0, self._distance(point))))

    def loss(self, point: Point, epoch: float) -> float:
        """Return the loss after so many epochs, without noise."""
        speed, end = self._speed(point), self.final(point)
        left = (1 + epoch) ** -speed - (1 + self.resource) ** -speed
        return end + (WORST - end) * left / (1 - (1 + self.resource) ** -speed)

    def _speed(self, point: Point) -> float:
        if self.family == "plain":
            return 1.0
        if self.family == "misleading":
            # the better at the end, the slower at first
            return 0.05 + 3 * (1 - math.exp(-self._distance(point)))
        # higher rates are faster at first
        return 0.25 + 1.6 * point[0]

    @property
    def noise(self) -> float:
        """Standard deviation of a reported loss."""
        return 0.08 if self.family == "noisy" else 0.01

    @staticmethod
    def epoch_time(point: Point) -> float:
        """Return the time of an epoch, which one of the parameters changes."""
        return 0.6 + 0.8 * point[1]

    def regret(self, point: Point) -> float:
        """Return the final loss above the optimum, as a share of that of the median random configuration."""
        return (self.final(point) - self._best) / (self._median - self._best)

    @cached_property
    def _best(self) -> float:
        optimum, _, choices, _ = self._shape
        return self.final((*optimum, int(np.argmin(choices))))

    @cached_property
    def _median(self) -> float:
        draw = np.random.default_rng([self.seed, 1])
        points = [(*draw.uniform(0, 1, CONTINUOUS), int(draw.integers(3))) for _ in range(_SAMPLES)]
        return float(np.median([self.final(point) for point in points]))
