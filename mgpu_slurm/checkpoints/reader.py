"""Tensors of a checkpoint, read on demand: whole, or a rank's part, independent of which ranks wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from mgpu_slurm.rank import torch_adapter
from mgpu_slurm.rank.torch_adapter import is_dtensor


@dataclass(frozen=True)
class _Stored:
    """A part of a tensor in a file."""

    file: Any
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class OfRank(Mapping[str, torch.Tensor]):
    """The tensors that one rank had: those it saved separately, and the shared ones for all other names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], prefix: str) -> None:
        """
        Args:
            prefix: prefix of the names of the tensors that the rank saved separately.
        """
        self._tensors = tensors
        self._prefix = prefix

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        own = f"{self._prefix}{name}"
        return self._tensors[own if own in self._tensors else name]


class StoredTensors(Mapping[str, torch.Tensor]):
    """Tensors by name: whole on the CPU, or spread over this run's ranks like the run's tensor of that name."""

    def __init__(self, files: Sequence[Path], like: Mapping[str, torch.Tensor]) -> None:
        """
        Args:
            like: tensors of the run that resumes.
        """
        self._like = like
        self._parts: dict[str, list[_Stored]] = {}
        for path in files:
            # safe_open's methods have no type hints
            file: Any = safe_open(path, framework="pt")
            offsets = loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118
                shape = tuple(file.get_slice(name).get_shape())
                part = _Stored(file, tuple(offsets[name]["saved_offsets"]), shape)
                self._parts.setdefault(name, []).append(part)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __getitem__(self, name: str) -> torch.Tensor:
        like: Any = self._like.get(name)
        if like is None or not is_dtensor(like):
            return self._region(name, (0,) * len(self._shape(name)), self._shape(name))
        local = torch.empty_like(like.to_local(), device="cpu")
        chunk = torch_adapter.own_chunk(like)
        if local.numel():
            local.copy_(self._region(name, tuple(chunk.offsets), tuple(chunk.sizes)))
        # a tensor of the same type, without importing DTensor's modules
        spread: torch.Tensor = type(like).from_local(
            local.to(like.device), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
        )
        return spread

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        ends = [
            [start + size for start, size in zip(part.offsets, part.shape, strict=True)] for part in self._parts[name]
        ]
        return tuple(map(max, zip(*ends, strict=True)))

    def _region(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        parts = self._parts[name]
        if len(parts) == 1 and (parts[0].offsets, parts[0].shape) == (start, shape):
            stored: torch.Tensor = parts[0].file.get_tensor(name)
            # a mapped file keeps its disk space even after it was deleted
            return stored.clone()
        region: torch.Tensor | None = None
        for part in parts:
            overlap = [
                (max(a, b), min(a + n, b + m))
                for a, n, b, m in zip(start, shape, part.offsets, part.shape, strict=True)
            ]
            if any(low >= high for low, high in overlap):
                continue
            there = tuple(slice(low - b, high - b) for (low, high), b in zip(overlap, part.offsets, strict=True))
            here = tuple(slice(low - a, high - a) for (low, high), a in zip(overlap, start, strict=True))
            values = part.file.get_slice(name)[there]
            if region is None:
                region = torch.empty(shape, dtype=values.dtype)
            region[here] = values
        assert region is not None, (name, start, shape)
        return region
