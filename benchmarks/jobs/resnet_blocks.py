"""Three training loops of a ResNet-50 that take turns on one GPU, in blocks; see `benchmarks/gpu.py`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.models import resnet50

from benchmarks.measure import interleave
from mgpu_slurm import Run

WARM_UPS = 2


@dataclass
class Config:
    batch_size: int = 256
    steps: int = 20
    rounds: int = 15


def made(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return resnet50().to(device, memory_format=torch.channels_last)


def optimizer_of(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def with_run(run: Run, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """Return a step by the primitives, under the precision of the run, and compiled by it."""
    model = run.wrap(made(run.device))
    optimizer = optimizer_of(model)

    def step() -> None:
        run.backward(cross_entropy(model(images), labels))
        run.update(optimizer)

    return step


def bare(run: Run, images: Tensor, labels: Tensor) -> Callable[[], None]:
    model = made(run.device)
    model.compile()
    optimizer = optimizer_of(model)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def lightning(run: Run, images: Tensor, labels: Tensor) -> Callable[[], None]:
    fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-mixed")
    model = made(run.device)
    model.compile()
    wrapped, optimizer = fabric.setup(model, optimizer_of(model))

    def step() -> None:
        fabric.backward(cross_entropy(wrapped(images), labels))
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds_per_step(step: Callable[[], None], steps: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def train(run: Run, config: Config) -> dict[str, float]:
    shape = (config.batch_size, 3, 224, 224)
    images = torch.randn(shape, device=run.device).to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (config.batch_size,), device=run.device)
    loops = {"run": with_run, "bare": bare, "lightning": lightning}
    steps = {name: loop(run, images, labels) for name, loop in loops.items()}
    cases = {name: partial(seconds_per_step, step, config.steps) for name, step in steps.items()}
    (run.folder / "blocks.json").write_text(json.dumps(interleave(cases, config.rounds, WARM_UPS)))
    return {"rounds": config.rounds}
