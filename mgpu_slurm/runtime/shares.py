"""Which batch a loss is the mean of, and so what weight its gradient has.

Every pass over a loader notes which batches it has handed out. A loss is that of the batch at which the training's
loop is: batches of evaluations and of passes that are over do not count. If several batches may be meant, and their
weights differ, the job has to name one.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from mgpu_slurm.errors import UserError
from mgpu_slurm.runtime.nests import leaves_of

Samples = TypeVar("Samples")

MOST_PASSES = 16
"""That are over and remembered: a dataset may hand out the same tensors in each."""

FIRST_TIDYING = 16
"""So many batches of a pass are remembered before those that are gone are dropped."""


@dataclass(frozen=True)
class Share:
    """How much of a global batch this rank holds."""

    count: int
    """Samples that count; 0 where the rank only keeps step with the others on a stand-in sample."""
    total: int
    """Samples of the global batch."""

    def weight(self, world_size: int) -> float:
        """Return the factor of this rank's gradient in the sum over the world, which is divided by the world size."""
        return self.count * world_size / self.total


def share_of(total: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return where the rank's share of `total` samples begins and ends: all are equal, plus or minus one."""
    return total * rank // world_size, total * (rank + 1) // world_size


class Handed:
    """A batch that was handed out. It is not kept alive; its tensors, arrays and objects tell it from others."""

    __slots__ = ("_leaves", "is_used", "may_be_used", "number", "share", "trains")

    def __init__(self, number: int, share: Share | None, samples: Any) -> None:
        self.number = number
        """Of those that any loader has handed out."""
        self.share = share
        """None for a batch of `run.shard`."""
        self.trains = share is not None and torch.is_grad_enabled()
        """A batch that is fetched without gradients is evaluated."""
        self.may_be_used = False
        """A loss or a meter was weighted while this was one of the batches that could be meant."""
        self.is_used = False
        """It was the only one."""
        self._leaves = [*map(weakref.ref, leaves_of(samples))]

    def is_alive(self) -> bool:
        """Return whether the job, a view or the graph of a loss still has any part of it."""
        return any(_found(reference) is not None for reference in self._leaves)

    def holds(self, part: Any) -> bool:
        """Return whether this is a part of the batch, or a view of one."""
        begin, end = _memory(part)
        for reference in self._leaves:
            if (own := _found(reference)) is not None:
                low, high = _memory(own)
                if own is part or low <= begin < end <= high:
                    return True
        return False


def _found(reference: weakref.ref[Any]) -> Any:
    """Return what a weak reference refers to, or None."""
    found = reference()
    if isinstance(found, torch.Tensor):
        # as torch.utils.weak.TensorWeakRef does, which takes long to make
        found._fix_weakref()  # type: ignore[attr-defined]
    return found


def _memory(part: Any) -> tuple[int, int]:
    """Return where the memory of a tensor or an array begins and ends; the same for anything that has none."""
    if isinstance(part, np.ndarray):
        return np.lib.array_utils.byte_bounds(part)
    if not isinstance(part, torch.Tensor) or part.layout is not torch.strided or part.is_nested or not part.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    return part.data_ptr(), part.data_ptr() + (last + 1) * part.element_size()


class Pass:
    """One pass over a loader."""

    def __init__(self, began_at: int) -> None:
        self.began_at = began_at
        """The number of the newest batch of any loader then."""
        self.last: Handed | None = None
        """The newest batch."""
        self.earlier: list[Handed] = []
        """Batches for training that the loop has left, as long as the job may still have them."""
        self.unused: list[Handed] = []
        """Those of them that were not used before."""
        self.lost: set[Share | None] = set()
        """Shares of batches that are gone and were not used: the job may have kept them in another form."""
        self.is_open = True
        self.ran_to_end = False
        """It was not left in the middle."""
        self.has_unweighted_stand_in = False
        """Neither a loss nor a meter has heard that a sample of this rank counts nothing."""
        self._tidy_at = FIRST_TIDYING

    @property
    def current(self) -> Handed | None:
        """The batch at which a loop over the loader is."""
        return self.last if self.is_open else None

    def hand_out(self, handed: Handed) -> None:
        self._leave_last()
        self.last = handed

    def close(self) -> None:
        """Note that the pass is over."""
        self._leave_last()
        self.is_open = False

    def _leave_last(self) -> None:
        last = self.last
        if last is None:
            return
        self.has_unweighted_stand_in |= last.share is not None and not last.share.count and not last.may_be_used
        if not last.trains:
            return
        self.earlier.append(last)
        if not last.is_used:
            self.unused.append(last)
        # a job may keep all batches
        if len(self.earlier) >= self._tidy_at:
            self.tidy()

    def tidy(self) -> None:
        """Forget the batches that are gone."""
        self.lost = self.all_lost()
        self.unused = self.fetched_ahead()
        self.earlier = [each for each in self.earlier if each.is_alive()]
        self._tidy_at = 2 * len(self.earlier) + FIRST_TIDYING

    def all_lost(self) -> set[Share | None]:
        """Return the shares of batches that are gone and were not used."""
        return self.lost | {each.share for each in self.unused if not each.is_used and not each.is_alive()}

    def fetched_ahead(self) -> list[Handed]:
        """Return the batches that the job still has and has not used."""
        return [each for each in self.unused if not each.is_used and each.is_alive()]

    def is_kept(self) -> bool:
        """Return whether the job has kept batches on purpose. The last one of a loop that is over may be there as its
        variable only."""
        alive = len([*islice((each for each in self.earlier if each.is_alive()), 2)])
        return alive > 1 or (alive == 1 and not self.ran_to_end)

    def shares_alive(self) -> set[Share | None]:
        """Return the shares of the batches that the job still has."""
        shares: set[Share | None] = set()
        for each in self.earlier:
            if each.share not in shares and each.is_alive():
                shares.add(each.share)
        return shares


class Split:
    """A batch that is in the middle of being split into micro-batches."""

    def __init__(self, handed: list[Handed], newest: int) -> None:
        self.handed = handed
        """The batches it comes from, as far as they are known."""
        self.newest = newest
        """The number of the newest batch when it began."""
        self.part = 1.0
        """The share of its samples in the present micro-batch."""


class Shares:
    """The batches that one rank has in hand, and their shares."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._passes: list[Pass] = []
        self._splits: list[Split] = []
        self._newest = 0
        self._lost: dict[Share | None, int] = {}
        """Shares of passes that are forgotten, see `Pass.lost`, and where these began."""
        self._trains_since = 0
        """Where the first of the passes began in which a loss was weighted last. What was lost before is not used any
        more."""
        self.has_warned = False
        """Of an evaluation that counts samples twice."""

    # -- loaders and run.accumulate tell

    @contextmanager
    def passing(self) -> Iterator[Pass]:
        """Note a pass over a loader, as long as that lasts."""
        self._forget_passes()
        begun = Pass(self._newest)
        self._passes.append(begun)
        try:
            yield begun
        finally:
            begun.close()

    def _forget_passes(self) -> None:
        """Forget passes that are over and of which the job has no batch any more, and the oldest of all others."""
        over = [each for each in self._passes if not each.is_open]
        for each in over:
            each.tidy()
        kept = [each for each in over if each.earlier][-MOST_PASSES:]
        for each in over:
            if each not in kept:
                self._lost |= dict.fromkeys(each.lost | {handed.share for handed in each.unused}, each.began_at)
        self._passes = [each for each in self._passes if each.is_open or each in kept]

    def hand_out(self, passing: Pass, share: Share | None, samples: Samples) -> Samples:
        """Note a batch, and return it."""
        self._newest += 1
        passing.hand_out(Handed(self._newest, share, samples))
        return samples

    @contextmanager
    def splitting(self, batch: Any) -> Iterator[Split]:
        """Note that a batch is being split, as long as that lasts."""
        split = Split([each for each in self._holding(batch) if each.share is not None], self._newest)
        self._splits.append(split)
        try:
            yield split
        finally:
            self._splits.remove(split)

    def check_innermost(self, split: Split) -> None:
        """
        Raises:
            UserError: micro-batches of two batches alternate.
        """
        if self._splits[-1] is not split:
            raise UserError(
                "run.accumulate: two loops over it alternate, as in zip: split both batches at once, as in"
                " run.accumulate((a, b), parts)"
            )

    # -- what a loss is the mean of

    def weight(self, batch: Any = None) -> float:
        """Return by what the gradient of a loss is multiplied.

        Args:
            batch: any of its tensors, or a nest of them; None for that of the loop.

        Raises:
            UserError: it cannot be known, or this batch is not one of a loader.
        """
        meant, part = self._in_hand("run.backward") if batch is None else self._named(batch)
        shares = {each.share for each in meant} or self._outside_of_loops()
        weights = {1.0 if share is None else share.weight(self._world_size) for share in shares}
        if len(weights) > 1:
            raise UserError(
                f"run.backward: several batches may be meant ({_said(shares)}); name the one that the loss is the mean"
                " of, as in run.backward(loss, images), and evaluate with run.shard or under torch.no_grad()"
                + "; for data of your own, call loss.backward()"
                * (None in shares)
            )
        return part * weights.pop()

    def samples(self) -> float | None:
        """Return how many of its own samples this rank has in the batch of the loop; None if there is no such loop.

        Raises:
            UserError: it cannot be known.
        """
        meant, part = self._measured()
        shares = {each.share for each in meant}
        counts = {None if share is None else share.count for share in shares}
        if len(counts) > 1:
            raise UserError(
                f"meter.add: several batches may be meant ({_said(shares)}); specify the number of samples as `count`"
            )
        count = counts.pop() if counts else None
        return None if count is None else count * part

    def _measured(self) -> tuple[Collection[Handed], float]:
        """Return what a meter measures, in an evaluation within the training's loop too, and the part of each."""
        current = [each.current for each in self._passes if each.current is not None]
        evaluated = [each for each in current if not each.trains]
        since = self._splits[-1].newest if self._splits else 0
        newest = max(current, key=lambda each: each.number, default=None)
        if newest is not None and newest.share is None:
            return [newest], 1.0
        if not torch.is_grad_enabled() and any(each.number > since for each in evaluated):
            self._use(evaluated)
            return evaluated, 1.0
        meant, part = self._in_hand("meter.add")
        return meant or evaluated, part

    def _named(self, batch: Any) -> tuple[Collection[Handed], float]:
        """
        Raises:
            UserError: it is not one of a loader.
        """
        meant = self._holding(batch)
        if not meant:
            raise UserError(
                "run.backward(loss, batch): no tensor of this batch is as run.loader has given it: name the batch"
                " before it is changed, or any tensor that came with it"
            )
        self._use(meant)
        is_split = bool(self._splits) and not {*self._splits[-1].handed}.isdisjoint(meant)
        return meant, self._splits[-1].part if is_split else 1.0

    def _in_hand(self, call: str) -> tuple[Collection[Handed], float]:
        """Return the batches that may be meant if none is named, and the part of each.

        Raises:
            UserError: it may be a micro-batch or another batch.
        """
        meant, part = self._in_loops(), 1.0
        if self._splits:
            split = self._splits[-1]
            if any(each.number > split.newest for each in meant):
                raise UserError(
                    f"{call}: a batch was fetched within a loop over run.accumulate, or that loop was left and its"
                    " iterator kept: name the batch, as in run.backward(loss, images), or close the iterator"
                )
            meant, part = split.handed or meant, split.part
        self._use(meant)
        return meant, part

    def _use(self, meant: Collection[Handed]) -> None:
        for each in meant:
            each.may_be_used = True
            each.is_used |= len(meant) == 1

    def _holding(self, batch: Any) -> set[Handed]:
        """Return the batches that tensors belong to. A dataset may hand out the same one again and again: the loops are
        at that batch then, or have handed it out last."""
        current = [each.current for each in self._passes if each.current is not None]
        holding = set()
        for leaf in leaves_of(batch):
            found = [each for each in current if each.holds(leaf)]
            if not found:
                earlier = [each for passing in self._passes for each in passing.earlier if each.holds(leaf)]
                found = sorted(earlier, key=lambda each: each.number)[-1:]
            holding.update(found)
        return holding

    def _in_loops(self) -> list[Handed]:
        """Return the batches at which loops over loaders are, and others that the job has fetched and not used: ahead
        of their use, or into a list."""
        loops = [each for each in self._passes if each.current is not None and each.current.trains]
        if not loops:
            return []
        self._trains_since = min(each.began_at for each in loops)
        found = [each.current for each in loops if each.current is not None]
        for passing in self._passes:
            if passing.unused and (passing.is_open or len(passing.fetched_ahead()) > 1):
                found += passing.fetched_ahead()
        return found

    def _outside_of_loops(self) -> set[Share | None]:
        """Return the shares of the batches that the job has kept. If it has kept none, the loss may be that of data of
        its own, of which all ranks have as many (None), or of the variable of a loop. It may always be that of a batch
        that was fetched and not used, in another form."""
        kept: set[Share | None] = set()
        others: set[Share | None] = {None}
        lost = {share for share, began_at in self._lost.items() if began_at >= self._trains_since}
        for passing in self._passes:
            if passing.began_at >= self._trains_since:
                lost |= passing.all_lost()
            if passing.current is not None:
                others.add(passing.current.share)
            elif passing.is_kept():
                kept |= passing.shares_alive()
            else:
                others |= passing.shares_alive()
        return (kept or others) | lost


def _said(shares: Collection[Share | None]) -> str:
    """Return the batches that may be meant, in words."""
    batches = sorted(f"one of which this rank has {each.count} of {each.total} samples" for each in shares if each)
    return " or ".join(batches + ["data of your own"] * (None in shares))
