"""Encode a state as JSON and named tensors: exactly, and such that decoding cannot run code.

JSON has neither tuples nor tensors, and only string keys. Values that JSON lacks become an object with the key `!` for
the type and the key `of` for the content: `{"!": "tuple", "of": [1, 2]}`. Numbers are restored bit for bit.
"""

from __future__ import annotations

import base64
import importlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.rank import torch_adapter

StateDict: TypeAlias = dict[str, Any]
"""A state as torch's `state_dict` methods return it: tensors, numbers and collections of them, by name."""

Plain: TypeAlias = Any
"""The part of a state that JSON can hold."""

_TYPE, _OF = "!", "of"

_COMPOSING = {"torchao"}
"""Packages whose classes of tensors may be named in a checkpoint; importing one must not run code of the checkpoint."""

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


def names_in_parts(plain: Plain) -> set[str]:
    """Return the names of the tensors that make up parts of divided tensors."""
    found: set[str] = set()

    def search(value: Plain, is_in_part: bool) -> None:
        if isinstance(value, list):
            for each in value:
                search(each, is_in_part)
        elif isinstance(value, dict):
            if is_in_part and value.get(_TYPE) == "tensor":
                found.add(value[_OF])
            for each in value.values():
                search(each, is_in_part or value.get(_TYPE) == "part")

    search(plain, False)
    return found


def type_of(plain: Plain) -> str | None:
    """Return the name of the type of an encoded value that JSON does not have; None for any other value."""
    return plain.get(_TYPE) if isinstance(plain, dict) else None


def items(plain: Plain) -> list[list[Plain]]:
    """Return the keys and values of an encoded dictionary, both encoded."""
    return [[key, each] for key, each in plain.items()] if _TYPE not in plain else list(plain[_OF])


def with_items(plain: Plain, pairs: list[list[Plain]]) -> Plain:
    """Return an encoded dictionary of the same type with other items."""
    return dict(pairs) if _TYPE not in plain else _typed(plain[_TYPE], pairs)


def _plain(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> Plain:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        if is_lazy(value):
            raise UserError(f"{place} has no shape yet: call the module once with a batch first")
        if torch_adapter.is_dtensor(value) and torch_adapter.is_composed(torch_adapter.local_part(value)):
            return _typed("part", _composed(torch_adapter.local_part(value), place, tensors))
        if torch_adapter.is_composed(value) and not value.is_nested:
            return _composed(value, place, tensors)
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


def _composed(value: torch.Tensor, place: str, tensors: dict[str, torch.Tensor]) -> Plain:
    """Encode a tensor that consists of others."""
    components, context = torch_adapter.components(value)
    kind = type(value)
    if kind.__module__.partition(".")[0] not in _COMPOSING:
        raise UserError(f"{place} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold")
    content = [f"{kind.__module__}:{kind.__qualname__}", components, context]
    return _typed("composed", _each(content, place, tensors))


def _compose(content: list[Any]) -> torch.Tensor:
    name, components, context = content
    module, _, kind = name.partition(":")
    if module.partition(".")[0] not in _COMPOSING:
        raise UserError(f"the checkpoint holds a {name}, which is not one of {', '.join(sorted(_COMPOSING))}")
    try:
        return torch_adapter.composed(getattr(importlib.import_module(module), kind), components, context)
    except ImportError:
        raise UserError(f"the checkpoint holds a {name}: install {module.partition('.')[0]}") from None


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


@dataclass(frozen=True)
class RankPart:
    """A rank's part of a tensor that is divided over ranks, and cannot be divided in another way."""

    tensor: torch.Tensor


_MAKERS: dict[str, Callable[[Any], Any]] = {
    **{kind.__name__: make for kind, make in (_COLLECTIONS | _DICTS).items()},
    "array": lambda of: of.numpy(),
    "number": lambda of: of.numpy()[()],
    "complex": lambda of: complex(*of),
    "bytes": base64.b64decode,
    "composed": _compose,
    "part": RankPart,
    "dtype": lambda of: getattr(torch, of),
    "device": torch.device,
}
