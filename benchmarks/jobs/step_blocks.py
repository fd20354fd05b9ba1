"""Three training loops that take turns in blocks of steps, on the ranks of one run; see `benchmarks/step.py`."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.measure import interleave
from mgpu_slurm import Run

FEATURES = 256
CLASSES = 10
BATCHES = 64
"""Steps per epoch."""
WARM_UPS = 2
"""Rounds that do not count: DDP builds its buckets anew after the first step."""
CLIP = 1.0

SYNC_BUFFERS = "forward_sync_buffers"
# torch before 2.13 knows the option by its old name
if SYNC_BUFFERS not in inspect.signature(DistributedDataParallel.__init__).parameters:
    SYNC_BUFFERS = "broadcast_buffers"

OPTIONS_OF_RUN = {"gradient_as_bucket_view": True, SYNC_BUFFERS: False}
"""Those of DDP that `run.wrap` chooses."""
OPTIONS_IN_ORDER = OPTIONS_OF_RUN | {"find_unused_parameters": True}
"""And what a deterministic run adds."""


@dataclass
class Config:
    width: int
    batch_size: int
    """Of all ranks together."""
    steps: int
    """Per block."""
    rounds: int


def train(run: Run, config: Config) -> dict[str, float]:
    data = make_data(BATCHES * config.batch_size)
    loops: dict[str, Iterator[None]] = {
        "run": run_steps(run, make_model(config.width), data, config.batch_size),
        "plain": ddp_steps(make_model(config.width), data, config.batch_size, {}),
        "same": ddp_steps(make_model(config.width), data, config.batch_size, OPTIONS_OF_RUN),
        "ordered": ddp_steps(make_model(config.width), data, config.batch_size, OPTIONS_IN_ORDER),
    }
    cases = {name: functools.partial(seconds_per_step, steps, config.steps) for name, steps in loops.items()}
    seconds = interleave(cases, config.rounds, WARM_UPS)
    (run.folder / f"blocks-{run.rank}.json").write_text(json.dumps(seconds))
    return {"rounds": config.rounds}


def seconds_per_step(steps: Iterator[None], count: int) -> float:
    """Of one block; all ranks start it together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in itertools.islice(steps, count):
        pass
    return (time.perf_counter() - start) / count


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


def make_data(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(size, FEATURES, generator=generator)
    return TensorDataset(features, torch.randint(CLASSES, (size,), generator=generator))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def run_steps(run: Run, model: nn.Module, data: TensorDataset, batch_size: int) -> Iterator[None]:
    """Endless steps of the primitives, each item one."""
    run.seed(0)
    model = run.wrap(model)
    optimizer = make_optimizer(model)
    loader = run.loader(data, batch_size=batch_size, shuffle=True)
    # a loader whose place is saved does all there is to do at a boundary
    run.restore(model=model, optimizer=optimizer, data=loader)
    while True:
        for features, labels in loader:
            run.backward(cross_entropy(model(features), labels))
            run.update(optimizer, clip=CLIP)
            yield


def ddp_steps(model: nn.Module, data: TensorDataset, batch_size: int, options: dict[str, Any]) -> Iterator[None]:
    """Endless steps of a hand-written loop, each item one."""
    ddp = DistributedDataParallel(model, **options)
    optimizer = make_optimizer(ddp)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, shuffle=True, drop_last=False)
    loader = DataLoader(data, batch_size=batch_size // dist.get_world_size(), sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for features, labels in loader:
            optimizer.zero_grad()
            cross_entropy(ddp(features), labels).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(ddp.parameters(), CLIP)
            optimizer.step()
            yield
