"""Two loops over a sharded model that take turns in blocks of steps; see `benchmarks/sharded.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.jobs.loops import BATCHES, CLASSES, make_data, plain_steps, run_steps, take_turns
from mgpu_slurm import Run

FEATURES = 256


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
    data = make_data(BATCHES * config.batch_size, FEATURES)
    loops = {
        "run": run_steps(run, make_model(config), data, config.batch_size, blocks=(Block,)),
        "plain": plain_steps(run, sharded(make_model(config)), data, config.batch_size),
    }
    return take_turns(run, loops, config.steps, config.rounds)


def make_model(config: Config) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block(config.width) for _ in range(config.depth)]
    return nn.Sequential(nn.Linear(FEATURES, config.width), *blocks, nn.Linear(config.width, CLASSES))


def sharded(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in model:
        if isinstance(part, Block):
            fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)
