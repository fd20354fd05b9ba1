"""What a rank keeps of tensors, copied into main memory that is used again: training goes on while it is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mgpu_slurm.checkpoints.tensors import Part, is_writable
from mgpu_slurm.errors import UserError

PIECE = 1 << 24
"""Bytes that are summed at a time, a multiple of 8."""


class HostCopies:
    """Copies of one state after the other, each in the memory of the one before."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, tensors: Mapping[str, torch.Tensor], is_main: bool) -> dict[str, Part]:
        """Copies what this rank has to keep: its own parts of tensors that are spread over ranks, and on the first
        rank those that all ranks have.

        What came out of the call before is not valid any more.

        Raises:
            UserError: a tensor of a kind that files cannot hold.
        """
        kept = {name: own for name, tensor in tensors.items() if (own := _own(tensor, is_main)) is not None}
        for name, (local, _) in kept.items():
            _refuse_unwritable(name, local)
        copies = {name: self._buffer(name, local) for name, (local, _) in kept.items()}
        if kept:
            torch._foreach_copy_(list(copies.values()), [local for local, _ in kept.values()], non_blocking=True)
        if any(local.is_cuda for local, _ in kept.values()):
            torch.cuda.current_stream().synchronize()
        self._buffers = copies
        return {name: Part(copies[name], offsets) for name, (_, offsets) in kept.items()}

    def _buffer(self, name: str, like: torch.Tensor) -> torch.Tensor:
        known = self._buffers.get(name)
        if known is not None and (known.shape, known.dtype) == (like.shape, like.dtype):
            return known
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


class Traces:
    """What tells whether tensors are what they were: sums of all their bits, which take no memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], is_main: bool) -> None:
        """
        Args:
            is_main: see `HostCopies.take`; other tensors do not matter.

        Raises:
            UserError: see `HostCopies.take`.
        """
        self._is_main = is_main
        self._sums = self._sums_of(tensors)

    def are_of(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        now = self._sums_of(tensors)
        return now.keys() == self._sums.keys() and all(
            shape == now[name][0] and sums.equal(now[name][1]) for name, (shape, sums) in self._sums.items()
        )

    def _sums_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[Any, torch.Tensor]]:
        found = {}
        for name, tensor in tensors.items():
            own = _own(tensor, self._is_main)
            if own is not None:
                _refuse_unwritable(name, own[0])
                found[name] = ((own[0].shape, own[0].dtype), _sums(own[0]))
        return found


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Of its bits as whole numbers, alone and times their place, modulo 2 to the 64; on its device, which is not waited
    for."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    sums = flat[whole:].sum(dtype=torch.int64) * torch.ones(2, dtype=torch.int64, device=flat.device)
    for begin in range(0, whole, PIECE):
        piece = flat[begin : min(begin + PIECE, whole)]
        # a part of a larger tensor may begin anywhere
        numbers = (piece if piece.storage_offset() % 8 == 0 else piece.clone()).view(torch.int64)
        places = torch.arange(begin + 1, begin + 1 + numbers.numel(), device=flat.device)
        sums += torch.stack([numbers.sum(), (numbers * places).sum()])
    return sums


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, told without loading what those need."""
    return hasattr(tensor, "__create_chunk_list__")


def _own(tensor: Any, is_main: bool) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """What this rank keeps of a tensor, and where that begins in the whole; None where others keep it."""
    if not is_spread(tensor):
        return (tensor, (0,) * tensor.dim()) if is_main else None
    place = tensor.device_mesh.get_coordinate()
    if any(placement.is_replicate() and at for placement, at in zip(tensor.placements, place, strict=True)):
        return None
    (chunk,) = tensor.__create_chunk_list__()
    local = tensor.to_local()
    # there may be more ranks than rows
    return (local, tuple(chunk.offsets)) if local.numel() or not tensor.numel() else None


def _refuse_unwritable(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or not is_writable(tensor.dtype):
        raise UserError(f"{name} is a {tensor.layout} tensor of {tensor.dtype}: a checkpoint cannot hold that")
