"""Model FLOPs utilization: what a model computes, against what its GPU can do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from mgpu_slurm.core.files import read_jsonl
from mgpu_slurm.request.parallelism import Layout
from mgpu_slurm.training.run import Run
from mgpu_slurm.training.speed.flops import FlopCount, peak_flops
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 80GB HBM3", "fp32", 494),
        ("NVIDIA H100 PCIe", "fp8", 1513),
        ("NVIDIA H200", "fp16", 989),
        ("NVIDIA GH200 480GB", "bf16", 989),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A10", "bf16", 125),
        ("Tesla V100-SXM2-32GB", "fp32", 15.7),
        ("Tesla T4", "fp16", 65),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("AMD Instinct MI300X", "bf16", None),
    ],
)
def test_peak_is_that_of_the_gpu_and_precision(name: str, precision: str, teraflops: float | None) -> None:
    assert peak_flops(name, precision) == (teraflops and teraflops * 1e12)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(inputs)))


FORWARD = 2 * (16 * 32 + 32)
"""FLOPs of a sample."""


def backward(run: Run, model: nn.Module, inputs: torch.Tensor) -> None:
    run.backward(model(inputs).mean())


def gradients(run: Run, model: nn.Module, inputs: torch.Tensor) -> None:
    run.gradients(lambda part: model(part).mean(), inputs)


def train(run: Run, folder: Path, step: Callable[[Run, nn.Module, torch.Tensor], None]) -> None:
    count: FlopCount = run._parts.instruments._flops
    # as many as four samples take in a second on each rank
    count._peak = 3.0 * FORWARD * 4
    model = run.wrap(Net(), blocks=(nn.Linear,), plan={"up": "column", "down": "row"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs in run.loader(torch.randn(40, 16), batch_size=8):
        step(run, model, inputs)
        run.update(optimizer)
    run.report(1, loss=0.0)


@pytest.mark.parametrize("step", [backward, gradients])
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (Layout(), 1),
        (Layout(replicas=2), 2),
        (Layout(strategy="fsdp", shards=2), 2),
        (Layout(strategy="fsdp", shards=1, tensor=2), 2),
    ],
    ids=["one", "ddp", "fsdp", "tensor"],
)
def test_utilization_follows_from_the_model_and_its_speed(
    layout: Layout, ranks: int, step: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "state.json").write_text("{}")
    run_ranks(train, ranks, tmp_path, step, folder=tmp_path, layout=layout)
    (line,) = read_jsonl(tmp_path / "metrics.jsonl")
    curves = line["curves"]
    assert curves["speed/mfu"] == pytest.approx(curves["speed/samples_per_second"] / (4 * ranks), rel=1e-6)
