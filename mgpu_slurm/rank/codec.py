"""Encode a state as JSON and named tensors: exactly, and such that decoding cannot run code.

JSON has neither tuples nor tensors, and only string keys. Values that JSON lacks become an object with the key `!` for
the type and the key `of` for the content: `{"!": "tuple", "of": [1, 2]}`. Numbers are restored bit for bit.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from mgpu_slurm.core.errors import UserError

StateDict: TypeAlias = dict[str, Any]
"""A state as torch's `state_dict` methods return it: tensors, numbers and collections of them, by name."""

Plain: TypeAlias = Any
"""The part of a state that JSON can hold."""

_TYPE, _OF = "!", "of"

_COLLECTIONS: dict[type, Callable[[Iterable[Any]], Any]] = {
    tuple: tuple,
    torch.Size: torch.Size,
    set: set,
    frozenset: frozenset,
}
_DICTS: dict[type, Callable[[Any], Any]] = {dict: dict, OrderedDict: OrderedDict, Counter: lambda of: Counter(dict(of))}


def split(state: Any, name: str) -> tuple[Plain, dict[str, torch.Tensor]]:
    """Return the part of a state that JSON can hold, and its tensors by the names used in that part.

    Args:
        name: name of the state's owner; the names of its tensors begin with it.

    Raises:
        UserError: the state contains something other than numbers, strings, tensors and collections of them; the
            message names the place.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _plain(state, name, tensors), tensors


def joined(plain: Plain, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the state that `split` was given.

    Args:
        tensors: tensors by name.
    """
    if isinstance(plain, list):
        return [joined(each, tensors) for each in plain]
    if not isinstance(plain, dict):
        return plain
    if _TYPE not in plain:
        return {key: joined(each, tensors) for key, each in plain.items()}
    of = joined(plain[_OF], tensors)
    return _MAKERS[plain[_TYPE]](of) if plain[_TYPE] != "tensor" else tensors[of]


def _plain(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> Plain:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        if is_lazy(value):
            raise UserError(f"{place} has no shape yet: call the module once with a batch first")
        return _typed("tensor", _named(value.detach(), place, tensors))
    if kind is list:
        return _each(value, place, tensors)
    if kind in (set, frozenset):
        # sets are ordered differently in each process
        return _typed(kind.__name__, _each(sorted(value, key=repr), place, tensors))
    if kind in _COLLECTIONS:
        return _typed(kind.__name__, _each(value, place, tensors))
    if kind in _DICTS or kind is defaultdict:
        return _plain_dict(value, place, tensors)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        try:
            held = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
        except (TypeError, ValueError):
            raise UserError(f"{place} is a NumPy {value.dtype.str}, which torch does not have: convert it") from None
        name = "array" if isinstance(value, np.ndarray) else "number"
        return _typed(name, _typed("tensor", _named(held, place, tensors)))
    if kind is complex:
        return _typed("complex", [value.real, value.imag])
    if kind is bytes:
        return _typed("bytes", base64.b64encode(value).decode())
    if kind in (torch.dtype, torch.device):
        return _typed(kind.__name__, str(value).removeprefix("torch."))
    raise UserError(
        f"{place} is of type {kind.__name__}, but a checkpoint holds numbers, strings, tensors, lists and dicts:"
        " convert it to these"
    )


def _plain_dict(value: Mapping[Any, Any], place: str, tensors: dict[str, torch.Tensor]) -> Plain:
    kind = dict if isinstance(value, defaultdict) else type(value)
    if kind is dict and _TYPE not in value and all(type(key) is str for key in value):
        return {key: _plain(each, f"{place}.{key}", tensors) for key, each in value.items()}
    pairs = [
        [_plain(key, f"{place}, key {key!r},", tensors), _plain(each, f"{place}.{key}", tensors)]
        for key, each in value.items()
    ]
    return _typed(kind.__name__, pairs)


def _each(values: Iterable[Any], place: str, tensors: dict[str, torch.Tensor]) -> list[Plain]:
    return [_plain(value, f"{place}.{number}", tensors) for number, value in enumerate(values)]


def _typed(name: str, of: Plain) -> Plain:
    return {_TYPE: name, _OF: of}


def _named(tensor: torch.Tensor, place: str, tensors: dict[str, torch.Tensor]) -> str:
    """Add a tensor under a unique name, and return the name; keys with dots could cause duplicates."""
    name, number = place, 2
    while name in tensors:
        name, number = f"{place}~{number}", number + 1
    tensors[name] = tensor
    return name


_MAKERS: dict[str, Callable[[Any], Any]] = {
    **{kind.__name__: make for kind, make in (_COLLECTIONS | _DICTS).items()},
    "array": lambda of: of.numpy(),
    "number": lambda of: of.numpy()[()],
    "complex": lambda of: complex(*of),
    "bytes": base64.b64decode,
    "dtype": lambda of: getattr(torch, of),
    "device": torch.device,
}
