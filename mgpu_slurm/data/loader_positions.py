"""Where each loader of a run is, so that a new attempt continues all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class LoaderPlace:
    """Where a loader is; the same on all ranks."""

    size: int
    """Samples in a pass."""
    batch_size: int
    passes: int = 0
    """Begun so far."""
    epoch: int = 0
    """That of the pass, which decides its order."""
    batch: int = 0
    """The one that was handed out last."""
    is_in_pass: bool = False
    is_new: bool = False
    """The pass has come to no batch yet."""
    is_over: bool = False
    """The last pass has ended, and none has begun since."""
    first_batch: int = 0
    """Where the next pass starts: not at 0 once, after a restore in the middle of a pass."""
    next_epoch: int | None = None
    """That of the next pass, if it continues one."""
    is_ahead: bool = False
    """The loop over it began before that over the loader that drives the loop: a job that continues fetches one batch
    again before it comes to where it was."""
    is_outside: bool = False
    """This pass, or the first of those that follow one another, began outside of `state.epochs`: a new attempt
    continues it there."""
    ended_in: int | None = None
    """The pass of the loader that drives the loop in which this one's last pass ended; None if in none."""
    current: object = None
    """Tells the pass that began last from others."""
    restored: tuple[int, int | None] | None = None
    """Where that pass continues, by its first batch and epoch, if it does."""
    batches: int = 0
    """Of that pass so far."""
    order: int | None = None
    """Tells the samples of the epoch from those in another order; None if they follow from seed and epoch, or if the
    pass has no batch yet."""
    begun_at: tuple[int, int | None] = (0, None)
    """The step and the epoch of the run then."""

    @property
    def signature(self) -> tuple[int, int]:
        return self.size, self.batch_size

    def begin_pass(self, epoch: int | None, step: int) -> int:
        """Begin a pass, or continue the one in whose middle it was restored, and return where.

        Args:
            epoch: None outside of `state.epochs`: each pass is an epoch there.
            step: That of the run.
        """
        was_looked_at = self.batches <= 1 and self.begun_at == (step, epoch)
        if self.restored is not None and was_looked_at:
            # the job has looked at one batch: what it continues is this pass
            (self.first_batch, self.next_epoch), self.restored = self.restored, None
            self.passes -= 1
        elif self.first_batch or self.next_epoch is not None:
            self.restored = self.first_batch, self.next_epoch
        else:
            self.restored = None
        # only a pass that has ended is followed by this one
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
        """Note that the pass comes to a batch."""
        self.batch = batch
        self.batches += 1

    def beside(self) -> LoaderPlace:
        """Return a place for a pass that leaves this one as it is, and is not saved."""
        # in the same epoch: in the next one, a sampler may have another length
        return LoaderPlace(self.size, self.batch_size, self.passes - self.is_in_pass)

    @property
    def is_active(self) -> bool:
        """Whether a pass is to continue: one that goes on, or one in whose middle the loader was restored."""
        return self.is_in_pass or self.next_epoch is not None

    def facts(self, in_pass: bool) -> dict[str, Any]:
        """Return what a checkpoint holds.

        Args:
            in_pass: whether that is at a batch of the loader that drives the loop; else it is at the end of an epoch,
                in which nothing is fetched again.
        """
        if self.is_in_pass:
            is_fetched_again = self.is_ahead and (in_pass or self.is_outside)
            # the pass that was begun is begun again
            begins: dict[str, Any] = {
                "batch": self.batch + (not is_fetched_again),
                "epoch": self.epoch,
                "passes": self.passes - 1,
            }
        else:
            begins = {"batch": self.first_batch, "epoch": self.next_epoch, "passes": self.passes}
        begins["order"] = self.order if begins["batch"] else None
        known = {"size": self.size, "batch_size": self.batch_size, "outside": self.is_outside}
        return {**known, "active": self.is_active, **begins}

    def go_to(self, facts: Mapping[str, Any]) -> None:
        """Continue from there with the next pass."""
        self.first_batch, self.next_epoch, self.passes = facts["batch"], facts["epoch"], facts["passes"]
        self.is_outside, self.is_over, self.restored = facts["outside"], False, None
        self.order = facts["order"]

    def continue_in(self, order: int | None) -> bool:
        """Return whether the samples are in the order of what was handed out of the epoch before a restore."""
        is_same = self.order is None or order is None or order == self.order
        self.order = order
        return is_same


