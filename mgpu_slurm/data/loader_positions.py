"""The positions of a run's loaders, so that a new attempt can continue all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mgpu_slurm.checkpoints.rank_record import LoaderRecord
from mgpu_slurm.core import log_lines


@dataclass
class LoaderPlace:
    """The position of a loader; the same on all ranks."""

    size: int
    """Samples in a pass."""
    batch_size: int
    passes: int = 0
    """Passes begun so far."""
    epoch: int = 0
    """The epoch of the pass, which decides its order."""
    batch: int = 0
    """The number of the batch that was handed out last."""
    is_in_pass: bool = False
    is_new: bool = False
    """The pass has not reached a batch yet."""
    is_over: bool = False
    """The last pass has ended, and none has begun since."""
    first_batch: int = 0
    """The batch at which the next pass starts; not 0 only once, after a restore in the middle of a pass."""
    next_epoch: int | None = None
    """The epoch of the next pass, if it continues one."""
    is_ahead: bool = False
    """The loop over it began before that over the loader that drives the loop: a resumed job fetches one batch again
    before it reaches the position it had."""
    is_outside: bool = False
    """This pass, or the first of a sequence of passes, began outside of `state.epochs`: a new attempt continues it
    there."""
    ended_in: int | None = None
    """The pass of the driving loader in which this loader's last pass ended; None if outside of any."""
    current: object = None
    """Identifies the pass that began last."""
    restored: tuple[int, int | None] | None = None
    """First batch and epoch of that pass, if it continues one."""
    batches: int = 0
    """Batches of that pass so far."""
    order: int | None = None
    """A digest of the order of the epoch's samples; None if it follows from seed and epoch, or if the pass has no batch
    yet."""
    begun_at: tuple[int, int | None] = (0, None)
    """The step and the epoch of the run when the pass began."""

    @property
    def signature(self) -> tuple[int, int]:
        return self.size, self.batch_size

    def begin_pass(self, epoch: int | None, step: int) -> int:
        """Begin a pass, or continue the one within which it was restored, and return the first batch.

        Args:
            epoch: None outside of `state.epochs`: each pass is an epoch there.
            step: step of the run.
        """
        was_looked_at = self.batches <= 1 and self.begun_at == (step, epoch)
        if self.restored is not None and was_looked_at:
            # the job only looked at one batch: this pass is the one that continues
            (self.first_batch, self.next_epoch), self.restored = self.restored, None
            self.passes -= 1
        elif self.first_batch or self.next_epoch is not None:
            self.restored = self.first_batch, self.next_epoch
        else:
            self.restored = None
        # this pass follows another one only if that has ended
        self.is_outside &= self.is_over
        self.batches, self.begun_at, self.current = 0, (step, epoch), object()
        self.passes += 1
        self.epoch = self.next_epoch or epoch or self.passes
        if not self.first_batch:
            self.order = None
        self.batch, self.first_batch, self.next_epoch = self.first_batch, 0, None
        self.is_in_pass = self.is_new = True
        self.is_over = False
        return self.batch

    def come_to(self, batch: int) -> None:
        """Record that the pass reaches a batch."""
        self.batch = batch
        self.batches += 1

    def detached(self) -> LoaderPlace:
        """Return a place for a pass that does not change this one, and is not saved."""
        # in the same epoch: in the next one, a sampler may have another length
        return LoaderPlace(self.size, self.batch_size, self.passes - self.is_in_pass)

    @property
    def is_active(self) -> bool:
        """Whether there is a pass to continue: a current one, or one within which the loader was restored."""
        return self.is_in_pass or self.next_epoch is not None

    def record(self, in_pass: bool) -> LoaderRecord:
        """Return the position to store in a checkpoint.

        Args:
            in_pass: whether the checkpoint is at a batch of the loader that drives the loop; else it is at the end of
                an epoch, and nothing is fetched again.
        """
        if self.is_in_pass:
            is_fetched_again = self.is_ahead and (in_pass or self.is_outside)
            # a resumed run begins this pass again
            batch, passes = self.batch + (not is_fetched_again), self.passes - 1
        else:
            batch, passes = self.first_batch, self.passes
        return LoaderRecord(
            size=self.size,
            batch_size=self.batch_size,
            outside=self.is_outside,
            active=self.is_active,
            batch=batch,
            epoch=self.epoch if self.is_in_pass else self.next_epoch,
            passes=passes,
            order=self.order if batch else None,
        )

    def resume_from(self, record: LoaderRecord) -> None:
        """Continue from a saved position with the next pass."""
        self.first_batch, self.next_epoch, self.passes = record.batch, record.epoch, record.passes
        self.is_outside, self.is_over, self.restored = record.outside, False, None
        self.order = record.order

    def continue_in(self, order: int | None) -> bool:
        """Return whether the samples are in the same order as those of the epoch handed out before a restore."""
        is_same = self.order is None or order is None or order == self.order
        self.order = order
        return is_same


