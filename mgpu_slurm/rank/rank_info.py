"""Determine which rank this process is, for any launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.hostlist import expand, expand_counts
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.request.spec import (
    Spec,
)


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