class LoaderPlaces:
    """The places of all loaders, in the order in which the job makes them: it makes them again in that order."""

    def __init__(self) -> None:
        self.driver: LoaderPlace | None = None
        """Of the loader at whose batches the run can stop."""
        self._places: list[LoaderPlace] = []
        self._lasting = 0
        """Of these the loop makes none anew."""
        self._saved: list[Mapping[str, Any]] = []
        """Those of a checkpoint that no loader has taken yet."""

    def add(self, place: LoaderPlace) -> None:
        """Add the place of a new loader. One that is made in each pass of a loop replaces that of the pass before."""
        for i in range(self._lasting, len(self._places)):
            if self._places[i].is_over and self._places[i].signature == place.signature:
                self._places[i] = place
                break
        else:
            self._places.append(place)
        self._take_saved(place)

    def begin_loop(self) -> None:
        """Note that all loaders made so far last as long as the training."""
        self._lasting = len(self._places)

    def note_batch(self, place: LoaderPlace) -> None:
        """Note, before the first batch of a pass, whether the loop over it began before the driver's, or outside."""
        # one that follows another pass among the driver's batches, or outside, keeps its turn
        follows = place.is_outside or (self._pass_of_driver is not None and place.ended_in == self._pass_of_driver)
        if place.is_new and not follows:
            place.is_ahead = self._pass_of_driver is None and not self._driver_has_trained_in(place)
            place.is_outside = place.begun_at[1] is None
        place.is_new = False

    def _driver_has_trained_in(self, place: LoaderPlace) -> bool:
        """Return whether the driver began a pass in the epoch in which another loader begins one, and steps were made
        since."""
        step, epoch = place.begun_at
        if self.driver is None or epoch is None:
            return False
        return self.driver.begun_at[1] == epoch and self.driver.begun_at[0] < step

    def end_pass(self, place: LoaderPlace, which: object, ran_to_end: bool, epoch: int | None) -> None:
        """Note that a pass is over, unless another one over its loader has begun since.

        Args:
            epoch: That of the run now.
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

    def facts(self, in_pass: bool) -> list[dict[str, Any]]:
        """Return what a checkpoint holds: the places of loaders that last or are in the middle of a pass."""
        return [place.facts(in_pass) for i, place in enumerate(self._places) if i < self._lasting or place.is_active]

    def others(self, in_pass: bool) -> list[list[int]]:
        """Return how far the loaders are that do not drive the loop."""
        found = [place.facts(in_pass) for place in self._places if place is not self.driver]
        return [[facts["passes"], facts["batch"]] for facts in found]

    def go_to(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore the loaders that are there, and later those that are made in the loop."""
        self._saved = list(saved)
        for place in self._places:
            self._take_saved(place)

    def warn_of_missing(self) -> None:
        """Say which loaders were in the middle of a pass, and are not made any more."""
        for facts in self._saved:
            if facts["active"]:
                print(
                    f"mgpu_slurm: WARNING: the checkpoint was saved in the middle of a run.loader of {facts['size']}"
                    f" samples in batches of {facts['batch_size']}, and the job has made none like it",
                    flush=True,
                )

    def _take_saved(self, place: LoaderPlace) -> None:
        for facts in self._saved:
            if (facts["size"], facts["batch_size"]) == place.signature:
                place.go_to(facts)
                self._saved.remove(facts)
                return
