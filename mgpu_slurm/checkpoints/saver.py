"""Asynchronous saving of checkpoints: training waits only for a copy in main memory.

All ranks begin a save at the same boundary. Each copies its state, and a thread writes the copy while training
continues. Once all ranks have written, the thread of rank 0 gives the checkpoint its name. If a rank cannot write, only
that checkpoint is lost.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping

from mgpu_slurm.checkpoints.policy import BestReports, Plan
from mgpu_slurm.checkpoints.rank_record import ProgressRecord
from mgpu_slurm.checkpoints.state.train_state import Keeper, Restored
from mgpu_slurm.core import log_lines
from mgpu_slurm.rank.communication.codec import StateDict
from mgpu_slurm.rank.communication.collectives import SaveBarrier
from mgpu_slurm.run_folder.records import now
from mgpu_slurm.run_folder.usage_records import SaveRecord

CLOSE_SECONDS = 60.0
"""Seconds for which a rank that exits continues to write; the checkpoint is complete if all ranks finish in time."""

HOLD_SECONDS = 1.0
"""Seconds for which a copy before an evaluation waits for a checkpoint that is being written."""

LOOK_PAUSE = 0.02
"""Seconds between two checks whether all ranks have written."""


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
            alive: called now and then during the wait for this rank's part of a checkpoint, if that makes progress.
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
        self._newest: ProgressRecord | None = None
        """Progress at the newest save, until it was waited for; the same on all ranks."""
        self._held: ProgressRecord | None = None
        """Progress before an evaluation, while that runs; the same on all ranks."""
        self._kept_step: int | None = None
        """Step of the newest checkpoint, unless that was lost; the same on all ranks."""
        self._has_lost = False
        """Whether this rank could not write its part of the newest save, or rank 0 could not publish it."""
        self._times = SaveRecord()
        """Those of the newest save."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._give_up_at = math.inf

    # -- when

    def restored(self, restored: Restored) -> None:
        """Continue from a checkpoint."""
        self._last_step = self._kept_step = restored.progress.step
        self._begun_at = time.monotonic()
        best = restored.best
        # the best may have been deleted for a better one that has been set aside since
        self._best.restored(best if best is not None and self._keeper.has(best.key) else None)

    def is_due_at(self, step: int) -> bool:
        """Return whether a checkpoint of this step is wanted; the same on all ranks."""
        every = self.plan.every_steps
        # there may be no boundary at exactly that step
        return every is not None and step // every > self._last_step // every

    def is_due_now(self) -> bool:
        """Return whether this rank requests a save at the next boundary, given the time since the last one."""
        if self._rank != 0 or self.plan.every_minutes is None or self._is_writing:
            return False
        return time.monotonic() >= self._begun_at + 60 * self.plan.every_minutes

    def hear_report(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Note a report; return whether a checkpoint of its step would be the best one and is wanted; on rank 0."""
        return self._best.hear(self.plan, step, metrics)

    # -- saving; all ranks make these calls, in the same order

    def save(self, progress: ProgressRecord, own: StateDict) -> None:
        """Begin a checkpoint, unless one of the same place is already being written.

        Args:
            progress: progress of the run, the same on all ranks.
            own: state of this rank.

        Raises:
            UserError: some state cannot be saved.
        """
        if progress == self._newest:
            return
        begun, began = now(), time.monotonic()
        self.finish()
        # all ranks arrive here before they compare their states
        self._any_rank(False)
        self._held = None
        self._keeper.copy(progress, self._best.begin(self.plan, progress.step), own)
        self._begin(progress, begun, time.monotonic() - began)

    def hold(self, progress: ProgressRecord, own: StateDict) -> None:
        """Copy the state of this place for `save_held`, unless a checkpoint of it is already being written.

        Args:
            progress: see `save`.
            own: see `save`.
        """
        if progress != self._newest:
            self.finish()
            self._keeper.copy(progress, self._best.begin(self.plan, step=-1), own)
        self._held = progress

    def is_writing_other(self, progress: ProgressRecord) -> bool:
        """Return whether a checkpoint of another place is still being written: this rank's part, on rank 0 any part."""
        if self._thread is None or progress == self._newest:
            return False
        self._thread.join(HOLD_SECONDS)
        return self._thread.is_alive()

    def release(self) -> None:
        """Drop the held state, because training continues."""
        self._held = None

    def save_held(self, step: int) -> bool:
        """Begin a checkpoint of the held state.

        Returns:
            whether the run can exit: a state is held, or no training happened since the last checkpoint.
        """
        if self._held is None:
            self.finish()
            return self.has_kept(step)
        if self._held != self._newest:
            self._begin(self._held, now())
        return True

    def has_kept(self, step: int) -> bool:
        """Return whether the newest checkpoint is of this step, and has not been lost; call `finish` before."""
        return step == self._kept_step

    # -- in the background

    def _begin(self, progress: ProgressRecord, begun: str, stood: float = 0.0) -> None:
        """Write what was copied, in the background.

        Args:
            begun: when the training stopped for it.
            stood: seconds for which it stood.
        """
        self._begun += 1
        self._times = SaveRecord(step=progress.step, begun=begun, stood=round(stood, 4))
        self._has_lost = False
        self._kept_step = progress.step
        self._begun_at, self._last_step, self._newest = time.monotonic(), progress.step, progress
        self._thread = threading.Thread(target=self._write_and_name, name="checkpoint", daemon=True)
        self._thread.start()

    def _write_and_name(self) -> None:
        assert self._newest is not None
        progress, number = self._newest, self._begun
        try:
            self._has_lost = not self._write(progress)
            self._save_barrier.done(number, self._has_lost)
            if self._rank == 0:
                self._end(progress, number)
        except BaseException as error:
            self._error = error

    def _write(self, progress: ProgressRecord) -> bool:
        try:
            self._keeper.write(progress.step)
        except OSError as error:
            log_lines.warn(
                f"rank {self._rank} could not write {_name(progress)}: {error};"
                " training continues, the previous checkpoint stays"
            )
            return False
        return True

    def _end(self, progress: ProgressRecord, number: int) -> None:
        """Wait until all ranks are done with a save, then publish or discard it; on rank 0."""
        while not self._save_barrier.is_over(number):
            if time.monotonic() >= self._give_up_at:
                # if it still becomes complete, the next attempt publishes it
                return
            time.sleep(LOOK_PAUSE)
        is_lost = self._save_barrier.is_lost(number)
        self._save_barrier.forget(number)
        if is_lost:
            if not self._has_lost:
                log_lines.warn(f"not all ranks could write {_name(progress)}: see their logs")
            self._best.lost()
            self._keeper.discard(progress.step)
        else:
            self._publish(progress)

    def _publish(self, progress: ProgressRecord) -> None:
        try:
            key = self._keeper.publish(progress.step)
        except OSError as error:
            log_lines.warn(f"cannot publish {_name(progress)}: {error}")
            self._has_lost = True
            self._best.lost()
            return
        self._keeper.note_save(self._times)
        best = self._best.published(key)
        try:
            self._keeper.tidy(self.plan.keep, best)
        except OSError as error:
            log_lines.warn(f"cannot update the link to the best checkpoint: {error}")

    def finish(self) -> None:
        """Wait until the checkpoint in progress is published or abandoned."""
        if self._newest is not None:
            assert self._thread is not None
            self._keeper.wait_for_write(self._alive)
            # the other ranks report their own progress
            self._thread.join()
            self.check()
            # no rank continues before this
            if self._any_rank(self._has_lost):
                self._kept_step = None
            self._newest = None

    def check(self) -> None:
        """Raise the error of the background thread, if it failed.

        Raises:
            MgpuError: a later attempt has replaced this one.
            Exception: any other error of the thread.
        """
        if self._error is not None:
            raise self._error

    def close(self, waits: bool) -> None:
        """Finish this rank's part; if another rank does not finish, the next attempt finds the complete checkpoints.

        Args:
            waits: on rank 0: whether to wait for the other ranks, which are finishing too.
        """
        self._give_up_at = time.monotonic() + (CLOSE_SECONDS if waits else 0)
        self.await_write()

    def await_write(self) -> None:
        """Wait for this rank's part of a checkpoint in progress, for at most `CLOSE_SECONDS`."""
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    @property
    def _is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()


def _name(progress: ProgressRecord) -> str:
    return f"the checkpoint of step {progress.step}"
