"""Which device a rank takes; the tests marked `gpu` need one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mgpu_slurm.core import node_gpus
from mgpu_slurm.data import randomness
from mgpu_slurm.rank import preflight, rank_info
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.signals import StopFlag
from mgpu_slurm.request.spec import GPU_SHARE_VARIABLE
from mgpu_slurm.training.run import Run


@pytest.mark.parametrize(
    ("visible", "local_rank", "chosen"),
    [(1, 0, 0), (1, 3, 0), (4, 3, 3), (2, 3, 1)],
    ids=["single GPU", "bound by the site", "by local rank", "shared round-robin"],
)
def test_gpu_is_chosen_by_local_rank(
    visible: int, local_rank: int, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert rank_info.choose_device(RankInfo(local_rank, 4, local_rank, 4)) == torch.device("cuda", chosen)


@pytest.mark.gpu
def test_process_that_shares_a_gpu_may_use_its_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPU_SHARE_VARIABLE, "0.01")
    device = rank_info.choose_device(RankInfo())
    total = torch.cuda.get_device_properties(device).total_memory
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(total // 50, dtype=torch.uint8, device=device)
        # half of the part at least, whatever CUDA itself needs
        torch.empty(total // 400, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.parametrize(
    ("local_rank", "local_ranks", "gpus", "own"),
    [
        (0, 1, 4, [0, 1, 2, 3]),
        (0, 2, 4, [0, 1]),
        (1, 2, 4, [2, 3]),
        (3, 4, 4, [3]),
        (1, 2, 3, [1]),
        (3, 4, 2, [1]),
        (2, 4, 1, [0]),
    ],
)
def test_ranks_of_a_node_share_its_gpus(local_rank: int, local_ranks: int, gpus: int, own: list[int]) -> None:
    assert node_gpus.share_of_gpus(local_rank, local_ranks, gpus) == own


def test_rank_of_an_unknown_number_takes_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_info, "visible_gpus", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert rank_info.own_devices(RankInfo(1, 2, 1, 2)) == [torch.device("cuda", 1)]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert rank_info.own_devices(RankInfo(1, 2, 1, 2)) == [torch.device("cuda", 2), torch.device("cuda", 3)]


def test_instances_of_a_gpu_are_one_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_info.gpu_for_nccl(torch.device("cpu")) is None
    monkeypatch.setattr(rank_info, "gpu_identity", lambda device: "of the instance")
    gpu = torch.device("cuda", 0)
    seen = []
    for own in ("MIG-GPU-8f/1/0", "MIG-GPU-8f/2/0", "GPU-8f"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
        seen.append(rank_info.gpu_for_nccl(gpu))
    assert seen == ["GPU-8f (divided by MIG)", "GPU-8f (divided by MIG)", "of the instance"]
    told = preflight.shared_gpu_warnings([("n1", each) for each in seen])
    assert told.keys() == {0, 1}
    assert "the same GPU, GPU-8f (divided by MIG) of n1, and communicate without NCCL" in told[0]


def test_threads_divide_the_cores_unless_slurm_sets_cpus_per_task(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    assert rank_info.threads_per_rank(1) == cores
    assert rank_info.threads_per_rank(10 * cores) == 1
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "7")
    assert rank_info.threads_per_rank(2) == 7


@pytest.mark.parametrize(
    ("environ", "cores"),
    [
        ({}, 16),
        ({"SLURM_CPUS_ON_NODE": "64"}, 16),
        # of simulated nodes, or of a job that has a part of the node
        ({"SLURM_CPUS_ON_NODE": "8"}, 2),
        ({"SLURM_CPUS_ON_NODE": "3"}, 1),
        ({"SLURM_CPUS_ON_NODE": "64", "SLURM_CPUS_PER_TASK": "12"}, 12),
        # more than there are
        ({"SLURM_CPUS_PER_TASK": "80"}, 64),
    ],
)
def test_own_cores_are_those_of_the_task_or_a_share(
    environ: dict[str, str], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_info, "cores", lambda: 64)
    assert rank_info.own_cores(RankInfo(1, 8, 1, 4), environ) == cores


@pytest.mark.gpu
def test_model_batches_and_shards_are_on_the_gpu(tmp_path: Path) -> None:
    device = rank_info.choose_device(RankInfo())
    run = Run(RankInfo(), tmp_path, device, 1, StopFlag())
    model = run.wrap(nn.Linear(2, 1))
    assert next(model.parameters()).device == device
    for (batch,) in run.loader(TensorDataset(torch.ones(4, 2)), batch_size=2):
        assert batch.device == device
        run.backward(model(batch).mean())
    for (batch,) in run.shard(TensorDataset(torch.ones(4, 2))):
        assert batch.device == device
    run.close()


@pytest.mark.gpu
def test_gpu_random_state_is_restored() -> None:
    device = rank_info.choose_device(RankInfo())
    state = randomness.random_state(device)
    first = torch.rand(3, device=device)
    randomness.set_random_state(state, device)
    assert torch.equal(torch.rand(3, device=device), first)


def trained(folder: Path, device: torch.device, stop_at: int | None) -> tuple[int, list[torch.Tensor]]:
    """Train on this device, and leave at a step after a save, or continue to the end.

    Returns:
        the step at which it began, and the weights; none if it was left.
    """
    run = Run(RankInfo(), folder, device, 1, StopFlag())
    run.seed(0, deterministic=True)
    model = run.wrap(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    features = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    data = run.loader(TensorDataset(features), batch_size=8, shuffle=True)
    state = run.restore(model=model, optimizer=optimizer, data=data)
    began = state.step
    run.checkpoints(every_steps=2)
    for _ in state.epochs(2):
        for (batch,) in data:
            if run.step == stop_at:
                run.close()
                return began, []
            run.backward(model(batch).square().mean())
            run.update(optimizer)
    run.finish()
    run.close()
    return began, [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training_resumes_exactly_on_its_device(on: str, tmp_path: Path) -> None:
    device = torch.device(on) if on == "cpu" else rank_info.choose_device(RankInfo())
    try:
        _, whole = trained(tmp_path / "whole", device, None)
        assert trained(tmp_path / "parts", device, stop_at=7) == (0, [])
        began, weights = trained(tmp_path / "parts", device, None)
        # one that starts anew would come to the same weights
        assert began == 6
        assert all(map(torch.equal, whole, weights))
    finally:
        torch.use_deterministic_algorithms(False)
