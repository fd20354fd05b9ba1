"""Population based training (Jaderberg et al. 2017): weak members of a population are replaced by copies of good ones.

A copy continues from the checkpoint of the other, with changed values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mgpu_slurm.sweeps.scheduling.halving import worth
from mgpu_slurm.sweeps.scheduling.scheduler import (
    BEGIN,
    Action,
    Clone,
    Decision,
    Entry,
    EntryState,
    Job,
    Scheduler,
    Snapshot,
)

QUARTERS = 4
"""The worst quarter of the members is replaced by copies of those in the best quarter."""

_COPIED = (EntryState.RUNNING, EntryState.PAUSED, EntryState.GIVEN_BACK)
"""States of a trial that may be copied; one that is complete leaves nothing to train."""


@dataclass(frozen=True, kw_only=True)
class Population(Scheduler):
    """A population of trials, compared with each other at each rung; the rungs are multiples of the interval.

    A member that is replaced is pruned, and its copy is a new trial. Members take turns if there are fewer workers: the
    one that has come least far is next.
    """

    rungs: Sequence[int]
    population: int
    is_maximized: bool
    pauses: bool = True
    copies: bool = True

    def decide(self, snapshot: Snapshot, number: int) -> Decision | Clone:
        entry = snapshot.entries[number]
        if entry.until == len(self.rungs) - 1:
            return Decision.COMPLETE
        if snapshot.is_over:
            return Decision.PAUSE
        source = self._replacement(snapshot, entry)
        if source is not None:
            return Clone(source)
        return Decision.PAUSE if self._comes_before(snapshot, entry) else Decision.CONTINUE

    def next_job(self, snapshot: Snapshot) -> Job | None:
        if snapshot.is_over:
            return None
        for entry in self._to_replace(snapshot):
            source = self._source_of(snapshot, entry)
            if source is not None:
                return Job(Action.CLONE, entry.number, source)
        if self._may_begin(snapshot):
            return BEGIN
        paused = [each for each in snapshot.entries.values() if each.state is EntryState.PAUSED]
        if not paused:
            return None
        entry = min(paused, key=lambda each: (each.until, each.number))
        # more have come to its rung since it was judged
        source = self._replacement(snapshot, entry)
        return Job(Action.PROMOTE if source is None else Action.CLONE, entry.number, source)

    def promotable(self, snapshot: Snapshot) -> int:
        if snapshot.is_over:
            return 0
        paused = sum(each.state is EntryState.PAUSED for each in snapshot.entries.values())
        replaced = [each for each in self._to_replace(snapshot) if self._source_of(snapshot, each) is not None]
        members = sum(each.replaces is None for each in snapshot.entries.values())
        return paused + len(replaced) + (self.population - members if self._may_begin(snapshot) else 0)

    def _replacement(self, snapshot: Snapshot, entry: Entry) -> int | None:
        """Return the trial to copy in the place of one that is in the worst quarter of its rung; else None."""
        order = self._ranked(snapshot.entries.values(), entry.until)
        quarter = len(order) // QUARTERS
        if entry not in order[len(order) - quarter :]:
            return None
        sources = [each.number for each in order[:quarter] if _may_be_copied(each)]
        return sources[entry.number % len(sources)] if sources else None

    def _may_begin(self, snapshot: Snapshot) -> bool:
        members = sum(each.replaces is None for each in snapshot.entries.values())
        return snapshot.may_begin and members < self.population

    def _comes_before(self, snapshot: Snapshot, entry: Entry) -> bool:
        """Return whether a worker has something to do before it continues with this member."""
        if self._may_begin(snapshot):
            return True
        waits = (EntryState.PAUSED, EntryState.GIVEN_BACK)
        return any(each.state in waits and each.until <= entry.until for each in snapshot.entries.values())

    def _ranked(self, entries: Iterable[Entry], rung: int) -> list[Entry]:
        """Return the trials with a value at the rung, best first; of equal ones, the earlier first."""
        there = [each for each in entries if rung in each.values]
        return sorted(there, key=lambda each: (worth(each.values[rung], self.is_maximized), each.number))

    def _to_replace(self, snapshot: Snapshot) -> list[Entry]:
        """Return the pruned trials that have no copy in their place yet."""
        replaced = {each.replaces for each in snapshot.entries.values()}
        return [
            each
            for each in snapshot.entries.values()
            if each.source is not None and each.state is EntryState.PRUNED and each.number not in replaced
        ]

    def _source_of(self, snapshot: Snapshot, entry: Entry) -> int | None:
        """Return the trial to copy: the chosen one, or the best there is if that has gone meanwhile."""
        order = self._ranked(snapshot.entries.values(), entry.until)
        left = [each.number for each in order if _may_be_copied(each)]
        return entry.source if entry.source in left else next(iter(left), None)


def _may_be_copied(entry: Entry) -> bool:
    """Return whether a trial with values is still there, and violates no constraint."""
    return entry.state in _COPIED and math.isfinite(entry.values[max(entry.values)])
