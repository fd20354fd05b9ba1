"""A run's checkpoint settings: when to save, how many checkpoints to keep, and which one is the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mgpu_slurm.core import log_lines
from mgpu_slurm.core.errors import UserError, nearest
from mgpu_slurm.run_folder.checkpoint_names import CheckpointKey
from mgpu_slurm.run_folder.record_types import from_known

DIRECTIONS = ("minimize", "maximize")


@dataclass(frozen=True)
class Plan:
    """When a run saves in addition to the ends of epochs, and which checkpoints it keeps; see `Run.checkpoints`."""

    every_steps: int | None = None
    every_minutes: float | None = 10.0
    keep: int = 2
    best: str | None = None
    direction: str | None = None

    def check(self) -> None:
        """Check the values.

        Raises:
            UserError: a value is invalid; the message names it.
        """
        if self.every_steps is not None and not _is_whole_number(self.every_steps):
            raise UserError(f"run.checkpoints(every_steps={self.every_steps!r}): expected 1, 2, ... or None")
        if self.every_minutes is not None and not self.every_minutes > 0:
            raise UserError(f"run.checkpoints(every_minutes={self.every_minutes!r}): expected more than 0, or None")
        if not _is_whole_number(self.keep):
            raise UserError(f"run.checkpoints(keep={self.keep!r}): expected 1, 2, ...")
        if self.direction not in (DIRECTIONS if self.best is not None else (None, *DIRECTIONS)):
            raise UserError(
                f"run.checkpoints(best={self.best!r}, direction={self.direction!r}): expected direction"
                f" {' or '.join(map(repr, DIRECTIONS))}: which values are better"
            )

    def best_of(self, known: Best | None) -> Best | None:
        """Return the known best if it is for this plan's metric and direction, else None."""
        if known is None or (known.metric, known.direction) != (self.best, self.direction):
            return None
        return known


def _is_whole_number(value: object) -> bool:
    return type(value) is int and value >= 1


@dataclass(frozen=True)
class Best:
    """The best report so far whose checkpoint has been or is being written."""

    metric: str
    direction: str
    value: float
    step: int
    number: int | None = None
    """Number of the checkpoint among those of its step; None until the checkpoint has its name."""

    @property
    def key(self) -> CheckpointKey:
        return CheckpointKey(self.step, self.number or 1)

    def named_by(self, key: CheckpointKey) -> Best:
        """Return the best after a checkpoint got its name: if the best had none yet, it is that checkpoint."""
        return replace(self, number=key.number) if self.number is None else self

    @staticmethod
    def from_json(facts: Mapping[str, Any]) -> Best | None:
        if facts["best"] is None:
            return None
        # version 0.1 had one checkpoint of each step
        return from_known(Best, {**facts["best"], "number": facts.get("best_number", 1)})

    @staticmethod
    def to_json(best: Best | None) -> dict[str, Any]:
        if best is None:
            return {"best": None}
        values = asdict(best)
        # version 0.1 reads `best` and accepts no other keys in it
        return {"best_number": values.pop("number"), "best": values}


class BestReports:
    """Tracker of the best report that has a checkpoint; on rank 0."""

    def __init__(self) -> None:
        self._kept: Best | None = None
        """The best of the published checkpoints."""
        self._next: Best | None = None
        """The best once the save in progress is published too."""
        self._heard: Best | None = None
        """A better report that is not saved yet."""
        self._has_missed = False

    def restored(self, best: Best | None) -> None:
        """Continue from the best that a checkpoint names; None if that no longer exists."""
        self._kept = self._next = best

    def hear(self, plan: Plan, step: int, metrics: Mapping[str, float]) -> bool:
        """Note a report; return whether a checkpoint of its step would be the best."""
        if plan.best is None or plan.direction is None:
            return False
        if plan.best not in metrics:
            self._miss(plan.best, list(metrics))
            return False
        value = metrics[plan.best]
        before = plan.best_of(self._next)
        if math.isnan(value) or (before is not None and not _is_better(value, before.value, plan.direction)):
            return False
        self._heard = Best(plan.best, plan.direction, value, step)
        return True

    def _miss(self, metric: str, names: list[str]) -> None:
        if not self._has_missed:
            self._has_missed = True
            log_lines.warn(
                f"run.checkpoints(best={metric!r}): a report has no such metric"
                f"{nearest(metric, names)}; checkpoints of reports that lack it are never the best"
            )

    def begin(self, plan: Plan, step: int) -> Best | None:
        """Return the best for a checkpoint of this step; it takes effect with `published`."""
        self._next = plan.best_of(self._kept)
        if self._heard is not None and self._heard.step == step:
            self._next = self._heard
        self._heard = None
        return self._next

    def published(self, key: CheckpointKey) -> CheckpointKey | None:
        """Return the best checkpoint after the one in progress was published.

        Args:
            key: key of the published checkpoint.
        """
        self._kept = self._next = None if self._next is None else self._next.named_by(key)
        return None if self._kept is None else self._kept.key

    def lost(self) -> None:
        self._next = self._kept


def _is_better(value: float, before: float, direction: str) -> bool:
    return value > before if direction == "maximize" else value < before
