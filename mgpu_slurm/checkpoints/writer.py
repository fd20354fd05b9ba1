"""Write tensors to safetensors files, as a stream with a checksum, from copies that a rank takes of them.

A file consists of the length of the header in eight bytes, little-endian; the header, which is JSON with each tensor's
type, shape and position; and the bytes of all tensors (https://github.com/huggingface/safetensors#format). If a tensor
is spread over ranks, each rank writes its own part. The header contains the offsets of a part in the whole in the
format of torch.distributed.checkpoint, whose HuggingFaceStorageReader can read these files too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import torch

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.rank import torch_adapter
from mgpu_slurm.rank.torch_adapter import is_dtensor

SUFFIX = ".safetensors"

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_PIECE = 1 << 22
"""Bytes written and checksummed at once; other threads that need the interpreter wait for that long."""

_SYNC_EVERY = 1 << 26
"""Bytes between two syncs to disk; a single sync at the end could take long without any sign of progress."""


@dataclass(frozen=True)
class Part:
    """A rank's part of a tensor: all of it, or its share of a tensor that is spread over ranks."""

    values: torch.Tensor
    """On the CPU, contiguous."""
    offsets: tuple[int, ...]
    """Start of the part in the whole tensor, by dimension."""


@dataclass(frozen=True)
class Written:
    """Size and checksum of a file, to verify that it is intact."""

    size: int
    """Bytes."""
    checksum: int
    """CRC-32C."""


def is_writable(dtype: torch.dtype) -> bool:
    return dtype in _TYPES


def write(path: Path, parts: Mapping[str, Part], on_progress: Callable[[], None] = lambda: None) -> Written:
    """Write a new file and sync it to disk.

    Args:
        on_progress: called after each piece.

    Raises:
        OSError: the file cannot be written.
    """
    size = checksum = synced = 0
    with open(path, "xb", buffering=0) as file:
        for piece in _pieces(parts):
            size, checksum = size + len(piece), google_crc32c.extend(checksum, bytes(piece))
            _write_all(file.fileno(), piece)
            if size - synced >= _SYNC_EVERY:
                os.fdatasync(file.fileno())
                synced = size
            on_progress()
        os.fsync(file.fileno())
    return Written(size, checksum)


def _pieces(parts: Mapping[str, Part]) -> Iterator[memoryview]:
    header = _header(parts)
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for part in parts.values():
        held = memoryview(part.values.reshape(-1).view(torch.uint8).numpy().data)
        for start in range(0, len(held), _PIECE):
            yield held[start : start + _PIECE]


def _header(parts: Mapping[str, Part]) -> bytes:
    offsets = {name: {"saved_offsets": part.offsets} for name, part in parts.items()}
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}}
    end = 0
    for name, part in parts.items():
        start, end = end, end + part.values.numel() * part.values.element_size()
        entries[name] = {
            "dtype": _TYPES[part.values.dtype],
            "shape": list(part.values.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries).encode()
    # pad, so that the tensors' bytes begin at a multiple of eight
    return text + b" " * (-len(text) % 8)


def _write_all(descriptor: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(descriptor, piece) :]


def summed(path: Path) -> Written:
    """Return the current size and checksum of a file.

    Raises:
        OSError: the file cannot be read.
    """
    size = checksum = 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            size, checksum = size + len(piece), google_crc32c.extend(checksum, piece)
    return Written(size, checksum)


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
    if not is_dtensor(tensor):
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
            raise UserError(f"{name} is {kind}, which a checkpoint cannot hold")


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
