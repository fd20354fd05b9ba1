"""When checkpoints are written, and how: beside the training, which waits for a copy in main memory only.

All ranks begin a save at the same boundary. Each copies what it keeps, and a thread writes that while the training goes
on. In the messages of the next boundaries ranks tell each other how far they are; once all have written, rank 0 gives
the checkpoint its name. What a rank cannot write costs that checkpoint and no more.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from mgpu_slurm.errors import MgpuError, UserError, nearest
from mgpu_slurm.runtime.agreement import Agreed
from mgpu_slurm.runtime.keeping import Keeper

CLOSE_SECONDS = 60.0
"""For which a rank that ends still writes: its checkpoint is whole if all of them come to their end."""

CLOSE_PAUSE = 0.05
"""Seconds between two looks whether the others have."""

DIRECTIONS = ("minimize", "maximize")


@dataclass(frozen=True)
class Plan:
    """When a run saves but for the ends of its epochs, and what stays; see `Run.checkpoints`."""

    every_steps: int | None = None
    every_minutes: float | None = 10.0
    keep: int = 2
    best: str | None = None
    direction: str | None = None

    def check(self) -> None:
        """
        Raises:
            UserError: names what is none.
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


def _is_whole_number(value: object) -> bool:
    return type(value) is int and value >= 1


@dataclass(frozen=True)
class Best:
    """A report that no other was as good as, and whose checkpoint has its name, or gets it next."""

    metric: str
    direction: str
    value: float
    step: int


