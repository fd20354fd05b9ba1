"""A moving average of a model, under each strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mgpu_slurm import MovingAverage, Run, UserError
from mgpu_slurm.request.parallelism import Parallelism
from tests.ranks import run_ranks

LAYOUTS: dict[str, tuple[int, Parallelism]] = {
    "ddp": (2, Parallelism()),
    "fsdp": (2, Parallelism("fsdp")),
    "tensor": (2, Parallelism(tensor=2)),
    "pipeline": (2, Parallelism(pipeline=2)),
}


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def whole(tensor: Any) -> list[float]:
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return [*map(float, found.detach().reshape(-1))]


def average(run: Run, is_pipeline: bool, steps: int) -> dict[str, list[float]]:
    """Train, and return the averaged weights that the model has within `applied`, and its own after that."""
    torch.manual_seed(0)
    layers = [nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)]
    model: Any
    if is_pipeline:
        model = run.pipeline(layers, loss_of, micro_batches=2)
    else:
        model = run.wrap(nn.Sequential(*layers), blocks=(nn.Linear,), plan={"1": "column", "2": "row"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averaged = MovingAverage(model, decay=0.5)
    run.restore(model=model, optimizer=optimizer, average=averaged)
    inputs, targets = torch.arange(16.0).reshape(4, 4) / 16, torch.ones(4, 1)
    while run.step < steps:
        if is_pipeline:
            model.gradients(inputs, targets)
        else:
            for part, target in zip(inputs.chunk(2), targets.chunk(2), strict=True):
                (loss_of(model(part), target) / 2).backward()
        run.update(optimizer)
        averaged.update()
    run.save()
    run.finish()
    with averaged.applied():
        found = {f"averaged {name.removeprefix('module.')}": whole(each) for name, each in model.named_parameters()}
    return found | {name.removeprefix("module."): whole(each) for name, each in model.named_parameters()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_average_is_that_of_one_process_and_resumes_elsewhere(name: str, tmp_path: Path) -> None:
    ranks, options = LAYOUTS[name]
    layout, is_pipeline = options.layout(ranks, ranks), name == "pipeline"
    (alone,) = run_ranks(average, 1, is_pipeline, 5)
    assert alone["averaged 1.weight"] != pytest.approx(alone["1.weight"], abs=1e-3)
    run_ranks(average, ranks, is_pipeline, 3, folder=tmp_path, layout=layout)
    found: dict[str, list[float]] = {}
    for answer in run_ranks(average, ranks, is_pipeline, 5, folder=tmp_path, layout=layout):
        found |= answer
    assert found.keys() == alone.keys()
    for key, values in alone.items():
        assert found[key] == pytest.approx(values, abs=1e-6), key
    # a run at its end only loads
    (elsewhere,) = run_ranks(average, 1, is_pipeline, 5, folder=tmp_path)
    for key, values in alone.items():
        assert elsewhere[key] == pytest.approx(values, abs=1e-6), key


def average_different_buffers(run: Run) -> list[float]:
    model = run.wrap(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
    averaged = MovingAverage(model)
    run.restore(model=model, average=averaged)
    if run.attempt == 1 and run.world_size == 2:
        model(torch.full((4, 2), float(run.rank + 1)) + torch.arange(8.0).reshape(4, 2))
        averaged.update()
        run.save()
        run.finish()
    return whole(averaged.state_dict()["0.running_mean"])


def test_average_of_buffers_is_that_of_rank_0_as_the_buffers_are(tmp_path: Path) -> None:
    first, second = run_ranks(average_different_buffers, 2, folder=tmp_path)
    assert first != second
    # each rank would otherwise have its own, for two ranks only
    assert run_ranks(average_different_buffers, 1, folder=tmp_path) == [first]


def test_decay_is_checked() -> None:
    with pytest.raises(UserError, match=r"MovingAverage: decay=99: expected a number from 0 to 1"):
        MovingAverage(nn.Linear(1, 1), decay=99)
