"""Choose the device and the number of threads of a rank."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mgpu_slurm.core.processes import cores
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.slurm.commands import THREADS_VARIABLE

if TYPE_CHECKING:
    import torch


def choose(facts: RankInfo) -> torch.device:
    """Select and return the GPU of this local rank among the visible ones, or return the CPU.

    A rank that sees one GPU uses that one, whatever its local rank, because some sites bind GPUs to tasks. If there are
    more ranks than GPUs, they share the GPUs in turn.
    """
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", facts.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def visible_gpus() -> int:
    """Return the number of GPUs that torch can use in this process."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def identity(device: torch.device) -> str | None:
    """Return the UUID of a device's GPU, independent of its index in this process; None for the CPU."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def visible_identities() -> list[str]:
    """Return the UUIDs of all GPUs that torch can use in this process."""
    import torch

    found = (identity(torch.device("cuda", index)) for index in range(visible_gpus()))
    return [gpu for gpu in found if gpu is not None]


def limit_threads(ranks_on_node: int) -> None:
    """Set OMP_NUM_THREADS for this process and its children, unless it is already set."""
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = os.environ[THREADS_VARIABLE] = str(threads_per_rank(ranks_on_node))


def threads_per_rank(ranks_on_node: int) -> int:
    """Return the number of OMP threads: cores / ranks, unless SLURM gave each task its own cores.

    Too many threads cost more than too few: on 2 cores, 2 ranks ran 1.7 times slower with 2 threads each than with 1.
    """
    return int(os.environ.get("SLURM_CPUS_PER_TASK") or max(1, cores() // ranks_on_node))