class Saver:
    """One rank's saves, one at a time."""

    def __init__(self, keeper: Keeper, rank: int, together: Callable[[], Agreed]) -> None:
        """
        Args:
            together: has all ranks meet, and `heard` called with what they agree.
        """
        self.plan = Plan()
        self.written = 0
        """The number of the last save that this rank is done with."""
        self.lost = 0
        """The number of the last save that this rank could not write."""
        self._keeper = keeper
        self._rank = rank
        self._together = together
        self._begun = 0
        self._begun_at = time.monotonic()
        self._last_step = 0
        self._facts: Mapping[str, Any] | None = None
        """Of the save on its way, until all ranks have heard of its end; the same on all of them."""
        # of the best, rank 0 alone keeps count
        self._best: Best | None = None
        """Of those that have their name."""
        self._next_best: Best | None = None
        """Once the save on its way has its name too."""
        self._reported: Best | None = None
        """A report that is better, until it is saved."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._has_missed_best = False

    # -- when

    def restored(self, facts: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self._last_step, self._begun_at = facts["step"], time.monotonic()
        best = facts["best"]
        # it was deleted for one that is better, and that has been set aside since
        is_there = best is not None and self._keeper.has(best["step"])
        self._best = self._next_best = Best(**best) if is_there else None

    def is_due_at(self, step: int) -> bool:
        """Whether a checkpoint of this step is wanted; the same on all ranks."""
        every = self.plan.every_steps
        # there may be no boundary at the very step
        return every is not None and step // every > self._last_step // every

    def is_due_now(self) -> bool:
        """Whether this rank wishes one at the next boundary, for the time that has gone since the last."""
        if self._rank != 0 or self.plan.every_minutes is None or self._facts is not None:
            return False
        return time.monotonic() >= self._begun_at + 60 * self.plan.every_minutes

    def hear_report(self, step: int, metrics: Mapping[str, float]) -> bool:
        """On rank 0: whether a checkpoint of this step would be the best, and is wanted."""
        metric, direction = self.plan.best, self.plan.direction
        if metric is None or direction is None:
            return False
        if metric not in metrics:
            self._miss_best(list(metrics))
            return False
        value = metrics[metric]
        before = self._of_plan(self._next_best)
        if math.isnan(value) or (before is not None and not _is_better(value, before.value, direction)):
            return False
        self._reported = Best(metric, direction, value, step)
        return True

    def _of_plan(self, best: Best | None) -> Best | None:
        """The best, where it is that of the metric which counts now."""
        if best is None or (best.metric, best.direction) != (self.plan.best, self.plan.direction):
            return None
        return best

    def _miss_best(self, names: list[str]) -> None:
        if not self._has_missed_best:
            self._has_missed_best = True
            print(
                f"mgpu_slurm: WARNING: run.checkpoints(best={self.plan.best!r}): a report has no such metric"
                f"{nearest(str(self.plan.best), names)}; checkpoints of reports that lack it are never the best",
                flush=True,
            )

    # -- saving; every rank makes these calls, in step

    def save(self, facts: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Begins a checkpoint, unless that of the same place is on its way already.

        Args:
            facts: where the run stands, the same on all ranks.
            own: what this rank keeps for itself.

        Raises:
            UserError: something cannot be kept.
        """
        if facts == self._facts:
            return
        self.finish()
        # the one before may be about to get its name
        self._join()
        self._next_best = self._of_plan(self._best)
        if self._reported is not None and self._reported.step == facts["step"]:
            self._next_best = self._reported
        self._reported = None
        best = None if self._next_best is None else asdict(self._next_best)
        self._keeper.copy({**facts, "best": best}, own)
        self._begun += 1
        self._begun_at, self._last_step, self._facts = time.monotonic(), facts["step"], facts
        self._start(self._write)

    def _write(self) -> None:
        assert self._facts is not None
        try:
            self._keeper.write(self._facts["step"])
        except OSError as error:
            print(
                f"mgpu_slurm: WARNING: rank {self._rank} could not write {_name(self._facts)}: {error};"
                " training goes on, the checkpoint before it stays",
                flush=True,
            )
            self.lost = self._begun
        self.written = self._begun

    def heard(self, agreed: Agreed) -> None:
        """With each message that ranks exchange: ends the save on its way once all of them are done with it."""
        if self._error is not None:
            raise self._error
        if self._facts is None or agreed.written < self._begun:
            return
        facts, self._facts = self._facts, None
        if self._rank == 0:
            is_lost = agreed.lost == self._begun
            if is_lost:
                self._next_best = self._best
            if is_lost and self.lost != self._begun:
                print(f"mgpu_slurm: WARNING: not all ranks could write {_name(facts)}: their logs say why", flush=True)
            self._start(lambda: self._keeper.discard(facts["step"]) if is_lost else self._publish(facts))

    def _publish(self, facts: Mapping[str, Any]) -> None:
        try:
            self._keeper.publish(facts["step"])
        except OSError as error:
            print(f"mgpu_slurm: WARNING: {_name(facts)} cannot get its name: {error}", flush=True)
            return
        self._best = self._next_best
        try:
            self._keeper.tidy(self.plan.keep, None if self._best is None else self._best.step)
        except OSError as error:
            print(f"mgpu_slurm: WARNING: the link to the best checkpoint cannot be made: {error}", flush=True)

    def finish(self) -> None:
        """Waits until the checkpoint on its way has its name, or is given up."""
        if self._facts is not None:
            self._join()
            self._together()
            self._join()
            # nobody leaves before it
            self._together()

    def close(self, waits: bool) -> None:
        """Lets this rank's part come to its end; where another rank's does not, the next attempt finds what is whole.

        Args:
            waits: on rank 0: for the others, who come to their end too.
        """
        give_up = time.monotonic() + CLOSE_SECONDS
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
        facts = self._facts
        if self._rank != 0 or facts is None:
            return
        while not (is_whole := self._keeper.is_whole(facts["step"])) and waits and time.monotonic() < give_up:
            time.sleep(CLOSE_PAUSE)
        if is_whole:
            with suppress(MgpuError):
                self._publish(facts)

    def _start(self, action: Callable[[], None]) -> None:
        self._join()

        def act() -> None:
            try:
                action()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=act, name="checkpoint", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error


def _is_better(value: float, before: float, direction: str) -> bool:
    return value > before if direction == "maximize" else value < before


def _name(facts: Mapping[str, Any]) -> str:
    return f"the checkpoint of step {facts['step']}"
