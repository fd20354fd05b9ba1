"""Track the passes over all loaders: the current batch of each loop, and others that the job may still have.

This finds the batch that a tensor is a part of, and the batches that a loss may be the mean of if no tensor shows it.
Finished passes are kept as long as the job has batches of them; of older ones, only the shares of gone batches are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from mgpu_slurm.checkpoints.state.tensors import memory_id
from mgpu_slurm.data.batching.batches import Share
from mgpu_slurm.data.batching.nests import leaves_of
from mgpu_slurm.data.batching.passes import HandedBatch, Pass

Samples = TypeVar("Samples")

MOST_PASSES = 16
"""Maximum number of finished passes remembered: a dataset may hand out the same tensors in each."""


class PassHistory:
    """The open and finished passes of one rank."""

    def __init__(self) -> None:
        self._passes: list[Pass] = []
        self.newest = 0
        """The number of the batch that was handed out last, by any loader."""
        self._preloaded: dict[object, set[Share | None]] = {}
        """Shares of forgotten passes of which no batch was used, by `Pass.batches`: the job may have transformed
        them."""
        self._lost: dict[Share | None, int] = {}
        """Shares of gone batches of forgotten passes (see `Pass.gone`), with `began_at` of the pass."""
        self._trains_since = 0
        """`began_at` of the first pass that was open when a loss was last weighted. Batches lost earlier are no longer
        used."""

    # -- events

    def begin(self, uses: int, is_early: bool, batches: object, place: object) -> Pass:
        """Begin a pass.

        Args:
            uses: number of times that a model, a loss or a meter was given anything.
            is_early: whether no loss has been weighted yet.
            batches: equal for passes over the same batches, even by different loaders.
            place: place of a loader, of whose passes only the newest continues; None for a pass next to others.
        """
        self._forget_passes()
        begun = Pass(self.newest, is_early, batches, place)
        for each in self._passes:
            if place is not None and each.place is place:
                each.close()
            if not each.is_open and each.uses == uses:
                begun.follow(each)
            if batches is not None and each.batches == batches:
                # these are fetched again: the job only looked at them
                each.is_used = True
        self._preloaded.pop(batches, None)
        self._passes.append(begun)
        return begun

    def _forget_passes(self) -> None:
        """Forget finished passes of which the job no longer has a batch, and the oldest of the others."""
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
        """Record a batch, and return it."""
        self.newest += 1
        passing.hand_out(HandedBatch(self.newest, share, samples, passing))
        return samples

    def note_loss(self) -> None:
        """Record that a loss is weighted now."""
        if loops := [each.began_at for each in self._passes if each.trained is not None]:
            self._trains_since = min(loops)

    # -- the batch of a part

    def holding(self, batch: Any) -> set[HandedBatch]:
        """Return the batches that tensors belong to."""
        return {owner for leaf in leaves_of(batch) for owner in self.owners(leaf) or self._searched(leaf)}

    def owners(self, leaf: Any) -> list[HandedBatch]:
        """Return the batches that this is a part of, unless it is a part of all. A dataset may hand out the same part
        repeatedly: then return the batch at which the loops are, or else the newest one."""
        place = memory_id(leaf)
        current = self.current()
        return [each for each in current if each.holds(leaf, place)] or _newest(
            each.find(leaf, place) for each in self._passes
        )

    def _searched(self, leaf: Any) -> list[HandedBatch]:
        """Do the same for a part of all batches, and for a view of an array at another place than its beginning."""
        current = [each.last for each in self._passes if each.last is not None and each.is_at(leaf)]
        return current or _newest(each.search(leaf) for each in self._passes)

    # -- the current batches of loops

    def current(self) -> list[HandedBatch]:
        """Return the current batches of all loops, including evaluations."""
        return [each.current for each in self._passes if each.current is not None]

    def at(self) -> set[HandedBatch]:
        """Return the current batch of the innermost evaluation, or else those of the training loops."""
        current = self.current()
        newest = max(current, key=lambda each: each.number, default=None)
        if newest is None or not newest.trains:
            return {newest} if newest is not None else set()
        return {each for each in current if each.trains}

    def runs_ahead(self) -> bool:
        """Return whether a loop fetches batches ahead of their use."""
        return any(each.is_open and each.runs_ahead for each in self._passes)

    # -- candidates if no tensor shows the batch

    def in_loops(self, loops_at: Collection[HandedBatch] = ()) -> list[HandedBatch]:
        """Return the current batches of training loops, and others that the job has fetched and not used: ahead of
        their use, or into a list.

        Args:
            loops_at: current batches of the loops when the models were given something.
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
        """Return the shares of batches that the job has fetched, ahead of their use or into a list, and not used, and
        may have in another form."""
        gone = {share for each in self._passes if each.is_open and each.runs_ahead for share in each.gone}
        if of_loss:
            gone.update(*self._preloaded.values())
            gone.update(*(each.gone for each in self._passes if each.may_be_preloaded()))
        return gone

    def outside_of_loops(self) -> set[Share | None]:
        """Return the shares of the batches that the job has kept. If it has kept none, the loss may be that of the
        job's own data, with equal numbers on all ranks (None), or of a loop variable. It may always be that of a batch
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
