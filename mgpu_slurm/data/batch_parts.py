"""Recognize a tensor, an array or an object as a part of a batch, without keeping the batch alive.

A part is recognized by its `id`, and a view of one by its memory. Parts are weakly referenced: a batch is gone, and its
memory free, once nobody has any part of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Set
from typing import Any, TypeAlias

import numpy as np
import torch

from mgpu_slurm.checkpoints.tensors import has_memory, place_of
from mgpu_slurm.data.nests import leaves_of
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
            place: place of the part, see `place_of`.
        """
        return is_one_of(part, self.parts) or is_within_any(part, self.places().get(place, ()))

    def has_within(self, part: Any) -> bool:
        """Return whether this is a view of a part of the batch, whatever its place."""
        return is_within_any(part, self.parts.values())

    def places(self) -> Mapping[int, list[weakref.ref[Any]]]:
        """Return its parts by their places, see `place_of`."""
        if self._places is None:
            self._places = {}
            for reference in self.parts.values():
                if (leaf := _found(reference)) is not None:
                    self._places.setdefault(place_of(leaf), []).append(reference)
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
        return np.lib.array_utils.byte_bounds(part)
    if not isinstance(part, torch.Tensor) or not has_memory(part):
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    return part.data_ptr(), part.data_ptr() + (last + 1) * part.element_size()
