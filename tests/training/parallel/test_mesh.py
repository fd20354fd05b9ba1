from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.signals import StopFlag
from mgpu_slurm.request.parallelism import Layout
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks


def ask_for_mesh(run: Run) -> tuple[tuple[str, ...] | None, list[int], list[int], bool]:
    mesh = run.mesh
    # a rank that leaves while others still connect to each other would end them
    torch.distributed.barrier()
    return mesh.mesh_dim_names, mesh.mesh.flatten().tolist(), [*(mesh.get_coordinate() or [])], run.mesh is mesh


def test_ranks_that_exchange_the_most_are_neighbours_and_a_mesh_is_made_once() -> None:
    names = ("pipeline", "replicate", "shard", "tensor")
    found = run_ranks(ask_for_mesh, 4, layout=Layout("hsdp", replicas=2, shards=2))
    assert found == [(names, [0, 1, 2, 3], [0, rank // 2, rank % 2, 0], True) for rank in range(4)]
    found = run_ranks(ask_for_mesh, 4, layout=Layout("fsdp", shards=2, tensor=2))
    assert found == [(names, [0, 1, 2, 3], [0, 0, rank // 2, rank % 2], True) for rank in range(4)]


def test_one_rank_has_no_mesh(tmp_path: Path) -> None:
    run = Run(RankInfo(), tmp_path, torch.device("cpu"), 1, StopFlag())
    with pytest.raises(UserError, match=r"run\.mesh: the run has one rank, and a mesh needs several"):
        _ = run.mesh
    run.close()
