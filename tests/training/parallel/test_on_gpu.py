"""Strategies and precisions on a GPU; `make gpu` runs these tests."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgpu_slurm.rank import rank_info
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.signals import StopFlag
from mgpu_slurm.request.parallelism import Layout, Parallelism
from mgpu_slurm.training.run import Run

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def make_run(folder: Path, layout: Layout | None = None) -> Run:
    return Run(RankInfo(), folder, rank_info.choose_device(RankInfo()), 1, StopFlag(), layout=layout)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(64, 16))


def train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[float]:
    inputs = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).to(run.device)
    losses = []
    for _ in range(steps):
        loss = model(inputs).square().mean()
        run.backward(loss)
        run.update(optimizer, clip=1.0)
        losses.append(float(loss.detach()))
    return losses


def losses_of(folder: Path, options: Parallelism, **wrapping: Any) -> list[float]:
    run = make_run(folder, options.layout(1, 1))
    model = run.wrap(make_model(), blocks=(Block,), **wrapping)
    try:
        return train(run, model, torch.optim.SGD(model.parameters(), lr=0.1))
    finally:
        run.close()


@pytest.mark.parametrize(("precision", "close"), [("tf32", 0.02), ("bf16", 0.05), ("fp16", 0.05)])
def test_lower_precision_trains_nearly_as_float32(precision: Any, close: float, tmp_path: Path) -> None:
    expected = losses_of(tmp_path / "fp32", Parallelism())
    assert losses_of(tmp_path / "low", Parallelism(precision=precision)) == pytest.approx(expected, rel=close)
    torch.set_float32_matmul_precision("highest")


def test_fp8_trains_nearly_as_float32(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU computes no products in 8 bits")
    pytest.importorskip("torchao")
    expected = losses_of(tmp_path / "fp32", Parallelism())
    assert losses_of(tmp_path / "fp8", Parallelism(precision="fp8")) == pytest.approx(expected, rel=0.15)


def test_optimizer_in_8_bits_resumes_exactly(tmp_path: Path) -> None:
    optimizers = pytest.importorskip("torchao.optim")

    def trained(steps: int) -> list[torch.Tensor]:
        run = make_run(tmp_path)
        model = run.wrap(make_model())
        optimizer = optimizers.AdamW8bit(model.parameters(), lr=1e-3)
        state = run.restore(model=model, optimizer=optimizer)
        train(run, model, optimizer, steps - state.step)
        run.save()
        run.finish()
        run.close()
        return [each.detach().clone() for each in model.parameters()]

    torch.use_deterministic_algorithms(True)
    try:
        run = make_run(tmp_path / "whole")
        model = run.wrap(make_model())
        train(run, model, optimizers.AdamW8bit(model.parameters(), lr=1e-3), 6)
        run.close()
        trained(3)
        assert all(map(torch.equal, trained(6), model.parameters()))
    finally:
        torch.use_deterministic_algorithms(False)


def test_recomputation_takes_less_memory(tmp_path: Path) -> None:
    def peak(recompute: bool) -> int:
        run = make_run(tmp_path / str(recompute))
        model = run.wrap(nn.Sequential(*(Block() for _ in range(8))), blocks=(Block,), recompute=recompute)
        inputs = torch.randn(16384, 64, device=run.device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(inputs).square().mean().backward()
        run.close()
        return torch.cuda.max_memory_allocated() - before

    assert peak(True) < 0.6 * peak(False)


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank with NCCL."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_model_sharded_by_hand_on_one_rank_trains_like_a_plain_one(nccl: None, tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    expected = losses_of(tmp_path / "plain", Parallelism())
    run = make_run(tmp_path / "sharded")
    model = copy.deepcopy(make_model()).to(run.device)
    mesh = init_device_mesh("cuda", (1,))
    for part in (model[0], model[1], model):
        fully_shard(part, mesh=mesh)
    wrapped = run.wrap(model)
    assert train(run, wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1)) == pytest.approx(expected, rel=1e-4)
    run.close()


def test_devices_are_the_gpus_of_this_rank(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert run.devices == [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    assert run.devices[0] == run.device
    run.close()


def test_data_parallel_trains_like_one_gpu(tmp_path: Path) -> None:
    expected = losses_of(tmp_path / "plain", Parallelism())
    assert losses_of(tmp_path / "dp", Parallelism("dp")) == pytest.approx(expected, rel=1e-4)
