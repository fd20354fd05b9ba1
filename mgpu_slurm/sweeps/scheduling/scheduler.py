"""The interface of schedulers, which decide how far each trial is trained.

A scheduler is asked when a trial has reported, and when a worker has nothing to do. Both answers depend only on a
snapshot of the study, so that any worker that holds the study's lock can ask.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class EntryState(Enum):
    """What a trial does."""

    RUNNING = "running"
    PAUSED = "paused"
    """It has a checkpoint at its rung, and waits to be promoted."""
    GIVEN_BACK = "given back"
    """It waits to be resumed by the next worker, to the rung that it was granted."""
    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Entry:
    """A trial that has begun, as a scheduler sees it."""

    number: int
    """Number among the study's own trials, from 0: without those copied from an earlier study."""
    until: int
    """Index of the rung to which it may run."""
    values: Mapping[int, float]
    """Values by the index of the rung, up to `until`: the first that it reported at the rung or later."""
    state: EntryState
    source: int | None = None
    """Of a trial that was pruned to be replaced: the trial whose copy replaces it."""
    replaces: int | None = None
    """Of a copy: the pruned trial in whose place it is."""

    @property
    def has_arrived(self) -> bool:
        """Whether it has reached the rung to which it may run."""
        return self.until in self.values


@dataclass(frozen=True)
class Snapshot:
    """The trials of a study at one moment."""

    entries: Mapping[int, Entry]
    """Entries by their number."""
    trials: int | None = None
    """How many trials may begin in all; None for as many as the budget allows."""
    may_begin: bool = True
    """Whether another trial may begin."""
    is_over: bool = False
    """Whether the sweep's budget is spent."""
    study: Any = None
    """The study with these trials, for the pruners of Optuna."""


class Decision(Enum):
    """What becomes of a trial that has reported."""

    CONTINUE = "continue"
    """It continues without a pause, to the next rung."""
    PAUSE = "pause"
    """It pauses with its next checkpoint."""
    PRUNE = "prune"
    COMPLETE = "complete"
    """It has passed the last rung, and trains to the end of its job."""


@dataclass(frozen=True)
class Clone:
    """The decision to replace a trial by a changed copy of another one."""

    source: int
    """The trial to copy."""


class Action(Enum):
    """What a worker that has nothing to do should do; see `Job`."""

    BEGIN = "begin"
    PROMOTE = "promote"
    CLONE = "clone"


@dataclass(frozen=True)
class Job:
    """What a worker should do."""

    action: Action
    number: int | None = None
    """The trial to promote, or to replace by a copy: one that was pruned for that, or is paused."""
    source: int | None = None
    """The trial to copy."""


BEGIN = Job(Action.BEGIN)


class Scheduler(ABC):
    """The interface for deciding how far each trial is trained. Methods change nothing."""

    rungs: Sequence[int] = ()
    """Progress values at which trials are compared, in ascending order."""
    pauses: bool = False
    """Whether trials may pause at a rung."""
    copies: bool = False
    """Whether trials may be replaced by copies of others."""

    def first_rung(self, number: int) -> int:
        """Return the index of the rung to which a new trial may run, if trials may pause.

        Args:
            number: number of the trial; see `Entry.number`.
        """
        return 0

    def is_due(self, before: int, progress: int) -> bool:
        """Return whether `decide` should be asked about a trial.

        Args:
            before: its last progress before this report; 0 if there was none.
            progress: the progress that it has reported.
        """
        return any(before < rung <= progress for rung in self.rungs)

    @abstractmethod
    def decide(self, snapshot: Snapshot, number: int) -> Decision | Clone:
        """Decide on a running trial that has reported a value at its rung: an infinite one if it violates a
        constraint."""

    def next_job(self, snapshot: Snapshot) -> Job | None:
        """Return what a worker without a trial should do; None if nothing, and it leaves."""
        return BEGIN if snapshot.may_begin else None

    def promotable(self, snapshot: Snapshot) -> int:
        """Return how many paused trials would be promoted if as many workers came."""
        return 0

    def hopeless(self, snapshot: Snapshot) -> list[int]:
        """Return the paused trials that will never be promoted, whatever comes."""
        return []

    def least_promising(self, snapshot: Snapshot) -> list[int]:
        """Return the paused trials that may be pruned to make room, the least promising first."""
        return []


class Unlimited(Scheduler):
    """A scheduler that lets every trial run to its end."""

    def decide(self, snapshot: Snapshot, number: int) -> Decision:
        return Decision.CONTINUE


class OptunaPruner(Scheduler):
    """A scheduler that asks a pruner of Optuna at each report."""

    def __init__(self, pruner: Any, max_resource: int | None) -> None:
        """
        Args:
            pruner: an `optuna.pruners.BasePruner`.
            max_resource: the progress of a complete trial; None if unknown.
        """
        self._pruner = pruner
        self._end = math.inf if max_resource is None else max_resource

    def is_due(self, before: int, progress: int) -> bool:
        # at its end, pruning would save nothing and give the sampler less information
        return progress < self._end

    def decide(self, snapshot: Snapshot, number: int) -> Decision:
        reports = snapshot.study.own_trial(number).intermediate_values
        if not math.isfinite(reports[max(reports)]):
            return Decision.PRUNE
        # medians of infinite values are NaN
        study = snapshot.study.with_finite_reports()
        return Decision.PRUNE if self._pruner.prune(study, study.own_trial(number)) else Decision.CONTINUE