class LoaderPlaces:
    """The places of all loaders, in the order of creation, which is the same in each attempt."""

    def __init__(self) -> None:
        self.driver: LoaderPlace | None = None
        """The place of the loader at whose batches the run can stop."""
        self._places: list[LoaderPlace] = []
        self._lasting = 0
        """The number of places whose loaders were created before the loop, which does not recreate them."""
        self._saved: list[LoaderRecord] = []
        """Places of a checkpoint that no loader has taken yet."""

    def add(self, place: LoaderPlace) -> None:
        """Add the place of a new loader. If a loop creates a loader in each pass, it replaces that of the last pass."""
        for i in range(self._lasting, len(self._places)):
            if self._places[i].is_over and self._places[i].signature == place.signature:
                self._places[i] = place
                break
        else:
            self._places.append(place)
        self._take_saved(place)

    def begin_loop(self) -> None:
        """Record that all loaders created so far last as long as the training."""
        self._lasting = len(self._places)

    def note_batch(self, place: LoaderPlace) -> None:
        """Record, before the first batch of a pass, whether its loop began before the driver's, or outside."""
        # a pass that follows another one within the driver's pass, or outside, keeps these values
        follows = place.is_outside or (self._pass_of_driver is not None and place.ended_in == self._pass_of_driver)
        if place.is_new and not follows:
            place.is_ahead = self._pass_of_driver is None and not self._driver_has_trained_in(place)
            place.is_outside = place.begun_at[1] is None
        place.is_new = False

    def _driver_has_trained_in(self, place: LoaderPlace) -> bool:
        """Return whether the driver began a pass in the same epoch as another loader, and steps were taken in
        between."""
        step, epoch = place.begun_at
        if self.driver is None or epoch is None:
            return False
        return self.driver.begun_at[1] == epoch and self.driver.begun_at[0] < step

    def end_pass(self, place: LoaderPlace, which: object, ran_to_end: bool, epoch: int | None) -> None:
        """Record that a pass is over, unless another one over its loader has begun since.

        Args:
            epoch: current epoch of the run.
        """
        if which is not place.current:
            return
        if ran_to_end:
            place.restored = None
        place.is_outside &= ran_to_end and epoch is not None
        place.ended_in, place.is_in_pass, place.is_over = self._pass_of_driver, False, True

    @property
    def _pass_of_driver(self) -> int | None:
        return self.driver.passes if self.driver is not None and self.driver.is_in_pass else None

    def records(self, in_pass: bool) -> tuple[LoaderRecord, ...]:
        """Return the places to store in a checkpoint: those of loaders that last, or are in the middle of a pass."""
        lasting = (place for i, place in enumerate(self._places) if i < self._lasting or place.is_active)
        return tuple(place.record(in_pass) for place in lasting)

    def others(self, in_pass: bool) -> list[list[int]]:
        """Return passes and batch of each loader that does not drive the loop."""
        found = [place.record(in_pass) for place in self._places if place is not self.driver]
        return [[record.passes, record.batch] for record in found]

    def resume_from(self, saved: Sequence[LoaderRecord]) -> None:
        """Restore the existing loaders, and later those created in the loop."""
        self._saved = list(saved)
        for place in self._places:
            self._take_saved(place)

    def warn_of_missing(self) -> None:
        """Warn of loaders that were in the middle of a pass, and have not been created again."""
        for record in self._saved:
            if record.active:
                log_lines.warn(
                    f"the checkpoint was saved in the middle of a run.loader of {record.size}"
                    f" samples in batches of {record.batch_size}, but the job has created no such loader"
                )

    def _take_saved(self, place: LoaderPlace) -> None:
        for record in self._saved:
            if (record.size, record.batch_size) == place.signature:
                place.resume_from(record)
                self._saved.remove(record)
                return
