"""Record the batches that each pass over a loader has handed out, and what has become of them.

A `for` loop over a loader is a pass. It is open until the loop ends or is left, and is at its `current` batch. Batches
that the loop has left are remembered, but not kept alive, as long as the job has any part of them: it may train on them
later. A batch is *used* once a model, a loss or a meter was given it.

Batches that are left before they are used show that the job fetches ahead. A pass *runs ahead* if its second batch was
fetched before the first one was used, and is *preloaded* if several were fetched before the first loss. Such a job may
have made something else of its batches, so that no part of them is left. They are *gone*, and their shares are still
among those that a loss may have (`batch_weights`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from mgpu_slurm.data.batch_parts import BatchParts, Parts, in_both, is_one_of, is_within_any
from mgpu_slurm.data.batches import Share

FIRST_TIDYING = 16
"""So many batches of a pass are remembered before those that are gone are dropped."""


class HandedBatch(BatchParts):
    """A batch that was handed out."""

    __slots__ = ("is_used", "may_be_used", "number", "of", "share", "trains")

    def __init__(self, number: int, share: Share | None, samples: Any, of: Pass) -> None:
        super().__init__(samples)
        self.number = number
        """Of those that any loader has handed out."""
        self.share = share
        """None for a batch of `run.shard`."""
        self.of = of
        self.trains = share is not None and torch.is_grad_enabled()
        """A batch that is fetched without gradients is evaluated."""
        self.may_be_used = False
        """A loss or a meter was weighted while this was one of the batches that could be meant."""
        self.is_used = False
        """It was the only one, or a model was given it."""

    def give(self) -> None:
        """Note that a model is given it."""
        self.is_used = self.of.is_used = True

    def use(self) -> None:
        """Note that a loss or a meter is weighted by it."""
        self.may_be_used = True
        self.give()

    def is_in_hand(self) -> bool:
        """Return whether a loop is at it, or the job, a view or the graph of a loss still has any part of it."""
        return self.of.current is self or self.is_alive()

    def is_kept(self) -> bool:
        """Return whether it is in hand, and not only as the variable of a loop that is over."""
        return self.is_in_hand() and (self.of.is_open or self.of.is_kept())


class Pass:
    """One pass over a loader."""

    def __init__(self, began_at: int, is_early: bool, batches: object = None, place: object = None) -> None:
        self.began_at = began_at
        """The number of the newest batch of any loader then."""
        self.is_early = is_early
        """It began before the first loss."""
        self.batches = batches
        """Equal for passes over the same batches."""
        self.place = place
        """That of the loader, of whose passes only the newest continues; not the loader, which may have workers."""
        self.last: HandedBatch | None = None
        """The newest batch."""
        self._parts: Parts = {}
        """All of its parts, also those that others have too."""
        self._handed = 0
        """How many."""
        self.is_open = True
        self.ran_to_end = False
        """It was not left in the middle."""
        self.is_used = False
        """A model or a loss was given one of its batches."""
        self.runs_ahead = False
        """No model had been given the first batch when the job fetched the second one."""
        self.uses = 0
        """What `Shares.uses` was when the pass ended."""
        self.was_measured = False
        """It is an evaluation, and a meter took the number of samples from it."""
        self.is_held = False
        """It is an evaluation, and a loop around it has gone on without its end."""
        self.has_unweighted_stand_in = False
        """Neither a loss nor a meter has heard that a sample of this rank counts nothing."""
        self.gone: set[Share | None] = set()
        """Shares of batches that the job has not used and does not have any more: it may have them in another form."""
        self._unused: dict[Share | None, list[HandedBatch]] = {}
        """Batches that the loop has left before they were used."""
        self.left_unused = 0
        """How many these were."""
        self._earlier: list[HandedBatch] = []
        """Batches that the loop has left, as long as the job may still have them."""
        self._index: dict[int, list[HandedBatch]] = {}
        """The first of them by their places: made when something is looked for."""
        self._indexed = 0
        self._tidy_at = FIRST_TIDYING

    @property
    def current(self) -> HandedBatch | None:
        """The batch at which a loop over the loader is."""
        return self.last if self.is_open else None

    @property
    def trained(self) -> HandedBatch | None:
        """The same, unless it is evaluated."""
        return self.last if self.is_open and self.last is not None and self.last.trains else None

    def hand_out(self, handed: HandedBatch) -> None:
        self._leave_last()
        shared = in_both(handed.parts, self._parts)
        self._parts = handed.parts
        for each in (handed, self.last):
            if each is not None:
                each.forget(shared)
        self.last = handed
        self._handed += 1

    def is_at(self, part: Any) -> bool:
        """Return whether something is a part of the current batch, or within one, also of what others have too."""
        if not self.is_open:
            return False
        return is_one_of(part, self._parts) or is_within_any(part, self._parts.values())

    def follow(self, before: Pass) -> None:
        """Note that this pass began when another one had ended, and no model was given anything since: its last batch
        is used in this pass."""
        if before.is_used and before.runs_ahead and before.last is not None:
            self.runs_ahead = True
            self.gone |= {*before.gone, before.last.share}

    def may_be_preloaded(self) -> bool:
        """Return whether several batches were fetched, and none was used, before the first loss."""
        return self.is_early and not self.is_open and not self.is_used and self.left_unused > 1

    def close(self) -> None:
        """Note that the pass is over."""
        if self.is_open:
            self._leave_last()
            self.is_open = False

    def _leave_last(self) -> None:
        last = self.last
        if last is None:
            return
        self.has_unweighted_stand_in |= last.share is not None and not last.share.count and not last.may_be_used
        if last.trains and not last.is_used:
            self.runs_ahead |= self._handed == 1 and not last.may_be_used
            self.left_unused += 1
            self._unused.setdefault(last.share, []).append(last)
        self._earlier.append(last)
        # a job may keep all batches
        if len(self._earlier) >= self._tidy_at:
            self.tidy()

    def tidy(self) -> None:
        """Forget the batches that are gone, or whose parts have all been handed out again."""
        self._tidy_unused()
        kept: list[HandedBatch] = []
        seen: set[int] = set()
        for each in reversed(self._earlier):
            if each.is_alive() and not seen.issuperset(each.parts):
                kept.append(each)
                seen.update(each.parts)
        self._earlier = kept[::-1]
        self._index, self._indexed = {}, 0
        self._tidy_at = 2 * len(self._earlier) + FIRST_TIDYING

    def _tidy_unused(self) -> None:
        left: dict[Share | None, list[HandedBatch]] = {}
        for share, batches in self._unused.items():
            unused = [each for each in batches if not each.is_used]
            # one that is gone may have had the same ids as one that came after it
            alive = [each for each in unused if each.is_alive()]
            if len(alive) < len(unused):
                self.gone.add(share)
            if alive:
                # the newest of those that have the same parts
                left[share] = [*{frozenset(each.parts): each for each in alive}.values()]
        self._unused = left

    def has_batches(self) -> bool:
        """Return whether the job may still have any of those that the loop has left."""
        return bool(self._earlier)

    def unused(self) -> list[HandedBatch]:
        """Return, for each share, the newest batch that the loop has left and the job still has, and has not used."""
        found = []
        for share, batches in self._unused.items():
            while batches and (batches[-1].is_used or not batches[-1].is_alive()):
                if not batches.pop().is_used:
                    self.gone.add(share)
            found += batches[-1:]
        return found

    def keeps_unused(self) -> bool:
        """Return whether the job has several that it has not used."""
        unused = (each for batches in self._unused.values() for each in reversed(batches) if not each.is_used)
        if len([*islice((each for each in unused if each.is_alive()), 2)]) > 1:
            return True
        # few are left to look at the next time
        self._tidy_unused()
        return False

    def is_kept(self) -> bool:
        """Return whether the job has kept batches on purpose. The last one of a loop that is over may be there as its
        variable only."""
        alive = len([*islice(self._kept(), 2)])
        return alive > 1 or (alive == 1 and not self.ran_to_end)

    def shares_alive(self) -> set[Share | None]:
        """Return the shares of the batches that the job still has."""
        shares: set[Share | None] = set()
        for each in self._earlier:
            if each.trains and each.share not in shares and each.is_alive():
                shares.add(each.share)
        return shares

    def _kept(self) -> Iterator[HandedBatch]:
        return (each for each in self._earlier if each.trains and each.is_alive())

    def find(self, part: Any, place: int) -> HandedBatch | None:
        """Return the newest of the batches left that something is a part of, and is at a place of.

        Args:
            place: That of the part, see `place_of`.
        """
        for each in self._earlier[self._indexed :]:
            for its in each.places():
                self._index.setdefault(its, []).append(each)
        self._indexed = len(self._earlier)
        return next((each for each in reversed(self._index.get(place, ())) if each.holds(part, place)), None)

    def search(self, part: Any) -> HandedBatch | None:
        """Return the newest of all its batches that something is within, wherever it is."""
        return next((each for each in [self.last, *reversed(self._earlier)] if each and each.has_within(part)), None)
