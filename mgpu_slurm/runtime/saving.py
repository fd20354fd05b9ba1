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
from dataclasses import dataclass
from typing import Any

from mgpu_slurm.errors import MgpuError, UserError, nearest
from mgpu_slurm.runtime.agreement import Agreed
from mgpu_slurm.runtime.keeping import Keeper

CLOSE_SECONDS = 60.0
"""For which a rank whose job has failed still writes: its checkpoint is whole if all of them come to their end."""

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
        if self.every_steps is not None and self.every_steps < 1:
            raise UserError(f"run.checkpoints(every_steps={self.every_steps}): expected at least 1, or None")
        if self.every_minutes is not None and not self.every_minutes > 0:
            raise UserError(f"run.checkpoints(every_minutes={self.every_minutes}): expected more than 0, or None")
        if self.keep < 1:
            raise UserError(f"run.checkpoints(keep={self.keep}): expected at least 1")
        if self.direction not in (DIRECTIONS if self.best is not None else (None, *DIRECTIONS)):
            raise UserError(
                f"run.checkpoints(best={self.best!r}, direction={self.direction!r}): expected direction"
                f" {' or '.join(map(repr, DIRECTIONS))}: which values are better"
            )


class Saver:
    """One rank's saves, one at a time."""

    def __init__(self, keeper: Keeper, rank: int, together: Callable[[], Agreed]) -> None:
        """
        Args:
            together: has all ranks meet, and `heard` called with what they agree.
        """
        self.plan = Plan()
        self.best: dict[str, Any] | None = None
        """On rank 0, of the best checkpoint that has its name: its `value` and its `step`."""
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
        self._best: dict[str, Any] | None = None
        """What the best is once the save on its way has its name."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._has_missed_best = False

    # -- when

    def restored(self, facts: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self._last_step, self._begun_at = facts["step"], time.monotonic()
        self.best = facts["best"]

    def is_due_at(self, step: int) -> bool:
        """Whether a checkpoint of this step is wanted; the same on all ranks."""
        every = self.plan.every_steps
        return every is not None and step % every == 0 and step != self._last_step

    def is_due_now(self) -> bool:
        """Whether this rank wishes one at the next boundary, for the time that has gone since the last."""
        if self._rank != 0 or self.plan.every_minutes is None or self._facts is not None:
            return False
        return time.monotonic() >= self._begun_at + 60 * self.plan.every_minutes

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """On rank 0: whether no checkpoint is as good as these metrics."""
        if self.plan.best is None:
            return False
        value = metrics.get(self.plan.best)
        if value is None:
            self._miss_best(list(metrics))
            return False
        if math.isnan(value) or self.best is None:
            return not math.isnan(value)
        before: float = self.best["value"]
        return value > before if self.plan.direction == "maximize" else value < before

    def _miss_best(self, names: list[str]) -> None:
        if not self._has_missed_best:
            self._has_missed_best = True
            print(
                f"mgpu_slurm: WARNING: run.checkpoints(best={self.plan.best!r}): a report has no such metric"
                f"{nearest(str(self.plan.best), names)}; checkpoints of reports that lack it are never the best",
                flush=True,
            )

    # -- saving; every rank makes these calls, in step

    def save(self, facts: Mapping[str, Any], own: Mapping[str, Any], is_reported: bool) -> None:
        """Begins a checkpoint, unless that of the same place is on its way already.

        Args:
            facts: where the run stands, the same on all ranks.
            own: what this rank keeps for itself.
            is_reported: whether the last metrics are those of the weights as they are.

        Raises:
            UserError: something cannot be kept.
        """
        if facts == self._facts:
            return
        self.finish()
        # the one before may be about to get its name, and to be the best
        self._join()
        self._best = self.best
        if is_reported and self.is_best(facts["metrics"]):
            self._best = {"value": facts["metrics"][self.plan.best], "step": facts["step"]}
        self._keeper.copy({**facts, "best": self._best}, own)
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
            if is_lost and self.lost != self._begun:
                print(f"mgpu_slurm: WARNING: not all ranks could write {_name(facts)}: their logs say why", flush=True)
            self._start(lambda: self._keeper.discard(facts["step"]) if is_lost else self._publish(facts))

    def _publish(self, facts: Mapping[str, Any]) -> None:
        try:
            self._keeper.publish(facts["step"], self.plan.keep, None if self._best is None else self._best["step"])
            self.best = self._best
        except OSError as error:
            print(f"mgpu_slurm: WARNING: {_name(facts)} cannot get its name: {error}", flush=True)

    def finish(self) -> None:
        """Waits until the checkpoint on its way has its name, or is given up."""
        if self._facts is not None:
            self._join()
            self._together()
            self._join()
            # nobody leaves before it
            self._together()

    def close(self) -> None:
        """Lets this rank's part come to its end; where another rank's has not, the next attempt finds what is whole."""
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
        facts = self._facts
        if self._rank == 0 and facts is not None and self._keeper.is_whole(facts["step"]):
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


def _name(facts: Mapping[str, Any]) -> str:
    return f"the checkpoint of step {facts['step']}"
