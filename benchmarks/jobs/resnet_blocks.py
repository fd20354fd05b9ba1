"""Training loops of a ResNet-50 that take turns on one GPU, in blocks; see `benchmarks/gpu.py`."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.models import resnet50

from benchmarks.measure import interleave
from mgpu_slurm import Run
from mgpu_slurm.data.batching.nests import to_device
from mgpu_slurm.data.device_copies import on_device
from mgpu_slurm.rank.torch_adapter import flop_counter
from mgpu_slurm.training.speed.flops import PASSES, peak_flops

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


def from_main_memory(ahead: bool, run: Run, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """Return a step that also copies its batch to the GPU.

    Args:
        ahead: whether the next one is copied during the step.
    """
    model = run.wrap(made(run.device))
    optimizer = optimizer_of(model)
    batch = (images.cpu().pin_memory(), labels.cpu().pin_memory())
    endless = itertools.repeat(batch)
    copied: Iterator[tuple[Tensor, Tensor]] = (
        on_device(endless, run.device) if ahead else (to_device(each, run.device) for each in endless)
    )

    def step() -> None:
        features, wanted = next(copied)
        run.backward(cross_entropy(model(features), wanted))
        run.update(optimizer)

    return step


def flops_of_image(device: torch.device) -> float:
    """Return the FLOPs of forward and backward pass of one image."""
    counter = flop_counter()
    with counter:
        made(device)(torch.zeros(1, 3, 224, 224, device=device))
    return float(PASSES * counter.get_total_flops())


def bare(run: Run, images: Tensor, labels: Tensor) -> Callable[[], None]:
    model = made(run.device)
    model.compile()
    optimizer = optimizer_of(model)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        # the run does not count it
        with run._steps.paused():
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
        with run._steps.paused():
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
    loops = {
        "run": with_run,
        "bare": bare,
        "lightning": lightning,
        "ahead": partial(from_main_memory, True),
        "waiting": partial(from_main_memory, False),
    }
    steps = {name: loop(run, images, labels) for name, loop in loops.items()}
    cases = {name: partial(seconds_per_step, step, config.steps) for name, step in steps.items()}
    found = {
        "seconds": interleave(cases, config.rounds, WARM_UPS),
        "flops": flops_of_image(run.device),
        "peak_flops": peak_flops(torch.cuda.get_device_name(run.device), "bf16"),
    }
    (run.folder / "blocks.json").write_text(json.dumps(found))
    return {"rounds": config.rounds}
