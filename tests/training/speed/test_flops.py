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


def accumulated(run: Run, model: nn.Module, inputs: torch.Tensor) -> None:
    with torch.no_grad():
        model(inputs)
    for part in run.accumulate(inputs, 2):
        run.backward(model(part).mean())


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


@pytest.mark.parametrize("step", [backward, accumulated, gradients])
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


class Student(nn.Module):
    """Calls another model of the run."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.own, self.teachers = Net(), [teacher]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.own(inputs) - self.teachers[0](inputs)


def distill(run: Run) -> float:
    count: FlopCount = run._parts.instruments._flops
    count._peak = 1.0
    teacher = run.wrap(Net())
    student = run.wrap(Student(teacher))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.01)
    for inputs in run.loader(torch.randn(16, 16), batch_size=8):
        run.backward(student(inputs).square().mean())
        run.update(optimizer)
    return count.utilization(1.0) or 0.0


def test_model_within_another_one_counts_once() -> None:
    assert run_ranks(distill, 1) == [3.0 * 2 * FORWARD]


def of_grouped_queries(run: Run) -> float:
    """Train attention with fewer keys than queries, for which torch's formula raises an error."""
    count: FlopCount = run._parts.instruments._flops
    count._peak = 1.0
    project = run.wrap(Grouped())
    optimizer = torch.optim.SGD(project.parameters(), lr=0.01)
    for inputs in run.loader(torch.randn(16, 16), batch_size=8):
        run.backward(project(inputs).mean())
        run.update(optimizer)
    return count.utilization(1.0) or 0.0


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        queries = self.project(inputs).view(len(inputs), 4, 1, 4)
        keys = queries[:, :2]
        return nn.functional.scaled_dot_product_attention(queries, keys, keys, enable_gqa=True)


def test_operator_that_torch_cannot_count_is_left_out() -> None:
    (found,) = run_ranks(of_grouped_queries, 1)
    assert found >= 3.0 * 2 * 16 * 16
