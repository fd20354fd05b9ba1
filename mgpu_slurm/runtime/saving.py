"""When checkpoints are written, and how: beside the training, which waits for a copy in main memory only.

All ranks begin a save at the same boundary. Each copies what it keeps, and a thread writes that while the training goes
on. In the messages of the next boundaries ranks tell each other how far they are; once all have written, rank 0 gives
the checkpoint its name. What a rank cannot write costs that checkpoint and no more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from mgpu_slurm.errors import MgpuError
from mgpu_slurm.runtime.agreement import Agreed
from mgpu_slurm.runtime.keeping import Keeper
from mgpu_slurm.runtime.plan import BestReports, Plan

CLOSE_SECONDS = 60.0
"""For which a rank that ends still writes: its checkpoint is whole if all of them come to their end."""

WAITING_SECONDS = 1.0
"""Between two signs of life of a rank that waits for its own checkpoint."""

CLOSE_PAUSE = 0.05
"""Seconds between two looks whether the others have."""


class Saver:
    """One rank's saves, one at a time."""

    def __init__(self, keeper: Keeper, rank: int, together: Callable[[], Agreed], alive: Callable[[], None]) -> None:
        """
        Args:
            together: has all ranks meet, and `heard` called with what they agree.
            alive: is called now and then while a checkpoint is waited for.
        """
        self.plan = Plan()
        self._best = BestReports()
        self.written = 0
        """The number of the last save that this rank is done with."""
        self.lost = 0
        """The number of the last save that this rank could not write."""
        self._keeper = keeper
        self._rank = rank
        self._together = together
        self._alive = alive
        self._begun = 0
        self._begun_at = time.monotonic()
        self._last_step = 0
        self._facts: Mapping[str, Any] | None = None
        """Of the save on its way, until all ranks have heard of its end; the same on all of them."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    # -- when

    def restored(self, facts: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self._last_step, self._begun_at = facts["step"], time.monotonic()
        best = facts["best"]
        # it was deleted for one that is better, and that has been set aside since
        self._best.restored(best if best is not None and self._keeper.has(best["step"]) else None)

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
        return self._best.hear(self.plan, step, metrics)

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
        self._keeper.copy({**facts, "best": self._best.begin(self.plan, facts["step"])}, own)
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
                self._best.lost()
            if is_lost and self.lost != self._begun:
                print(f"mgpu_slurm: WARNING: not all ranks could write {_name(facts)}: their logs say why", flush=True)
            self._start(lambda: self._keeper.discard(facts["step"]) if is_lost else self._publish(facts))

    def _publish(self, facts: Mapping[str, Any]) -> None:
        try:
            self._keeper.publish(facts["step"])
        except OSError as error:
            print(f"mgpu_slurm: WARNING: {_name(facts)} cannot get its name: {error}", flush=True)
            return
        best = self._best.published()
        try:
            self._keeper.tidy(self.plan.keep, best)
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
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(WAITING_SECONDS)
            self._alive()
        if self._error is not None:
            raise self._error


def _name(facts: Mapping[str, Any]) -> str:
    return f"the checkpoint of step {facts['step']}"
