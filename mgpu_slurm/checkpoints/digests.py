"""Whether ranks hold the same state, told by a number instead of the state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_PIECE = 1 << 24
"""Bytes that are taken from a device at once."""


def digest(plain: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Return a digest of a state as two integers of 64 bits; equal states have equal ones.

    Args:
        plain: what JSON can hold of the state.
        tensors: by their names, not spread over ranks.
    """
    summed = hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        summed.update(f"\n{name} {tensors[name].dtype} {list(tensors[name].shape)}\n".encode())
        for piece in _pieces(tensors[name]):
            summed.update(piece)
    found = summed.digest()
    return int.from_bytes(found[:8], "little", signed=True), int.from_bytes(found[8:], "little", signed=True)


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    held = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, held.numel(), _PIECE):
        yield held[start : start + _PIECE].cpu().numpy().data
