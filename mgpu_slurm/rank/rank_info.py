"""Determine which rank this process is, for any launcher, and choose its device and number of threads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mgpu_slurm.core import node_gpus
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.hostlist import expand, expand_counts
from mgpu_slurm.core.processes import cores, cores_of_machine
from mgpu_slurm.request.spec import GPU_SHARE_VARIABLE, Spec
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.slurm.commands import THREADS_VARIABLE

if TYPE_CHECKING:
    import torch


CONTEXT_BYTES = 1 << 29
"""About what CUDA and its libraries need of a GPU's memory for each process."""


@dataclass(frozen=True)
class RankInfo:
    """A rank's place in its world of ranks."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    """Index of the node, from 0."""
    node_name: str = "localhost"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UserError(f"rank {self.rank} is outside of a world of {self.world_size} ranks")
        if not 0 <= self.local_rank < self.local_world_size:
            raise UserError(f"local rank {self.local_rank} is outside of the {self.local_world_size} ranks of its node")

    def torchrun_variables(self) -> dict[str, str]:
        """Return these facts as torchrun's environment variables, for scripts written for torchrun."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node),
        }


@dataclass(frozen=True)
class Rank:
    """A rank's context, once its output goes to its own log."""

    spec: Spec
    folder: RunFolder
    facts: RankInfo
    attempt: int
    listener: int | None
    """Bound socket on which this rank serves the rendezvous; see `job.socket_handoff`."""
    told: list[BaseException] = field(default_factory=list)
    """Errors that its log already shows."""
    process: int = 0
    """The process of a worker that trains several trials at once, from 1; 0 for others."""

    @property
    def number_in_logs(self) -> int:
        return self.process or self.facts.rank


def from_environment(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Return the rank according to torchrun's variables if they are set, else SLURM's step, else a world of one.

    Torchrun's variables come first because srun may have started torchrun itself, once per node.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _from_torchrun(environ)
    if "SLURM_STEP_NUM_TASKS" in environ:
        return from_slurm(environ)
    return RankInfo(node_name=os.uname().nodename)


def _from_torchrun(environ: Mapping[str, str]) -> RankInfo:
    local_rank = _number(environ, "LOCAL_RANK")
    return RankInfo(
        rank=_number(environ, "RANK"),
        world_size=_number(environ, "WORLD_SIZE"),
        local_rank=local_rank,
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE", local_rank + 1),
        node=_number(environ, "GROUP_RANK", 0),
        node_name=environ.get("SLURMD_NODENAME", os.uname().nodename),
    )


def from_slurm(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Return the rank according to the variables that srun sets for its tasks.

    The step's variables override the job's, which are also set in the batch script, outside of any srun.
    """
    node = _number(environ, "SLURM_NODEID")
    names = expand(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS"))
    return RankInfo(
        rank=_number(environ, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_world_size=expand_counts(per_node)[node] if per_node else world_size,
        node=node,
        node_name=environ.get("SLURMD_NODENAME") or (names[node] if node < len(names) else os.uname().nodename),
    )


def _number(environ: Mapping[str, str], name: str, default: int | str | None = None) -> int:
    text = environ.get(name, default)
    if text is None:
        raise UserError(f"the launcher set other rank variables but not {name}: start this under srun or torchrun")
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}={text!r}: expected a whole number") from None


# -- its device and threads


def choose_device(facts: RankInfo) -> torch.device:
    """Select and return the first GPU of this local rank, or return the CPU.

    A rank that sees one GPU uses that one, whatever its local rank, because some sites bind GPUs to tasks. If several
    trials share the GPU, it may use its part of the memory.
    """
    use_own_gpus(facts)
    import torch

    device = own_devices(facts)[0]
    if device.type == "cuda":
        torch.cuda.set_device(device)
        share = float(os.environ.get(GPU_SHARE_VARIABLE, "1"))
        if share < 1:
            # torch counts only its own tensors
            context = CONTEXT_BYTES / torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(max(share - context, share / 2), device)
    return device


def use_own_gpus(facts: RankInfo) -> None:
    """Change the variables of GPUs where this rank would use another one's otherwise (MIG), or none.

    CUDA and HIP read them when a process first uses a GPU.
    """
    os.environ.update(node_gpus.own_variables(os.environ, facts.local_rank, facts.local_world_size))


def gpu_facts(device: torch.device) -> dict[str, object]:
    """Return what a run's state says of a GPU; nothing of the CPU."""
    import torch

    if device.type != "cuda":
        return {}
    facts = torch.cuda.get_device_properties(device)
    return {"gpu": facts.name, "gpu_memory": facts.total_memory}


def own_devices(facts: RankInfo) -> list[torch.device]:
    """Return the devices of this local rank: its equal share of the visible GPUs, or the CPU."""
    import torch

    visible = visible_gpus()
    if not visible:
        return [torch.device("cpu")]
    # a launcher that does not say how many ranks there are may start one for each GPU
    is_unknown = "LOCAL_RANK" in os.environ and "LOCAL_WORLD_SIZE" not in os.environ
    ranks = visible if is_unknown else facts.local_world_size
    return [torch.device("cuda", index) for index in node_gpus.share_of_gpus(facts.local_rank, ranks, visible)]


def visible_gpus() -> int:
    """Return the number of GPUs that torch can use in this process."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_identity(device: torch.device) -> str | None:
    """Return the UUID of a device's GPU, independent of its index in this process; None for the CPU."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def gpu_for_nccl(device: torch.device) -> str | None:
    """Return the GPU behind a device as NCCL sees it, which takes MIG instances for their GPU; None for the CPU."""
    own = gpu_identity(device)
    return own and (node_gpus.divided_gpu(os.environ) or own)


def visible_gpu_identities() -> list[str]:
    """Return the UUIDs of all GPUs that torch can use in this process."""
    import torch

    found = (gpu_identity(torch.device("cuda", index)) for index in range(visible_gpus()))
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


def own_cores(facts: RankInfo, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of cores of this rank: its own ones under SLURM, or its share of those of its node, which may
    be simulated."""
    visible = cores()
    share = min(visible, int(environ.get("SLURM_CPUS_ON_NODE") or visible)) // facts.local_world_size
    return max(1, min(visible, int(environ.get("SLURM_CPUS_PER_TASK") or share)))


def most_cores(facts: RankInfo) -> int:
    """Return the number of cores that each rank of this machine could have."""
    return max(1, cores_of_machine() // facts.local_world_size)
