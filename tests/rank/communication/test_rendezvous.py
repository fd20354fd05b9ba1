"""Ranks that find each other, or say who is missing."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from mgpu_slurm.core.errors import RendezvousError
from mgpu_slurm.job import store_server
from mgpu_slurm.rank import rank_info
from mgpu_slurm.rank.communication import rendezvous
from mgpu_slurm.rank.rank_info import RankInfo
from tests.ranks import join_ranks
from tests.support import wait_until


def joined(facts: RankInfo) -> str:
    rendezvous.join(facts, torch.device("cpu"), timeout=timedelta(seconds=2))
    torch.distributed.destroy_process_group()
    return "joined"


def joined_once_there(facts: RankInfo, place: Path, present: int) -> str:
    """However long their processes take to start, the ranks come at one time."""
    (place / str(facts.rank)).touch()
    wait_until(lambda: len(list(place.iterdir())) == present)
    return joined(facts)


def test_every_present_rank_names_the_missing_ranks(tmp_path: Path) -> None:
    present = [RankInfo(rank, 4, rank, 4, node_name="n1") for rank in (0, 2)]
    for answer in join_ranks(joined_once_there, present, tmp_path, 2):
        assert answer.startswith("RendezvousError: rank 1, 3 of 4 has not arrived after 2 s")


def test_missing_rank_0_is_named() -> None:
    (answer,) = join_ranks(joined, [RankInfo(1, 2, 1, 2, node_name="n7")])
    assert answer.startswith("RendezvousError: rank 0 has not arrived after 2 s (reported by rank 1 on n7)")


def test_ranks_with_different_world_sizes_cannot_join(tmp_path: Path) -> None:
    different = [RankInfo(0, 2, 0, 2), RankInfo(1, 3, 1, 3, node_name="n2")]
    answers = join_ranks(joined_once_there, different, tmp_path, 2)
    assert all("rank 1 on n2 expects 3 ranks, rank 0 expects 2" in answer for answer in answers)


def joined_with_gpu(facts: RankInfo) -> str | None:
    # which GPU a rank has is the one fact that no machine without GPUs can give
    rank_info.gpu_identity = lambda device: "GPU-a" if facts.rank < 2 else "GPU-b"
    return join_and_leave(facts)


def join_and_leave(facts: RankInfo) -> str | None:
    warning = rendezvous.join(facts, torch.device("cpu"), timeout=timedelta(seconds=20))
    # a rank that leaves while others still connect to each other would end them
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return warning


def test_ranks_sharing_a_gpu_are_warned() -> None:
    answers = join_ranks(joined_with_gpu, [RankInfo(rank, 3, rank, 3, node_name="n1") for rank in range(3)])
    shared = "ranks 0-1 compute on the same GPU, GPU-a of n1, and communicate without NCCL"
    assert answers == [shared, shared, None]


def joined_with_instance(facts: RankInfo) -> str | None:
    """Join as a rank on a MIG instance of its own; the first two are parts of one GPU."""
    gpu = "8f" if facts.rank < 2 else "9c"
    os.environ["CUDA_VISIBLE_DEVICES"] = f"MIG-GPU-{gpu}/{facts.rank}/0"
    rank_info.gpu_identity = lambda device: f"MIG-{facts.rank}"
    return join_and_leave(facts)


def test_ranks_on_instances_of_a_gpu_are_warned() -> None:
    answers = join_ranks(joined_with_instance, [RankInfo(rank, 3, rank, 3, node_name="n1") for rank in range(3)])
    shared = "ranks 0-1 compute on the same GPU, GPU-8f (divided by MIG) of n1, and communicate without NCCL"
    assert answers == [shared, shared, None]


def has_fewer_sockets_than_a_mesh(facts: RankInfo, place: Path, is_lazy: bool) -> bool:
    """Return whether this rank has fewer sockets than connections to all others, until a group is used."""
    if not is_lazy:
        os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    rendezvous.join(facts, torch.device("cpu"), timeout=timedelta(seconds=20))
    others = facts.world_size - 1
    if is_lazy:
        # sockets of the rendezvous may still be open
        wait_until(lambda: _sockets() < others)
    has_fewer = _sockets() < others
    # a rank that continues connects to those that still count
    (place / str(facts.rank)).touch()
    wait_until(lambda: len(list(place.iterdir())) == facts.world_size)
    said = torch.tensor([facts.rank])
    torch.distributed.broadcast(said, src=5)
    assert said.item() == 5
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return has_fewer


def _sockets() -> int:
    return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())


@pytest.mark.needs_torch("2.9")
@pytest.mark.parametrize("is_lazy", [True, False])
def test_default_group_connects_only_ranks_that_exchange_something(tmp_path: Path, is_lazy: bool) -> None:
    facts = [RankInfo(rank, 6, rank, 6) for rank in range(6)]
    assert join_ranks(has_fewer_sockets_than_a_mesh, facts, tmp_path, is_lazy) == [is_lazy] * 6


def test_ports_are_bound_outside_the_ephemeral_range() -> None:
    low, high = store_server._ephemeral_range()
    listeners = [store_server.bind("127.0.0.1") for _ in range(30)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    assert len(set(ports)) == 30
    assert not any(low <= port <= high for port in ports)


def test_ports_are_taken_from_the_range_of_the_site() -> None:
    with store_server.bind("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        with store_server.bind("127.0.0.1", range(port, port + 20)) as listener:
            assert port < listener.getsockname()[1] < port + 20
        with pytest.raises(RendezvousError, match=f"no port of SrunPortRange {port}-{port} could be bound"):
            store_server.bind("127.0.0.1", range(port, port + 1))


def test_missing_master_address_is_named_in_the_error() -> None:
    (answer,) = join_ranks(joined_without_address, [RankInfo(0, 2, 0, 2)])
    assert "rank 0 of 2 has no MASTER_ADDR and MASTER_PORT" in answer


def joined_without_address(facts: RankInfo) -> None:
    rendezvous.join(facts, torch.device("cpu"), environ={})
