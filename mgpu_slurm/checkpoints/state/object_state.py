"""The current state of an object that checkpoints contain, and whether it is the same on all ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from mgpu_slurm.rank.communication.codec import Plain

_PIECE = 1 << 24
"""Bytes copied from a device at once."""


@dataclass(frozen=True)
class ObjectState:
    """The current state of an object."""

    plain: Plain
    tensors: Mapping[str, torch.Tensor]
    own: Mapping[str, torch.Tensor]
    """The tensors that may differ between ranks."""
    is_rank_0s: bool
    """Whether rank 0's state counts for all ranks, or all of its stage."""
    is_staged: bool
    """Whether each stage of a pipeline has another part."""

    @property
    def digest(self) -> tuple[int, int]:
        return (0, 0) if self.is_rank_0s else digest(self.plain, self.own)


def digest(plain: Plain, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Return a digest of a state as two 64-bit integers; equal states have equal digests.

    Args:
        plain: the part of the state that JSON can hold.
        tensors: tensors by name, not spread over ranks.
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
