"""Keep the passes over all loaders: which batch each loop is at, and which others the job may still have.

It finds the batch that a tensor is a part of, and the batches that a loss may be the mean of if no tensor tells. Passes
that are over are kept as long as the job has batches of them, and of older ones the shares that are gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from mgpu_slurm.checkpoints.tensors import place_of
from mgpu_slurm.data.batches import Share
from mgpu_slurm.data.nests import leaves_of
from mgpu_slurm.data.passes import HandedBatch, Pass

Samples = TypeVar("Samples")

MOST_PASSES = 16
"""That are over and remembered: a dataset may hand out the same tensors in each."""


class PassHistory:
    """The passes of one rank, those that are open and those that are over."""

    def __init__(self) -> None:
        self._passes: list[Pass] = []
        self.newest = 0
        """The number of the batch that was handed out last, by any loader."""
        self._preloaded: dict[object, set[Share | None]] = {}
        """Shares of passes that are forgotten, none of whose batches was used: the job may have made others of them. By
        `Pass.batches`."""
        self._lost: dict[Share | None, int] = {}
        """Shares of passes that are forgotten, see `Pass.gone`, and where these began."""
        self._trains_since = 0
        """Where the first of the passes began in which a loss was weighted last. What was lost before is not used any
        more."""

    # -- what happens

    def begin(self, uses: int, is_early: bool, batches: object, place: object) -> Pass:
        """Begin a pass.

        Args:
            uses: how often a model, a loss or a meter was given anything.
            is_early: no loss was weighted yet.
            batches: equal for passes over the same batches, also if another loader has made them.
            place: of a loader: of its passes only the newest continues; None for a pass beside others.
        """
        self._forget_passes()
        begun = Pass(self.newest, is_early, batches, place)
        for each in self._passes:
            if place is not None and each.place is place:
                each.close()
            if not each.is_open and each.uses == uses:
                begun.follow(each)
            if batches is not None and each.batches == batches:
                # these come again: they were only looked at
                each.is_used = True
        self._preloaded.pop(batches, None)
        self._passes.append(begun)
        return begun

    def _forget_passes(self) -> None:
        """Forget passes that are over and of which the job has no batch any more, and the oldest of all others."""
        over = [each for each in self._passes if not each.is_open]
        for each in over:
            each.tidy()
        kept = [each for each in over if each.has_batches() or each is over[-1]][-MOST_PASSES:]
        for each in over:
            if each not in kept:
                lost = each.gone | shares_of(each.unused())
                self._lost |= dict.fromkeys(lost, each.began_at)
                if each.may_be_preloaded():
                    self._preloaded.setdefault(each.batches, set()).update(lost)
        self._passes = [each for each in self._passes if each.is_open or each in kept]

    def hand_out(self, passing: Pass, share: Share | None, samples: Samples) -> Samples:
        """Note a batch, and return it."""
        self.newest += 1
        passing.hand_out(HandedBatch(self.newest, share, samples, passing))
        return samples

    def note_loss(self) -> None:
        """Note that a loss is weighted now."""
        if loops := [each.began_at for each in self._passes if each.trained is not None]:
            self._trains_since = min(loops)

    # -- which batch something is a part of

    def holding(self, batch: Any) -> set[HandedBatch]:
        """Return the batches that tensors belong to."""
        return {owner for leaf in leaves_of(batch) for owner in self.owners(leaf) or self._searched(leaf)}

    def owners(self, leaf: Any) -> list[HandedBatch]:
        """Return the batches that something is a part of, unless it is a part of all. A dataset may hand out the same
        one again and again: the loops are at that batch then, or have handed it out last."""
        place = place_of(leaf)
        current = self.current()
        return [each for each in current if each.holds(leaf, place)] or _newest(
            each.find(leaf, place) for each in self._passes
        )

    def _searched(self, leaf: Any) -> list[HandedBatch]:
        """Return the same, also of what is a part of all, and of an array of which the leaf shares the end only."""
        current = [each.last for each in self._passes if each.last is not None and each.is_at(leaf)]
        return current or _newest(each.search(leaf) for each in self._passes)

    # -- at which batches the loops are

    def current(self) -> list[HandedBatch]:
        """Return the batches at which loops are, those of evaluations too."""
        return [each.current for each in self._passes if each.current is not None]

    def at(self) -> set[HandedBatch]:
        """Return the batches at which the loops are: of an evaluation, or of the training."""
        current = self.current()
        newest = max(current, key=lambda each: each.number, default=None)
        if newest is None or not newest.trains:
            return {newest} if newest is not None else set()
        return {each for each in current if each.trains}

    def runs_ahead(self) -> bool:
        """Return whether a loop fetches batches ahead of their use."""
        return any(each.is_open and each.runs_ahead for each in self._passes)

    # -- which batches may be meant if no tensor tells

    def in_loops(self, loops_at: Collection[HandedBatch] = ()) -> list[HandedBatch]:
        """Return the batches at which loops over loaders are, and others that the job has fetched and not used: ahead
        of their use, or into a list.

        Args:
            loops_at: where the loops were when the models were given something.
        """
        found = [each.trained for each in self._passes if each.trained is not None]
        if not found:
            return []
        found = [*loops_at] or found
        for each in self._passes:
            if each.is_open or each.keeps_unused():
                found += each.unused()
        return found

    def gone(self, of_loss: bool) -> set[Share | None]:
        """Return the shares of batches that the job has fetched and not used, and may have in another form: ahead of
        their use, or into a list."""
        gone = {share for each in self._passes if each.is_open and each.runs_ahead for share in each.gone}
        if of_loss:
            gone.update(*self._preloaded.values())
            gone.update(*(each.gone for each in self._passes if each.may_be_preloaded()))
        return gone

    def outside_of_loops(self) -> set[Share | None]:
        """Return the shares of the batches that the job has kept. If it has kept none, the loss may be that of data of
        its own, of which all ranks have as many (None), or of the variable of a loop. It may always be that of a batch
        that was fetched and not used, in another form."""
        kept: set[Share | None] = set()
        others: set[Share | None] = {None}
        lost = {share for share, began_at in self._lost.items() if began_at >= self._trains_since}
        for passing in self._passes:
            if passing.began_at >= self._trains_since:
                passing.tidy()
                lost |= passing.gone
            if passing.current is not None:
                others.add(passing.current.share)
            elif passing.is_kept():
                kept |= passing.shares_alive()
            else:
                others |= passing.shares_alive()
        return (kept or others) | lost


def _newest(found: Iterable[HandedBatch | None]) -> list[HandedBatch]:
    return sorted((each for each in found if each is not None), key=lambda each: each.number)[-1:]


def shares_of(batches: Iterable[HandedBatch]) -> set[Share | None]:
    """Return the shares of batches, each once."""
    return {each.share for each in batches}
