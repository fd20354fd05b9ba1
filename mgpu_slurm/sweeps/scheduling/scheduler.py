"""Schedulers, which decide at each report of a trial whether it continues."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from enum import Enum

from optuna.trial import Trial


class Decision(Enum):
    """Whether a trial that has reported continues."""

    CONTINUE = "continue"
    PRUNE = "prune"


class Scheduler(ABC):
    """The interface for deciding which trials continue."""

    @abstractmethod
    def decide(self, trial: Trial, progress: int) -> Decision:
        """Decide on a trial whose value at this progress is stored in the study."""


class PrunerScheduler(Scheduler):
    """A scheduler that prunes the trials that the study's pruner prunes."""

    def __init__(self, max_resource: int | None) -> None:
        """
        Args:
            max_resource: the progress of a complete trial; None if unknown.
        """
        self._max_resource = math.inf if max_resource is None else max_resource

    def decide(self, trial: Trial, progress: int) -> Decision:
        if progress >= self._max_resource:
            # the trial is at its end: pruning would save nothing and give the sampler less information
            return Decision.CONTINUE
        return Decision.PRUNE if trial.should_prune() else Decision.CONTINUE
