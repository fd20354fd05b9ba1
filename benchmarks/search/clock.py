"""A sweep on a simulated clock: learning curves in place of training, whatever decides on trials."""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod

import numpy as np

from benchmarks.search.problems import Family, Point, Problem

RESOURCE, FACTOR = 27, 3
RUNGS = (1, 3, 9, 27)

START = RESUME = 0.3
"""Time of a start and of a resumption; that of an epoch is 0.6 to 1.4."""

MARKS = (0.25, 0.5, 1.0)
"""Parts of the budget after which the regret is measured."""


class Simulation(ABC):
    """One sweep on one problem; a subclass chooses what workers do."""

    def __init__(self, family: Family, seed: int, workers: int, whole_trials: int) -> None:
        """
        Args:
            whole_trials: the budget, as the number of trials of `RESOURCE` epochs of one time unit each.
        """
        self.points: dict[int, Point] = {}
        """The configuration of each trial."""
        self._problem = Problem(family, seed, RESOURCE)
        self._noise = np.random.default_rng([seed, 2])
        self._workers = workers
        self._end = whole_trials * RESOURCE / workers
        self._events: list[tuple[float, int, int, int]] = []
        self._order = itertools.count()
        self._best: tuple[int, float, Point] | None = None
        """The furthest rung reached, the best value there, and its point."""

    @abstractmethod
    def take(self, now: float) -> None:
        """Let a worker begin or resume a trial, by a call of `train`."""

    @abstractmethod
    def reported(self, now: float, number: int, epoch: int, value: float) -> None:
        """Act on the report of a trial at a rung: continue it, or let its worker take another one."""

    def regrets(self) -> list[float]:
        """Return the regret of the best trial after each of the `MARKS`; 1 before the first report."""
        found: list[float] = []
        for worker in range(self._workers):
            self.take(worker * 1e-3)
        while len(found) < len(MARKS):
            now, _, number, epoch = heapq.heappop(self._events)
            while len(found) < len(MARKS) and now > MARKS[len(found)] * self._end:
                found.append(1.0 if self._best is None else self._problem.regret(self._best[2]))
            point = self.points[number]
            value = self._problem.loss(point, epoch) + self._problem.noise * float(self._noise.standard_normal())
            if self._best is None or (-epoch, value) < (-self._best[0], self._best[1]):
                self._best = (epoch, value, point)
            self.reported(now, number, epoch, value)
        return found

    def train(self, now: float, number: int, last: int = 0) -> None:
        """Train a trial to the next rung.

        Args:
            last: the epoch that it has reached.
        """
        rung = next(rung for rung in RUNGS if rung > last)
        time = (rung - last) * self._problem.epoch_time(self.points[number])
        heapq.heappush(self._events, (now + time, next(self._order), number, rung))
