"""Traverse batches as collate functions make them: tensors in tuples, lists, mappings and dataclasses.

`children_of` returns the children of a container, and `rebuilt` makes one of the same type with other children. The
other functions use them to reach the leaves: tensors, arrays, and objects with a method `to`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from enum import Enum
from numbers import Number
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

CONSTANTS = (str, bytes, Number, type(None), Enum, PurePath, np.generic, torch.device, torch.dtype)
"""Types that hold no sample data: the same for all parts of a batch, unless a list has one for each sample."""

ARRAYS = (torch.Tensor, np.ndarray)

_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})


def to_device(samples: Any, device: torch.device) -> Any:
    """Return the same nest with every tensor, and every object with a method `to`, on the device."""
    if isinstance(samples, torch.Tensor):
        return samples.to(device, non_blocking=True)
    if _is_plain(samples):
        return samples
    if callable(move := getattr(samples, "to", None)) and not isinstance(samples, type):
        moved = move(device)
        # some move themselves
        return samples if moved is None else moved
    children = children_of(samples)
    return samples if children is None else rebuilt(samples, [to_device(child, device) for child in children])


def map_tensors(samples: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same nest with every tensor changed, except those in objects with a method `to`."""
    if isinstance(samples, torch.Tensor):
        return change(samples)
    if _is_plain(samples) or callable(getattr(samples, "to", None)):
        return samples
    children = children_of(samples)
    return samples if children is None else rebuilt(samples, [map_tensors(child, change) for child in children])


def leaves_of(samples: Any) -> list[Any]:
    """Return every tensor and array of a nest, and every weakly referenceable object with a method `to`."""
    if isinstance(samples, ARRAYS):
        return [samples]
    if _is_plain(samples):
        return []
    if callable(getattr(samples, "to", None)) and type(samples).__weakrefoffset__:
        return [samples, *_leaves_of_children(samples)]
    return _leaves_of_children(samples)


def _leaves_of_children(samples: Any) -> list[Any]:
    leaves = []
    for child in children_of(samples) or ():
        # faster than a call for each of hundreds of children
        if isinstance(child, ARRAYS):
            leaves.append(child)
        elif type(child) not in _PLAIN:
            leaves += leaves_of(child)
    return leaves


def _is_plain(samples: Any) -> bool:
    """Return whether this is a plain value, or a list or tuple of plain values, such as texts."""
    kind = type(samples)
    return kind in _PLAIN or ((kind is list or kind is tuple) and _PLAIN.issuperset(map(type, samples)))


def children_of(samples: Any) -> list[Any] | None:
    """Return the children of a container, in order; None for anything else."""
    kind = type(samples)
    # the check for a Mapping is slow
    if kind in _PLAIN or kind is torch.Tensor:
        return None
    if kind is list or kind is tuple:
        return list(samples)
    if isinstance(samples, Mapping):
        return list(samples.values())
    if isinstance(samples, (tuple, list)):
        return list(samples)
    if dataclasses.is_dataclass(samples) and not isinstance(samples, type):
        return [getattr(samples, field.name) for field in dataclasses.fields(samples)]
    return None


def rebuilt(samples: Any, children: list[Any]) -> Any:
    """Return a container of the same type that holds other children."""
    if type(samples) in (tuple, list):
        return type(samples)(children)
    if isinstance(samples, Mapping):
        values = dict(zip(samples, children, strict=True))
        if not isinstance(samples, MutableMapping):
            return type(samples)(values)  # type: ignore[call-arg]
        # the copy keeps other attributes, such as the factory of a defaultdict
        new = copy.copy(samples)
        new.update(values)
        return new
    if isinstance(samples, tuple) and hasattr(samples, "_fields"):
        return type(samples)(*children)
    if isinstance(samples, (tuple, list)):
        return type(samples)(children)
    new = copy.copy(samples)
    for field, child in zip(dataclasses.fields(samples), children, strict=True):
        # a frozen dataclass refuses `setattr`
        object.__setattr__(new, field.name, child)
    return new
