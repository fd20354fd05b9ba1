"""Record the batches that each pass over a loader has handed out, and whether the job has used and still has them.

A `for` loop over a loader is a pass. It is open until the loop ends or is left, and is at its `current` batch. Batches
that the loop has left are remembered, but not kept alive, as long as the job has any part of them: it may train on them
later. A batch is *used* once a model, a loss or a meter was given it.

Batches that are left before they are used show that the job prefetches. A pass *runs ahead* if its second batch was
fetched before the first one was used, and is *preloaded* if several were fetched before the first loss. Such a job may
have transformed its batches, so that no part of them is left. They are *gone*, but a loss may still have their shares
(`batch_weights`).

A batch is recognized by its parts: a tensor, an array or an object by its `id`, and a view of one by its memory. Parts
are weakly referenced: a batch is gone, and its memory free, once nobody has any part of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch

from mgpu_slurm.checkpoints.state.tensors import has_memory, memory_id
from mgpu_slurm.data.batching.batches import Share
from mgpu_slurm.data.batching.nests import leaves_of
from mgpu_slurm.rank.torch_adapter import fix_weak_reference

Parts: TypeAlias = Mapping[int, "weakref.ref[Any]"]
"""Tensors, arrays and objects by their `id`."""


class BatchParts:
    """The parts of a batch that distinguish it from others."""

    __slots__ = ("_places", "parts")

    def __init__(self, samples: Any) -> None:
        self.parts: Parts = {id(leaf): weakref.ref(leaf) for leaf in leaves_of(samples)}
        self._places: dict[int, list[weakref.ref[Any]]] | None = None
        """Built at the first search."""

    def forget(self, shared: Set[int]) -> None:
        """Forget parts that another batch has too: they do not distinguish the two."""
        if not shared.isdisjoint(self.parts):
            self.parts = {key: part for key, part in self.parts.items() if key not in shared}
            self._places = None

    def is_alive(self) -> bool:
        """Return whether the job, a view or the graph of a loss still has any part of it."""
        return any(_found(reference) is not None for reference in self.parts.values())

    def holds(self, part: Any, place: int) -> bool:
        """Return whether this is a part of the batch, or a view of one.

        Args:
            place: place of the part, see `memory_id`.
        """
        return is_one_of(part, self.parts) or is_within_any(part, self.places().get(place, ()))

    def has_within(self, part: Any) -> bool:
        """Return whether this is a view of a part of the batch, whatever its place."""
        return is_within_any(part, self.parts.values())

    def places(self) -> Mapping[int, list[weakref.ref[Any]]]:
        """Return its parts by their places, see `memory_id`."""
        if self._places is None:
            self._places = {}
            for reference in self.parts.values():
                if (leaf := _found(reference)) is not None:
                    self._places.setdefault(memory_id(leaf), []).append(reference)
        return self._places


def is_one_of(part: Any, parts: Parts) -> bool:
    """Return whether this is one of these parts itself."""
    own = parts.get(id(part))
    return own is not None and _found(own) is part


def is_within_any(part: Any, references: Iterable[weakref.ref[Any]]) -> bool:
    """Return whether this is a view of one of these parts."""
    return any(map(_Memory(part).is_in, references))


def in_both(parts: Parts, others: Parts) -> set[int]:
    """Return the `id`s of parts that two batches have in common."""
    return {key for key, part in parts.items() if key in others and _found(others[key]) is part()}


def _found(reference: weakref.ref[Any]) -> Any:
    """Return the object of a weak reference, or None."""
    found = reference()
    if isinstance(found, torch.Tensor):
        fix_weak_reference(found)
    return found


class _Memory:
    """The memory range of a tensor or an array."""

    def __init__(self, part: Any) -> None:
        self._begin, self._end = _bounds(part)

    def is_in(self, reference: weakref.ref[Any]) -> bool:
        """Return whether it is within the object of a weak reference."""
        begin, end = _bounds(_found(reference))
        return begin <= self._begin < self._end <= end


def _bounds(part: Any) -> tuple[int, int]:
    """Return begin and end of the memory of a tensor or an array; equal for anything without memory."""
    if isinstance(part, np.ndarray):
        # NumPy 1.26 has it at the top
        owner: Any = getattr(np.lib, "array_utils", np)
        bounds: tuple[int, int] = owner.byte_bounds(part)
        return bounds
    if not isinstance(part, torch.Tensor) or not has_memory(part):
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    return part.data_ptr(), part.data_ptr() + (last + 1) * part.element_size()


FIRST_TIDYING = 16
"""Number of batches of a pass that are remembered before those that are gone are dropped."""


class HandedBatch(BatchParts):
    """A batch that was handed out."""

    __slots__ = ("is_used", "may_be_used", "number", "of", "share", "trains")

    def __init__(self, number: int, share: Share | None, samples: Any, of: Pass) -> None:
        super().__init__(samples)
        self.number = number
        """Its number among the batches handed out by all loaders."""
        self.share = share
        """None for a batch of `run.shard`."""
        self.of = of
        self.trains = share is not None and torch.is_grad_enabled()
        """Whether it is for training: a batch fetched without gradients is for evaluation."""
        self.may_be_used = False
        """Whether a loss or a meter was weighted while this was one of the candidates."""
        self.is_used = False
        """Whether it was the only candidate, or a model was given it."""

    def give(self) -> None:
        """Record that a model is given it."""
        self.is_used = self.of.is_used = True

    def use(self) -> None:
        """Record that a loss or a meter is weighted by it."""
        self.may_be_used = True
        self.give()

    def is_referenced(self) -> bool:
        """Return whether a loop is at it, or the job, a view or the graph of a loss still holds any part of it."""
        return self.of.current is self or self.is_alive()

    def is_kept(self) -> bool:
        """Return whether it is in hand, and not only as the variable of a finished loop."""
        return self.is_referenced() and (self.of.is_open or self.of.is_kept())


class Pass:
    """One pass over a loader."""

    def __init__(self, began_at: int, is_early: bool, batches: object = None, place: object = None) -> None:
        self.began_at = began_at
        """The number of the newest batch of any loader when the pass began."""
        self.is_early = is_early
        """Whether it began before the first loss."""
        self.batches = batches
        """Equal for passes over the same batches."""
        self.place = place
        """The place of the loader, of whose passes only the newest continues; not the loader itself, which may have
        workers."""
        self.last: HandedBatch | None = None
        """The newest batch."""
        self._parts: Parts = {}
        """All parts of that batch, including those that other batches have too."""
        self._handed = 0
        """Number of batches handed out."""
        self.is_open = True
        self.ran_to_end = False
        """Whether it was not left in the middle."""
        self.is_used = False
        """Whether a model or a loss was given one of its batches."""
        self.runs_ahead = False
        """Whether no model had been given the first batch when the job fetched the second one."""
        self.uses = 0
        """The value of `BatchWeights.uses` when the pass ended."""
        self.was_measured = False
        """Whether it is an evaluation from which a meter took the number of samples."""
        self.is_held = False
        """Whether it is an evaluation that has not ended although a loop around it has continued."""
        self.has_unweighted_stand_in = False
        """Whether the loop has left a stand-in sample without weighting a loss or a meter by it."""
        self.gone: set[Share | None] = set()
        """Shares of batches that the job has not used and no longer has; it may have them in another form."""
        self._unused: dict[Share | None, list[HandedBatch]] = {}
        """Batches that the loop has left before they were used."""
        self.left_unused = 0
        """Number of batches left unused."""
        self._earlier: list[HandedBatch] = []
        """Batches that the loop has left, as long as the job may still have them."""
        self._index: dict[int, list[HandedBatch]] = {}
        """The first of these batches by the places of their parts; built at a search."""
        self._indexed = 0
        self._tidy_at = FIRST_TIDYING

    @property
    def current(self) -> HandedBatch | None:
        """The batch at which the loop over the loader is; None if the pass is over."""
        return self.last if self.is_open else None

    @property
    def trained(self) -> HandedBatch | None:
        """The current batch, unless it is for evaluation."""
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
        """Return whether this is a part of the current batch, or within one, even if other batches have it too."""
        if not self.is_open:
            return False
        return is_one_of(part, self._parts) or is_within_any(part, self._parts.values())

    def follow(self, before: Pass) -> None:
        """Record that this pass began after another one, and no model was given anything in between: the last batch of
        `before` is used in this pass."""
        if before.is_used and before.runs_ahead and before.last is not None:
            self.runs_ahead = True
            self.gone |= {*before.gone, before.last.share}

    def may_be_preloaded(self) -> bool:
        """Return whether several batches were fetched, and none was used, before the first loss."""
        return self.is_early and not self.is_open and not self.is_used and self.left_unused > 1

    def close(self) -> None:
        """Record that the pass is over."""
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
            # a batch that is gone may have had the same ids as a later one
            alive = [each for each in unused if each.is_alive()]
            if len(alive) < len(unused):
                self.gone.add(share)
            if alive:
                # keep the newest of those with the same parts
                left[share] = [*{frozenset(each.parts): each for each in alive}.values()]
        self._unused = left

    def has_batches(self) -> bool:
        """Return whether the job may still have batches that the loop has left."""
        return bool(self._earlier)

    def unused(self) -> list[HandedBatch]:
        """Return, for each share, the newest batch that the loop has left and the job has not used but still has."""
        found = []
        for share, batches in self._unused.items():
            while batches and (batches[-1].is_used or not batches[-1].is_alive()):
                if not batches.pop().is_used:
                    self.gone.add(share)
            found += batches[-1:]
        return found

    def keeps_unused(self) -> bool:
        """Return whether the job still has several batches that it has not used."""
        unused = (each for batches in self._unused.values() for each in reversed(batches) if not each.is_used)
        if len([*islice((each for each in unused if each.is_alive()), 2)]) > 1:
            return True
        # so that few are left to check the next time
        self._tidy_unused()
        return False

    def is_kept(self) -> bool:
        """Return whether the job has kept batches on purpose. The last one of a finished loop may only be kept by the
        loop variable."""
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
        """Return the newest batch left by the loop that contains a part at its place.

        Args:
            place: place of the part, see `memory_id`.
        """
        for each in self._earlier[self._indexed :]:
            for its in each.places():
                self._index.setdefault(its, []).append(each)
        self._indexed = len(self._earlier)
        return next((each for each in reversed(self._index.get(place, ())) if each.holds(part, place)), None)

    def search(self, part: Any) -> HandedBatch | None:
        """Return the newest of all its batches that contains a view, whatever its place."""
        return next((each for each in [self.last, *reversed(self._earlier)] if each and each.has_within(part)), None)
