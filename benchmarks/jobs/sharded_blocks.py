"""Two loops over a sharded model that take turns in blocks of steps, on the ranks of one run; see
`benchmarks/sharded.py`."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.jobs.step_blocks import BATCHES, CLASSES, CLIP, FEATURES, make_data, make_optimizer
from benchmarks.measure import interleave
from mgpu_slurm import Run

WARM_UPS = 2
"""Rounds that do not count."""


@dataclass
class Config:
    width: int
    depth: int
    batch_size: int
    """Of all ranks together."""
    steps: int
    """Per block."""
    rounds: int


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def train(run: Run, config: Config) -> dict[str, float]:
    data = make_data(BATCHES * config.batch_size)
    loops: dict[str, Iterator[None]] = {
        "run": run_steps(run, make_model(config), data, config.batch_size),
        "plain": plain_steps(make_model(config), data, config.batch_size),
    }
    cases = {name: functools.partial(seconds_per_step, steps, config.steps) for name, steps in loops.items()}
    seconds = interleave(cases, config.rounds, WARM_UPS)
    (run.folder / f"blocks-{run.rank}.json").write_text(json.dumps(seconds))
    return {"rounds": config.rounds}


def seconds_per_step(steps: Iterator[None], count: int) -> tuple[float, float]:
    """CPU seconds of this rank and seconds of one block, by step; all ranks start it together."""
    if dist.is_initialized():
        dist.barrier()
    began, computed = time.perf_counter(), time.process_time()
    for _ in itertools.islice(steps, count):
        pass
    return (time.process_time() - computed) / count, (time.perf_counter() - began) / count


def make_model(config: Config) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(config.width) for _ in range(config.depth)]
    return nn.Sequential(nn.Linear(FEATURES, config.width), *blocks, nn.Linear(config.width, CLASSES))


def run_steps(run: Run, model: nn.Module, data: TensorDataset, batch_size: int) -> Iterator[None]:
    """Endless steps of the primitives, each item one."""
    run.seed(0)
    model = run.wrap(model, blocks=(Block,))
    optimizer = make_optimizer(model)
    loader = run.loader(data, batch_size=batch_size, shuffle=True)
    run.restore(model=model, optimizer=optimizer, data=loader)
    while True:
        for features, labels in loader:
            run.backward(cross_entropy(model(features), labels))
            run.update(optimizer, clip=CLIP)
            yield


def plain_steps(model: nn.Module, data: TensorDataset, batch_size: int) -> Iterator[None]:
    """Endless steps of a hand-written loop, each item one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in model:  # type: ignore[attr-defined]
        if isinstance(part, Block):
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, shuffle=True, drop_last=False)
    loader = DataLoader(data, batch_size=batch_size // dist.get_world_size(), sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for features, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(features), labels).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            yield
