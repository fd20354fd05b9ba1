"""Which batch a loss is the mean of, and so what weight its gradient has.

Every pass over a loader notes which batches it has handed out. A loss is that of the batch at which the training's
loop is: batches of evaluations and of passes that are over do not count. If several batches may be meant, and their
weights differ, the job has to name one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.weak import TensorWeakRef

from mgpu_slurm.errors import UserError
from mgpu_slurm.runtime.nests import tensors_of

Samples = TypeVar("Samples")

MOST_PASSES = 16
"""That are over and remembered: a dataset may hand out the same tensors in each."""


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
    """A batch that was handed out. It is not kept alive; its tensors tell it from others."""

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
        self._tensors = [TensorWeakRef(tensor) for tensor in tensors_of(samples)]

    def is_alive(self) -> bool:
        """Return whether the job, a view or the graph of a loss still has any tensor of it."""
        return any(reference() is not None for reference in self._tensors)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is one of the batch, or a part of one."""
        begin, end = _memory(tensor)
        own = (_memory(mine) for reference in self._tensors if (mine := reference()) is not None)
        return any(low <= begin < end <= high for low, high in own)


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor's memory begins and ends; the same for one that has none."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


class Pass:
    """One pass over a loader."""

    def __init__(self) -> None:
        self.handed: list[Handed] = []
        """The newest last; of older ones those that may still be used."""
        self.is_open = True
        self.ran_to_end = False
        """It was not left in the middle."""
        self.shares: set[Share | None] = set()
        """Of all batches for training."""
        self.has_unused = False
        """At least one of these was not used while the loop was there."""
        self.has_unweighted_stand_in = False
        """Neither a loss nor a meter has heard that a sample of this rank counts nothing."""
        self._tidy_at = 16

    @property
    def current(self) -> Handed | None:
        """The batch at which a loop over the loader is."""
        return self.handed[-1] if self.is_open and self.handed else None

    def hand_out(self, handed: Handed) -> None:
        self.look_back()
        if handed.trains:
            self.shares.add(handed.share)
        self.handed.append(handed)
        # a job may keep all batches
        if len(self.handed) >= self._tidy_at:
            self.handed = [*self.alive(), *self.handed[-1:]]
            self._tidy_at = 2 * len(self.handed) + 16

    def look_back(self) -> None:
        """Note, when the batch at which the loop was is done, whether it was used."""
        if not self.handed:
            return
        last = self.handed[-1]
        self.has_unused |= last.trains and not last.is_used
        self.has_unweighted_stand_in |= last.share is not None and not last.share.count and not last.may_be_used

    def earlier(self) -> list[Handed]:
        """Return the batches for training before the current one."""
        return [handed for handed in (self.handed[:-1] if self.is_open else self.handed) if handed.trains]

    def alive(self) -> list[Handed]:
        """Return those of them that the job still has."""
        return [handed for handed in self.earlier() if handed.is_alive()]


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
        self.has_warned = False
        """Of an evaluation that counts samples twice."""

    # -- loaders and run.accumulate tell

    @contextmanager
    def passing(self) -> Iterator[Pass]:
        """Note a pass over a loader, as long as that lasts."""
        over = [each for each in self._passes[:-1] if not each.is_open and each.alive()][-MOST_PASSES:]
        self._passes = [each for each in self._passes if each.is_open or each in [*over, self._passes[-1]]]
        begun = Pass()
        self._passes.append(begun)
        try:
            yield begun
        finally:
            begun.look_back()
            begun.is_open = False

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

    def _measured(self) -> tuple[list[Handed], float]:
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

    def _named(self, batch: Any) -> tuple[list[Handed], float]:
        """
        Raises:
            UserError: it is not one of a loader.
        """
        meant = self._holding(batch)
        if not meant:
            raise UserError(
                "run.backward(loss, batch): no tensor of this batch is as run.loader has given it: name the batch"
                " before it is changed"
            )
        self._use(meant)
        is_split = bool(self._splits) and not {*self._splits[-1].handed}.isdisjoint(meant)
        return meant, self._splits[-1].part if is_split else 1.0

    def _in_hand(self, call: str) -> tuple[list[Handed], float]:
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

    def _use(self, meant: list[Handed]) -> None:
        for each in meant:
            each.may_be_used = True
            each.is_used |= len(meant) == 1

    def _holding(self, batch: Any) -> list[Handed]:
        """Return the batches that tensors belong to."""
        tensors = list(tensors_of(batch))
        handed = (each for passing in self._passes for each in passing.handed)
        return [each for each in handed if any(map(each.holds, tensors))]

    def _in_loops(self) -> list[Handed]:
        """Return the batches at which loops over loaders are, and others that the job has fetched and not used: ahead
        of their use, or into a list."""
        found = [each.current for each in self._passes if each.current is not None and each.current.trains]
        if found:
            for passing in self._passes:
                others = [each for each in passing.earlier() if not each.is_used and each.is_alive()]
                if passing.is_open or len(others) > 1:
                    found += others
        return found

    def _outside_of_loops(self) -> set[Share | None]:
        """Return the shares of the batches that the job has kept. If it has kept none, the loss may be that of data of
        its own, of which all ranks have as many (None), or of batches that it has changed."""
        kept: set[Share | None] = set()
        others: set[Share | None] = {None}
        for passing in self._passes:
            if passing.current is not None:
                others.add(passing.current.share)
                continue
            alive = passing.alive()
            if len(alive) > 1 or (alive and not passing.ran_to_end):
                kept |= {each.share for each in alive}
            else:
                # the last one is still there as the variable of a loop that is over
                others |= {each.share for each in alive if not each.is_used}
            if passing is self._passes[-1] and passing.has_unused:
                # any of them may be used after the pass, in another form
                others |= passing.shares
        return kept or others


def _said(shares: Collection[Share | None]) -> str:
    """Return the batches that may be meant, in words."""
    batches = sorted(f"one of which this rank has {each.count} of {each.total} samples" for each in shares if each)
    return " or ".join(batches + ["data of your own"] * (None in shares))
