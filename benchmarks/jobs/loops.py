"""Training loops that take turns in blocks of steps, on the ranks of one run."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.measure import interleave
from mgpu_slurm import Run

CLASSES = 10
BATCHES = 64
"""Steps per epoch."""
WARM_UPS = 2
"""Rounds that do not count: DDP builds its buckets anew after the first step."""
CLIP = 1.0


def take_turns(run: Run, loops: Mapping[str, Iterator[None]], steps: int, rounds: int) -> dict[str, float]:
    """Write down what blocks of this many steps of each loop take, and return the job's result."""
    cases = {name: functools.partial(seconds_per_step, loop, steps) for name, loop in loops.items()}
    write_blocks(run, interleave(cases, rounds, WARM_UPS))
    return {"rounds": rounds}


def write_blocks(run: Run, seconds: Mapping[str, list[tuple[float, float]]]) -> None:
    (run.folder / f"blocks-{run.rank}.json").write_text(json.dumps(seconds))


def seconds_per_step(steps: Iterator[None], count: int) -> tuple[float, float]:
    """CPU seconds of this rank and seconds of one block, by step; all ranks start it together."""
    if dist.is_initialized():
        dist.barrier()
    began, computed = time.perf_counter(), time.process_time()
    for _ in itertools.islice(steps, count):
        pass
    return (time.process_time() - computed) / count, (time.perf_counter() - began) / count


def make_data(size: int, *shape: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(size, *shape, generator=generator)
    return TensorDataset(features, torch.randint(CLASSES, (size,), generator=generator))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def run_steps(run: Run, model: nn.Module, data: TensorDataset, batch_size: int, **options: Any) -> Iterator[None]:
    """Take endless steps with the primitives of `run`, each item one.

    Args:
        options: of `run.wrap`.
    """
    run.seed(0)
    model = run.wrap(model, **options)
    optimizer = make_optimizer(model)
    loader = run.loader(data, batch_size=batch_size, shuffle=True)
    # a loader whose place is saved does all there is to do at a boundary
    run.restore(model=model, optimizer=optimizer, data=loader)
    while True:
        for features, labels in loader:
            run.backward(cross_entropy(model(features), labels))
            run.update(optimizer, clip=CLIP)
            yield


def plain_steps(run: Run, model: nn.Module, data: TensorDataset, batch_size: int) -> Iterator[None]:
    """Take endless steps of a hand-written loop over a model that its ranks share, each item one.

    Args:
        run: does not count them.
    """
    optimizer = make_optimizer(model)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, shuffle=True, drop_last=False)
    loader = DataLoader(data, batch_size=batch_size // dist.get_world_size(), sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for features, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(features), labels).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            with run._steps.paused():
                optimizer.step()
            yield
