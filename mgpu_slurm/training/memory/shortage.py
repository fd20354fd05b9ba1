"""Say where the memory is when it has run out: in parameters, gradients, optimizer states, and variables of the job."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from mgpu_slurm.core.formatting import binary_size, counted, parse_size
from mgpu_slurm.data.batching.nests import leaves_of
from mgpu_slurm.rank.torch_adapter import is_dtensor, local_part
from mgpu_slurm.training.memory.job_variables import Look, variables_of

LOOK_SECONDS = 2.0
"""Longest time of the search for variables."""
SHOWN_VARIABLES = 3
LEAST_SHARE = 0.02
"""Part of all tensors that a variable has to hold to be shown."""
FRAGMENTED = 0.2
"""Part of the reserved memory that is not allocated, from which on it is said to be in pieces."""


_SIZE = r"([\d.]+ (?:B|KiB|MiB|GiB))"
_IN_MESSAGE = (
    re.compile(rf"{_SIZE} is allocated by PyTorch"),
    re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
    re.compile(rf"has a total capacity of {_SIZE}"),
)


@dataclass(frozen=True)
class Pool:
    """A GPU's memory in bytes."""

    allocated: int
    reserved: int
    """What torch has taken from the GPU for its tensors, in use or not."""
    total: int

    @staticmethod
    def of(message: str) -> Pool | None:
        """Return the memory of a GPU from torch's message; None for any other one.

        What the failed operation held is free again when the error arrives.
        """
        found = [pattern.search(message.replace(" bytes", " B")) for pattern in _IN_MESSAGE]
        allocated, unused, total = (parse_size(each[1]) if each else None for each in found)
        if allocated is None or unused is None or total is None:
            return None
        return Pool(allocated, allocated + unused, total)


@dataclass(frozen=True)
class Holding:
    """A variable of the job, and what it holds."""

    place: str
    name: str
    tensors: int
    size: int
    """Bytes."""
    memory: frozenset[int] = frozenset()
    """Addresses of the memory."""


def report(
    error: BaseException, models: Iterable[torch.nn.Module], optimizers: Iterable[Any], device: torch.device
) -> str:
    """Return a text of one or more lines.

    Args:
        error: what was raised when memory ran out.
        device: where it ran out.
    """
    parameters = [parameter for model in models for parameter in model.parameters()]
    # an object that is no torch optimizer may keep its state elsewhere
    states = [leaf for each in optimizers for leaf in leaves_of(dict(getattr(each, "state", {})))]
    held: dict[str, list[torch.Tensor]] = {
        "parameters": [*parameters],
        "gradients": [each.grad for each in parameters if each.grad is not None],
        "optimizer": [each for each in states if isinstance(each, torch.Tensor)],
    }
    # others are in main memory
    kinds = {name: _size([each for each in there if each.device.type == device.type]) for name, there in held.items()}
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    holdings = [*_holdings(innermost and innermost.tb_frame, device)]
    return "\n".join(lines_of(kinds, Pool.of(str(error)), holdings))


def lines_of(kinds: dict[str, int], pool: Pool | None, holdings: list[Holding]) -> Iterator[str]:
    """Yield the lines of a report.

    Args:
        kinds: bytes of parameters, gradients and optimizer states.
        pool: None if the device is no GPU.
        holdings: variables of the job.
    """
    held = sum(kinds.values())
    if pool is not None:
        kinds = kinds | {"other": max(0, pool.allocated - held)}
    shown = ", ".join(f"{name} {binary_size(size)}" for name, size in kinds.items())
    if pool is None:
        yield f"out of memory: {shown}"
    else:
        used = f"tensors use {binary_size(pool.allocated)} of {binary_size(pool.reserved)} reserved"
        yield f"out of memory: {used}; the GPU has {binary_size(pool.total)}"
        yield f"  {shown}"
    least = LEAST_SHARE * (held if pool is None else pool.allocated)
    for each in _distinct(holdings)[:SHOWN_VARIABLES]:
        if each.size >= least:
            yield f"  {each.place}: {each.name} holds {binary_size(each.size)} in {counted(each.tensors, 'tensor')}"
    if pool is not None and pool.reserved - pool.allocated > FRAGMENTED * pool.reserved:
        part = (pool.reserved - pool.allocated) / pool.reserved
        yield (
            f"  {part:.0%} of the reserved memory is in pieces that no tensor fits into: set"
            " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )


def _holdings(frame: FrameType | None, device: torch.device) -> Iterator[Holding]:
    """Yield the variables of the job's functions that called a frame, with tensors on the device."""
    for variable, tensors in variables_of(frame, Look(time.perf_counter() + LOOK_SECONDS)):
        if there := [each for each in tensors if each.device.type == device.type]:
            sizes = _sizes(there)
            yield Holding(str(variable.place()), variable.path, len(there), sum(sizes.values()), frozenset(sizes))


def _distinct(holdings: Iterable[Holding]) -> list[Holding]:
    """Return variables, those that hold the most first, without those that hold the same memory as others."""
    found: list[Holding] = []
    seen: set[int] = set()
    for each in sorted(holdings, key=lambda each: -each.size):
        if not each.memory or not each.memory <= seen:
            found.append(each)
            seen |= each.memory
    return found


def _size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(_sizes(tensors).values())


def _sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of tensors on this rank, by address: views of one memory count once."""
    sizes = {}
    for each in (local_part(each) if is_dtensor(each) else each for each in tensors):
        try:
            sizes[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        except (RuntimeError, NotImplementedError):
            # it has none, but consists of other tensors
            sizes[id(each)] = each.numel() * each.element_size()
    return sizes
