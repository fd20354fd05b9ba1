"""Successive halving: trials are compared at rungs, and only the best of each rung continue.

`StopOnly` ends the others at once: Hyperband (Li et al., JMLR 2018), or one bracket of it. `Promotion` pauses them, and
continues one when it has become one of the best: ASHA (Li et al., MLSys 2020).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mgpu_slurm.sweeps.scheduling.rungs import bracket_of
from mgpu_slurm.sweeps.scheduling.scheduler import (
    BEGIN,
    Action,
    Decision,
    Entry,
    EntryState,
    Job,
    Scheduler,
    Snapshot,
)

HEDGE_EVERY = 8
"""One of so many trials is hedged: it is first compared at a higher rung, in case low rungs mislead."""

HEDGE_RUNG = 2
"""Highest index of that rung, which leaves room for another promotion."""

HEDGE_RUNGS = 4
"""Fewest rungs for which trials are hedged."""

DROP_RANK = 2
"""Without a number of trials, a paused trial is pruned when its rank exceeds this multiple of the places: in
simulations, 0.1% of the promoted trials had ever been that far down."""


def worth(value: float, is_maximized: bool) -> float:
    """Return a value such that lower is better, and what is not finite is worst."""
    if not math.isfinite(value):
        return math.inf
    return -value if is_maximized else value


@dataclass(frozen=True, kw_only=True)
class StopOnly(Scheduler):
    """Asynchronous successive halving in brackets, which prunes a trial that is not among the best of its rung."""

    rungs: Sequence[int]
    factor: int
    is_maximized: bool
    sizes: Sequence[int] = (1,)
    """Number of trials of each bracket in one round; the first compares at all rungs, the next one from the second."""

    def decide(self, snapshot: Snapshot, number: int) -> Decision:
        entry = snapshot.entries[number]
        rung, bracket = max(entry.values, default=0), bracket_of(number, self.sizes)
        if rung == len(self.rungs) - 1:
            return Decision.COMPLETE
        if rung < bracket:
            return Decision.CONTINUE
        if not math.isfinite(entry.values[rung]):
            # it violates a constraint
            return Decision.PRUNE
        others = [
            each.values[rung]
            for each in snapshot.entries.values()
            if rung in each.values and bracket_of(each.number, self.sizes) == bracket
        ]
        own = worth(entry.values[rung], self.is_maximized)
        better = sum(worth(value, self.is_maximized) < own for value in others)
        return Decision.CONTINUE if better < max(1, len(others) // self.factor) else Decision.PRUNE


@dataclass(frozen=True, kw_only=True)
class Promotion(Scheduler):
    """Asynchronous successive halving, by promotion of paused trials.

    Of n values at a rung, the best n // factor are promoted, at most. In contrast to the paper there are never more,
    even if each new trial is better than those before it. The trial with the best value is promoted alone, once nothing
    else is left to do, if no trial has become complete.
    """

    rungs: Sequence[int]
    factor: int
    is_maximized: bool
    hedge: bool = False
    pauses: bool = True

    def first_rung(self, number: int) -> int:
        return self._hedge_rung if self.is_hedged(number) else 0

    def is_hedged(self, number: int) -> bool:
        return self.hedge and len(self.rungs) >= HEDGE_RUNGS and number % HEDGE_EVERY == HEDGE_EVERY - 1

    @property
    def _hedge_rung(self) -> int:
        return max(rung for rung in range(HEDGE_RUNG + 1) if self.rungs[rung] * self.factor <= self.rungs[-1])

    def decide(self, snapshot: Snapshot, number: int) -> Decision:
        entry = snapshot.entries[number]
        if entry.until == len(self.rungs) - 1:
            return Decision.COMPLETE
        if not math.isfinite(entry.values[entry.until]):
            # a trial that violates a constraint is never promoted
            return Decision.PRUNE
        alike = self._kind(snapshot, self.is_hedged(number))
        if not snapshot.is_over and self._candidate(alike, also=number) == number:
            return Decision.CONTINUE
        if self._for_last_call(snapshot, also=number) == number:
            return Decision.PAUSE
        return Decision.PRUNE if self._hopeless_at(entry.until, alike, snapshot, {number}) else Decision.PAUSE

    def next_job(self, snapshot: Snapshot) -> Job | None:
        if not snapshot.is_over:
            for is_hedged in (False, True):
                number = self._candidate(self._kind(snapshot, is_hedged))
                if number is not None:
                    return Job(Action.PROMOTE, number)
            if snapshot.may_begin:
                return BEGIN
        return self._last_call(snapshot)

    def candidates(self, snapshot: Snapshot) -> set[int]:
        """Return the paused trials that are among the best of their rung, whether it still has a place or not."""
        found: set[int] = set()
        for is_hedged in (False, True):
            alike = self._kind(snapshot, is_hedged)
            for rung in range(len(self.rungs) - 1):
                order = self._ranked(alike, rung)
                found |= {each.number for each in order[: len(order) // self.factor] if _is_paused_at(each, rung)}
        return found

    def promotable(self, snapshot: Snapshot) -> int:
        found = 0
        for is_hedged in (False, True) if not snapshot.is_over else ():
            alike = self._kind(snapshot, is_hedged)
            for rung in range(len(self.rungs) - 1):
                order = self._ranked(alike, rung)
                room = len(order) // self.factor
                left = room - sum(each.until > rung for each in order)
                found += min(max(0, left), sum(_is_paused_at(each, rung) for each in order[:room]))
        return found or int(self._last_call(snapshot) is not None and not snapshot.may_begin)

    def hopeless(self, snapshot: Snapshot) -> list[int]:
        found: list[int] = []
        for is_hedged in (False, True):
            alike = self._kind(snapshot, is_hedged)
            for rung in range(len(self.rungs) - 1):
                paused = {each.number for each in alike if _is_paused_at(each, rung)}
                found += self._hopeless_at(rung, alike, snapshot, paused) if paused else []
        return sorted({*found} - {self._for_last_call(snapshot)})

    def least_promising(self, snapshot: Snapshot) -> list[int]:
        candidates = {*self.candidates(snapshot), self._for_last_call(snapshot)}
        paused = [each for each in snapshot.entries.values() if each.state is EntryState.PAUSED]
        paused.sort(key=lambda each: (each.until, -self._worth(each, each.until), -each.number))
        return [each.number for each in paused if each.number not in candidates]

    # -- ranks

    def _kind(self, snapshot: Snapshot, is_hedged: bool) -> list[Entry]:
        """Return the trials that are compared with each other."""
        return [each for each in snapshot.entries.values() if self.is_hedged(each.number) is is_hedged]

    def _worth(self, entry: Entry, rung: int) -> float:
        return worth(entry.values[rung], self.is_maximized)

    def _ranked(self, entries: Iterable[Entry], rung: int) -> list[Entry]:
        """Return the trials with a value at the rung, best first; of equal ones, the earlier first."""
        there = [each for each in entries if rung in each.values]
        return sorted(there, key=lambda each: (self._worth(each, rung), each.number))

    def _candidate(self, alike: Sequence[Entry], also: int | None = None) -> int | None:
        """Return the paused trial to promote: of the highest rung that has one, the best.

        Args:
            also: a running trial to consider as if it were paused.
        """
        for rung in reversed(range(len(self.rungs) - 1)):
            if not any(_is_paused_at(each, rung) or _is_also(each, rung, also) for each in alike):
                continue
            order = self._ranked(alike, rung)
            room = len(order) // self.factor
            if sum(each.until > rung for each in order) >= room:
                continue
            for each in order[:room]:
                if (_is_paused_at(each, rung) or _is_also(each, rung, also)) and math.isfinite(each.values[rung]):
                    return each.number
        return None

    def _hopeless_at(self, rung: int, alike: Sequence[Entry], snapshot: Snapshot, numbers: set[int]) -> list[int]:
        """Return those of the trials at a rung that will never be promoted out of it, as ranks only fall."""
        order = self._ranked(alike, rung)
        if snapshot.trials is None:
            places = DROP_RANK * max(1, len(order) // self.factor)
        else:
            first = self.first_rung(alike[0].number)
            places = max(1, self._of_kind(snapshot.trials, first) // self.factor ** max(1, rung - first + 1))
        lost = [each for place, each in enumerate(order) if place >= places or not math.isfinite(each.values[rung])]
        return [each.number for each in lost if each.number in numbers]

    def _of_kind(self, trials: int, first_rung: int) -> int:
        """Return how many of the sweep's trials are first compared at this rung."""
        hedged = sum(map(self.is_hedged, range(trials)))
        return hedged if first_rung else trials - hedged

    def _last_call(self, snapshot: Snapshot) -> Job | None:
        """Return the promotion of the most promising trial, if nothing runs and none has become complete."""
        busy = (EntryState.RUNNING, EntryState.GIVEN_BACK)
        if any(each.state in busy for each in snapshot.entries.values()):
            return None
        number = self._for_last_call(snapshot)
        return None if number is None else Job(Action.PROMOTE, number)

    def _for_last_call(self, snapshot: Snapshot, also: int | None = None) -> int | None:
        """Return the paused trial that has come furthest, and is the best there; None if a trial is complete.

        Args:
            also: a running trial to consider as if it were paused.
        """
        entries = snapshot.entries.values()
        if any(each.state is EntryState.COMPLETE for each in entries):
            return None
        left = [each for each in entries if _is_paused_at(each, each.until) or each.number == also]
        left = [each for each in left if math.isfinite(each.values[each.until])]
        best = min(left, key=lambda each: (-each.until, self._worth(each, each.until), each.number), default=None)
        return None if best is None else best.number


def _is_also(entry: Entry, rung: int, also: int | None) -> bool:
    return entry.number == also and entry.until == rung


def _is_paused_at(entry: Entry, rung: int) -> bool:
    return entry.until == rung and entry.state is EntryState.PAUSED
