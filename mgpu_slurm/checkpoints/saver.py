"""When checkpoints are written, and how: beside the training, which waits for a copy in main memory only.

All ranks begin a save at the same boundary. Each copies what it keeps, and a thread writes that while the training goes
on; once all have written, that of rank 0 gives the checkpoint its name. What a rank cannot write costs that checkpoint
and no more.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from mgpu_slurm.checkpoints.policy import BestReports, Plan, best_in
from mgpu_slurm.checkpoints.train_state import Keeper
from mgpu_slurm.core.checkpoint_names import Key
from mgpu_slurm.rank.save_barrier import SaveBarrier

CLOSE_SECONDS = 60.0
"""For which a rank that ends still writes: its checkpoint is whole if all of them come to their end."""

HOLD_SECONDS = 1.0
"""For which a copy before an evaluation waits for a checkpoint that is being written."""

LOOK_PAUSE = 0.02
"""Seconds between two looks whether all have written."""


class Saver:
    """One rank's saves, one at a time."""

    def __init__(
        self,
        keeper: Keeper,
        rank: int,
        save_barrier: SaveBarrier,
        any_rank: Callable[[bool], bool],
        alive: Callable[[], None],
    ) -> None:
        """
        Args:
            any_rank: returns on every rank whether something is true of any rank, given whether it is true of this one.
            alive: is called now and then while this rank's part of a checkpoint is waited for, as long as it comes on.
        """
        self.plan = Plan()
        self._best = BestReports()
        self._keeper = keeper
        self._rank = rank
        self._save_barrier = save_barrier
        self._any_rank = any_rank
        self._alive = alive
        self._begun = 0
        self._begun_at = time.monotonic()
        self._last_step = 0
        self._facts: Mapping[str, Any] | None = None
        """Of the save that was begun last, until it was waited for; the same on all ranks."""
        self._held: Mapping[str, Any] | None = None
        """Of the place before an evaluation, while that goes on; the same on all ranks."""
        self._kept_step: int | None = None
        """Of the newest checkpoint, unless that was lost; the same on all ranks."""
        self._has_lost = False
        """Its part of the save that was begun last."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._give_up_at = math.inf

    # -- when

    def restored(self, facts: Mapping[str, Any], key: Key) -> None:
        """Continue from a checkpoint."""
        self._last_step = self._kept_step = facts["step"]
        self._begun_at = time.monotonic()
        best = best_in(facts, key)
        # it was deleted for one that is better, and that has been set aside since
        self._best.restored(best if best is not None and self._keeper.has(best.key) else None)

    def is_due_at(self, step: int) -> bool:
        """Whether a checkpoint of this step is wanted; the same on all ranks."""
        every = self.plan.every_steps
        # there may be no boundary at the very step
        return every is not None and step // every > self._last_step // every

    def is_due_now(self) -> bool:
        """Whether this rank wishes one at the next boundary, for the time that has gone since the last."""
        if self._rank != 0 or self.plan.every_minutes is None or self._is_writing:
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
        # all come here before they compare what they hold
        self._any_rank(False)
        self._held = None
        self._keeper.copy({**facts, **self._best.begin(self.plan, facts["step"])}, own)
        self._begin(facts)

    def hold(self, facts: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Copies what a checkpoint of this place would hold, for `save_held`, unless there is one on its way.

        Args:
            facts: see `save`.
            own: see `save`.
        """
        if facts != self._facts:
            self.finish()
            self._keeper.copy({**facts, **self._best.begin(self.plan, step=-1)}, own)
        self._held = facts

    def is_writing_other(self, facts: Mapping[str, Any]) -> bool:
        """Whether this rank's part of a checkpoint of another place is still being written, or on rank 0 anybody's."""
        if self._thread is None or facts == self._facts:
            return False
        self._thread.join(HOLD_SECONDS)
        return self._thread.is_alive()

    def release(self) -> None:
        """What was held is of no use any more: the training goes on."""
        self._held = None

    def save_held(self, step: int) -> bool:
        """Begins a checkpoint of the place that is held.

        Returns:
            whether the run can be left: a place is held, or nothing was trained since the last checkpoint.
        """
        if self._held is None:
            self.finish()
            return step == self._kept_step
        if self._held != self._facts:
            self._begin(self._held)
        return True

    # -- beside the training

    def _begin(self, facts: Mapping[str, Any]) -> None:
        self._begun += 1
        self._has_lost = False
        self._kept_step = facts["step"]
        self._begun_at, self._last_step, self._facts = time.monotonic(), facts["step"], facts
        self._thread = threading.Thread(target=self._write_and_name, name="checkpoint", daemon=True)
        self._thread.start()

    def _write_and_name(self) -> None:
        assert self._facts is not None
        facts, number = self._facts, self._begun
        try:
            self._has_lost = not self._write(facts)
            self._save_barrier.done(number, self._has_lost)
            if self._rank == 0:
                self._end(facts, number)
        except BaseException as error:
            self._error = error

    def _write(self, facts: Mapping[str, Any]) -> bool:
        try:
            self._keeper.write(facts["step"])
        except OSError as error:
            print(
                f"mgpu_slurm: WARNING: rank {self._rank} could not write {_name(facts)}: {error};"
                " training goes on, the checkpoint before it stays",
                flush=True,
            )
            return False
        return True

    def _end(self, facts: Mapping[str, Any], number: int) -> None:
        """On rank 0, once all ranks are done with it."""
        while not self._save_barrier.is_over(number):
            if time.monotonic() >= self._give_up_at:
                # if it becomes whole all the same, the next attempt gives it its name
                return
            time.sleep(LOOK_PAUSE)
        is_lost = self._save_barrier.is_lost(number)
        self._save_barrier.forget(number)
        if is_lost:
            if not self._has_lost:
                print(f"mgpu_slurm: WARNING: not all ranks could write {_name(facts)}: their logs say why", flush=True)
            self._best.lost()
            self._keeper.discard(facts["step"])
        else:
            self._publish(facts)

    def _publish(self, facts: Mapping[str, Any]) -> None:
        try:
            key = self._keeper.publish(facts["step"])
        except OSError as error:
            print(f"mgpu_slurm: WARNING: {_name(facts)} cannot get its name: {error}", flush=True)
            return
        best = self._best.published(key)
        try:
            self._keeper.tidy(self.plan.keep, best)
        except OSError as error:
            print(f"mgpu_slurm: WARNING: the link to the best checkpoint cannot be made: {error}", flush=True)

    def finish(self) -> None:
        """Waits until the checkpoint on its way has its name, or is given up."""
        if self._facts is not None:
            assert self._thread is not None
            self._keeper.wait_for_write(self._alive)
            # what others take is for them to say
            self._thread.join()
            self.check()
            # nobody goes on before it
            if self._any_rank(self._has_lost):
                self._kept_step = None
            self._facts = None

    def check(self) -> None:
        """
        Raises:
            MgpuError: the run goes on elsewhere.
            Exception: whatever else went wrong beside the training.
        """
        if self._error is not None:
            raise self._error

    def close(self, waits: bool) -> None:
        """Lets this rank's part come to its end; where another rank's does not, the next attempt finds what is whole.

        Args:
            waits: on rank 0: for the others, who come to their end too.
        """
        self._give_up_at = time.monotonic() + (CLOSE_SECONDS if waits else 0)
        self.await_write()

    def await_write(self) -> None:
        """Wait for this rank's part of a checkpoint that is on its way, for `CLOSE_SECONDS` at most."""
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    @property
    def _is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()


def _name(facts: Mapping[str, Any]) -> str:
    return f"the checkpoint of step {facts['step']}"
