"""Save and stop a run: at the same place on all ranks, from which it can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch

from mgpu_slurm.checkpoints.rank_record import ProgressRecord
from mgpu_slurm.checkpoints.saver import Saver
from mgpu_slurm.checkpoints.state.train_state import Keeper, Restored
from mgpu_slurm.core import log_lines
from mgpu_slurm.core.errors import RunStopped, SweepError, TrialPaused, UserError
from mgpu_slurm.data import randomness
from mgpu_slurm.data.loader_positions import LoaderPlace
from mgpu_slurm.data.loaders import Loader
from mgpu_slurm.data.streams import Drawn
from mgpu_slurm.rank.communication.codec import StateDict
from mgpu_slurm.rank.communication.collectives import Collectives
from mgpu_slurm.rank.communication.step_sync import Agreed, Call
from mgpu_slurm.rank.signals import Stop, StopFlag
from mgpu_slurm.request.parallelism import Layout
from mgpu_slurm.request.spec import REQUEUE_EXIT_CODE, TERMINATED_EXIT_CODE
from mgpu_slurm.training.memory.found_size import FoundSize
from mgpu_slurm.training.parallel.gradient_check import GradientCheck
from mgpu_slurm.training.parallel.precision import LossScaler
from mgpu_slurm.training.progress import Meter, Overdue, Position, RankState


class LoopControl:
    """One rank's part in saving and stopping.

    It collects requests, agrees on them with the other ranks, and acts at the next boundary: a batch of the restored
    loader, or the end of an epoch."""

    def __init__(
        self,
        position: Position,
        device: torch.device,
        rank: int,
        layout: Layout,
        collectives: Collectives,
        keeper: Keeper,
        found_size: FoundSize,
        stop: StopFlag,
        alive: Callable[[], None],
    ) -> None:
        self._position = position
        self._device = device
        self._found_size = found_size
        self._collectives = collectives
        self._alive = alive
        self._agreed = Agreed()
        self._pauses = False
        """Whether the trial of a sweep pauses at the next boundary; the same on all ranks."""
        self._pause_has_failed = False
        """Whether it could not, because no checkpoint could be written; the same on all ranks."""
        self._evaluates, self._has_evaluated = True, False
        """Whether an evaluation may follow this pass, which is unknown in the first one; and whether there was any."""
        self._last_place: int | None = None
        self._place: int | None = None
        """The last batch at which the run could stop: of the previous pass, None if unknown; and of this pass so
        far."""
        self._epoch_of_pass: int | None = None
        """The epoch of `state.epochs` in which the restored loader has yielded batches of this pass."""
        self.stop = stop
        self.saver = Saver(keeper, rank, collectives.save_barrier(), self.any_rank, alive)
        self.keeps = False
        """Whether there is anything to save, so that the run can be resumed."""
        self.save_wanted = False
        self.has_gradients = False
        """Whether it is in the middle of a step."""
        self._random_rank, self._grid = layout.random_rank(rank), layout.grid
        self.seed = 0
        """Seed of the order of samples; the same on all ranks."""
        self._restore_random: Callable[[], None] = _nothing
        """Restores the random state at the place where it was saved, so that what user code draws earlier has no
        effect."""
        self.meters: dict[str, Meter] = {}
        self.scaler: LossScaler | None = None
        """Scales the loss, for gradients in float16; None in any other precision."""
        self.drawn = Drawn()
        self.gradient_check = GradientCheck(layout)
        self._overdue = Overdue()

    def resume_from(self, restored: Restored) -> None:
        """Continue from a checkpoint."""
        self._position.resume_from(restored.progress)
        self.saver.restored(restored)
        owns = [RankState.from_state_dict(own) for own in restored.owns]
        first = RankState.from_state_dict(restored.first)
        if first.grid != self._grid:
            # ranks that computed a layer together, or do so now, have to draw the same
            seed = randomness.mixed(self.seed, restored.progress.step, self._random_rank)
            self._restore_random = partial(randomness.seed, seed)
        elif owns:
            # a rank that did not exist keeps its seed
            self._restore_random = partial(randomness.set_random_state, owns[0].random, self._device)
        if self.scaler is not None and first.scaler is not None:
            self.scaler.load_state_dict(first.scaler)
        if first.memory is not None:
            self._found_size.load_state_dict(first.memory)
        for name, meter in self.meters.items():
            meter.resume_from(own.meters[name] for own in owns if name in own.meters)

    # -- agreement; every rank makes these calls

    def sync(self, call: Call) -> None:
        """Wait until all ranks make this call, and collect their requests."""
        self._exchange(call)

    def gather(self, call: Call, numbers: list[float]) -> list[tuple[float, ...]]:
        """Wait until all ranks make this call, and return the numbers of each rank."""
        return [*zip(*self._exchange(call, numbers=numbers)[1], strict=True)]

    def any_rank(self, is_so: bool, call: Call = Call.SAVE) -> bool:
        """Return whether `is_so` is true on any rank."""
        return self._exchange(call, failed=is_so)[0].failed

    def is_same_everywhere(self, number: int) -> bool:
        """Return whether a 32-bit number is the same on all ranks."""
        total, ranks = self._exchange_sums(Call.PASS, [float(number), 1.0])
        return total == number * ranks

    def _exchange(
        self, call: Call, failed: bool = False, numbers: Sequence[float] = ()
    ) -> tuple[Agreed, Sequence[Sequence[float]]]:
        """Return what all ranks agreed, and each of the numbers from all of them."""
        request = replace(self._request(), failed=failed)
        values = [float(self.drawn.digest), self.gradient_check.digest, *numbers]
        agreed, (drawn, gradients, *columns) = self._collectives.with_values(call, request, values)
        self._remember(agreed)
        self._alive()
        self.drawn.check(drawn)
        self.gradient_check.check(gradients)
        return agreed, columns

    def _exchange_sums(self, call: Call, values: list[float]) -> list[float]:
        agreed, sums = self._collectives.with_sums(call, self._request(), values)
        self._remember(agreed)
        self._alive()
        return sums

    def _request(self) -> Agreed:
        save = self.keeps and not self._agreed.save and (self.save_wanted or self.saver.is_due_now())
        return Agreed(self.stop.due, save)

    def _remember(self, agreed: Agreed) -> None:
        self._agreed = Agreed(max(self._agreed.stop, agreed.stop), self._agreed.save or agreed.save)
        if agreed.save:
            # do not request again what has been agreed
            self.save_wanted = False

    # -- the boundaries

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the remaining epochs, from 1, and write a checkpoint at the end of each."""
        position = self._position
        position.begin_epochs(total)
        if not position.continues_in_pass:
            self._resume_random()
        try:
            for epoch in range(position.next_epoch, total + 1):
                position.epoch = epoch
                yield epoch
                position.epoch = None
                position.next_epoch = epoch + 1
                self.sync(Call.EPOCH)
                self._act(in_pass=False, save=True, wait=epoch == total)
        finally:
            # even if the job has left the loop
            position.last_epoch = 0

    def before_batch(self, loader: Loader, place: LoaderPlace) -> None:
        """Agree on requests before a batch of any loader, and act on them if this is a boundary.

        Args:
            place: place of the pass; not that of the loader if the pass does not change it.
        """
        is_restored = loader is self._position.loader and place is loader.place
        self._position.loaders.note_batch(place)
        if is_restored:
            self._check_epoch(is_first=place.batches == 1)
            if self._position.continues_in_pass:
                self._position.continues_in_pass = False
                self._position.loaders.warn_of_missing()
            self._resume_random()
            if loader.batch == 0:
                self._begin_pass()
        else:
            self._has_evaluated = True
        self._remember(self._collectives.step(self._request()))
        self.saver.check()
        self._alive()
        # a run cannot stop at a loader whose position is not saved, or in the middle of an accumulated step, unless
        # nothing is saved anyway
        if (is_restored and not self.has_gradients) or not self.keeps:
            self.saver.release()
            self._act(in_pass=True, save=self.saver.is_due_at(self._position.step))
            if is_restored and self.keeps:
                self._hold_at_last(loader)
        else:
            if is_restored:
                # a step that was not counted, or the middle of one
                self._overdue.stepped(self._is_wanted(), self._why_no_boundary)
            self._leave_evaluation()

    def _check_epoch(self, is_first: bool) -> None:
        """Raise an error for a pass that spans epochs: its position is not saved at the end of an epoch."""
        began, now = self._epoch_of_pass if not is_first else None, self._position.epoch
        if began is not None and now not in (None, began):
            raise UserError(
                f"run.loader: a loop over {self._position.loader_name!r} lasted from epoch {began} to epoch {now},"
                " where a restarted run could not continue it: start a loop over it in each epoch, or do not pass it to"
                " run.restore (the run then stops between epochs only)"
            )
        self._epoch_of_pass = now

    def step_done(self) -> None:
        """Record an optimizer step."""
        self.has_gradients = False
        # a job that trains is not just looking at batches
        self._position.awaits_epochs = False
        self._overdue.stepped(self._is_wanted(), self._why_no_boundary)

    def finish(self) -> None:
        """Wait until every rank's job function has returned, and write a checkpoint that is still requested."""
        self.sync(Call.FINISH)
        if self.keeps and (self._agreed.save or self.saver.is_due_at(self._position.step)):
            self._position.leave_loop()
            self.saver.save(*self._moment(in_pass=False))
            self._agreed = replace(self._agreed, save=False)
        self.saver.finish()

    def warn_of_lost_save(self) -> None:
        """Warn if a checkpoint was requested that can no longer be written."""
        if self.keeps and (self.save_wanted or self._agreed.save or self.saver.is_due_at(self._position.step)):
            log_lines.warn(
                "a requested checkpoint has not been written: call run.finish() at the end of the script, on all ranks"
            )

    def _is_wanted(self) -> bool:
        """Return whether a save or a stop is requested at the next boundary."""
        if self.save_wanted or self._agreed.save or self._pauses or self.saver.is_due_at(self._position.step):
            return True
        return self.keeps and (self.stop.due is not Stop.NO or self.saver.is_due_now())

    def _why_no_boundary(self) -> str:
        if not self.keeps:
            return "run.restore has not been called, so there is nothing to save"
        if self.has_gradients:
            return (
                "each batch comes between run.backward and the optimizer step (only steps by run.update or a torch"
                " optimizer count)"
            )
        return (
            "the loop is not over a run.loader that was passed to run.restore, nor has an epoch of state.epochs ended"
        )

    def pause(self) -> None:
        """Pause the trial of a sweep at the next boundary. Every rank must call it.

        Raises:
            SweepError: the job could not continue after a pause.
        """
        if not self.keeps:
            raise SweepError(
                "the job does not call run.restore, so that a paused trial could not continue: call it, or start a"
                " study with a pruner that needs no checkpoints (none; without `seeds` also asha with `pause: false`)"
            )
        self._pauses = True

    def reported(self) -> None:
        """Act after a report: the only boundary in many custom loops that save nothing."""
        if not self.keeps:
            self._act(in_pass=False)

    def _resume_random(self) -> None:
        self._restore_random()
        self._restore_random = _nothing

    # -- evaluation

    def begin_evaluation(self) -> None:
        """Record that an evaluation begins. Every rank must call it."""
        self._has_evaluated = True
        self.sync(Call.SHARD)
        self._leave_evaluation()

    def mean(self, total: float, count: float) -> float:
        """Return the sum of `total` over the ranks divided by the sum of `count`. Every rank must call it."""
        total, count = self._exchange_sums(Call.MEAN, [total, count])
        self._leave_evaluation()
        return total / count if count else float("nan")

    def _hold_at_last(self, loader: Loader) -> None:
        """Copy the state at the last batch: an evaluation may follow, in which the run cannot be saved."""
        self._place = loader.batch
        last = loader.last_place if self._last_place is None else self._last_place
        if not self._evaluates or loader.batch != last:
            return
        progress, own = self._moment(in_pass=True)
        # do not wait for another checkpoint that is still being written; all ranks decide the same
        if not self.any_rank(self.saver.is_writing_other(progress)):
            self.saver.hold(progress, own)

    def _begin_pass(self) -> None:
        if self._place is not None:
            # judged by the previous pass, which may have been left early, or in the middle of a step
            self._evaluates, self._last_place = self._has_evaluated, self._place

    def _leave_evaluation(self) -> None:
        """If a stop was agreed, save the state copied in the previous pass, and leave. Later work is repeated."""
        if self._agreed.stop is not Stop.NO and self.saver.save_held(self._position.step):
            self.stop.is_at_boundary = True
            self.saver.finish()
            self._leave()

    # -- what was agreed

    def _act(self, in_pass: bool, save: bool = False, wait: bool = False) -> None:
        """Save and stop as agreed, at the same place on all ranks.

        Args:
            in_pass: whether this is in a pass over a loader.
            save: whether a checkpoint is due here anyway.
            wait: wait until it is written.
        """
        self.stop.is_at_boundary = self._agreed.stop is not Stop.NO
        self._overdue.at_boundary()
        # where a pause has failed for want of a checkpoint, it waits for one that is written anyway
        pauses = self._pauses and not self._pause_has_failed
        saves = self.keeps and (save or self._agreed.save or pauses or self._agreed.stop is not Stop.NO)
        if saves:
            self.saver.save(*self._moment(in_pass))
        # checked again: a stop may have been agreed while waiting for the previous checkpoint
        if wait or self._agreed.stop is not Stop.NO or (saves and self._pauses):
            self.saver.finish()
        self._agreed = replace(self._agreed, save=False)
        self._leave()

    def _moment(self, in_pass: bool) -> tuple[ProgressRecord, StateDict]:
        """Return the progress of the run, and this rank's own state."""
        meters = {name: meter.state() for name, meter in self.meters.items()}
        scaler = None if self.scaler is None else self.scaler.state_dict()
        memory = self._found_size.state_dict()
        own = RankState(randomness.random_state(self._device), meters, scaler, memory, self._grid)
        return self._position.record(in_pass), own.state_dict()

    def _leave(self) -> None:
        """Stop the run if that was agreed."""
        step = self._position.step
        # a run that saves nothing would start from scratch, again and again
        if self._agreed.stop is Stop.LEAVE or (self._agreed.stop is Stop.REQUEUE and self.keeps):
            self.stop.will_restart = True
            _stop(REQUEUE_EXIT_CODE, f"the time limit is near: stopped at step {step}")
        if self._agreed.stop is Stop.END:
            _stop(TERMINATED_EXIT_CODE, f"stopped at step {step}, asked to end")
        if self._pauses:
            self._pause(step)

    def _pause(self, step: int) -> None:
        """Pause here, if the checkpoint of this step has been written: else what was trained would be lost."""
        if not self.saver.has_kept(step):
            self._pause_has_failed = True
            return
        self.stop.will_restart = True
        reason = f"paused at step {step}"
        log_lines.say(reason)
        raise TrialPaused(REQUEUE_EXIT_CODE, reason)


def _nothing() -> None:
    """Do nothing."""


def _stop(exit_code: int, reason: str) -> NoReturn:
    log_lines.say(reason)
    raise RunStopped(exit_code, reason)
