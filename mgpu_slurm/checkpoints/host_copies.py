"""Copies of a rank's tensors in reusable main memory, so that training continues while they are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mgpu_slurm.checkpoints.tensors import is_spread
from mgpu_slurm.checkpoints.writer import Part, is_writable
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.rank import torch_adapter


class HostCopies:
    """Copies of successive states, each in the memory of the previous one."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, tensors: Mapping[str, torch.Tensor], is_main: bool) -> dict[str, Part]:
        """Copy the tensors that this rank has to save.

        These are its own parts of spread tensors and, if `is_main`, the tensors that all ranks have in common.
        The result of the previous call becomes invalid.
        """
        kept = {name: own for name, tensor in tensors.items() if (own := _own(tensor, is_main)) is not None}
        copies = {name: self._buffer(name, local) for name, (local, _) in kept.items()}
        if kept:
            torch_adapter.copy_all(list(copies.values()), [local for local, _ in kept.values()])
        if any(local.is_cuda for local, _ in kept.values()):
            torch.cuda.current_stream().synchronize()
        self._buffers = copies
        return {name: Part(copies[name], offsets) for name, (_, offsets) in kept.items()}

    def _buffer(self, name: str, like: torch.Tensor) -> torch.Tensor:
        known = self._buffers.get(name)
        if known is not None and (known.shape, known.dtype) == (like.shape, like.dtype):
            return known
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


def _own(tensor: Any, is_main: bool) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """Return this rank's part of a tensor and its offsets in the whole, or None if other ranks save it."""
    if not is_spread(tensor):
        return (tensor, (0,) * tensor.dim()) if is_main else None
    place = tensor.device_mesh.get_coordinate()
    if any(placement.is_replicate() and at for placement, at in zip(tensor.placements, place, strict=True)):
        return None
    chunk = torch_adapter.own_chunk(tensor)
    local = tensor.to_local()
    # a rank has no rows if there are more ranks than rows
    return (local, tuple(chunk.offsets)) if local.numel() or not tensor.numel() else None


def refuse_unwritable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that a file cannot hold.

    Raises:
        UserError: a tensor is of such a kind; the message names it.
    """
    for name, tensor in tensors.items():
        kind = _unwritable_kind(tensor)
        if kind is not None:
            raise UserError(f"{name} is {kind}: a checkpoint cannot hold that")


def _unwritable_kind(tensor: torch.Tensor) -> str | None:
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return f"a quantized tensor of {tensor.dtype}"
    if tensor.is_meta:
        return "a tensor on the meta device, without values"
    if tensor.layout is not torch.strided or not is_writable(tensor.dtype):
        return f"a {tensor.layout} tensor of {tensor.dtype}"
    return None
