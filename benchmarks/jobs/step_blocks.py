"""Training loops with DDP that take turns in blocks of steps; see `benchmarks/step.py`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.jobs.loops import BATCHES, CLASSES, make_data, plain_steps, run_steps, take_turns
from mgpu_slurm import Run, import_torchvision

SYNC_BUFFERS = "forward_sync_buffers"
# torch before 2.13 knows the option by its old name
if SYNC_BUFFERS not in inspect.signature(DistributedDataParallel.__init__).parameters:
    SYNC_BUFFERS = "broadcast_buffers"

OPTIONS_OF_RUN = {"gradient_as_bucket_view": True, SYNC_BUFFERS: False}
"""Those of DDP that `run.wrap` chooses."""
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "same": OPTIONS_OF_RUN,
    "ordered": OPTIONS_OF_RUN | {"find_unused_parameters": True},
}
"""Options of DDP, by the name of the loop that has them; the last ones are those of a deterministic run."""


@dataclass
class Config:
    model: str
    batch_size: int
    """Of all ranks together."""
    steps: int
    """Per block."""
    rounds: int


class Transformer(nn.Module):
    """Four layers over 32 tokens of 64 features each."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, nhead=4, dim_feedforward=512, dropout=0.0, batch_first=True)
        self.embedding = nn.Linear(64, 128)
        self.layers = nn.TransformerEncoder(layer, num_layers=4)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.layers(self.embedding(tokens)).mean(1))
        return output


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def resnet18() -> nn.Module:
    model: nn.Module = import_torchvision().models.resnet18(num_classes=CLASSES)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet18": (resnet18, (3, 64, 64)),
    "transformer": (Transformer, (32, 64)),
    "tiny": (tiny, (256,)),
}
"""Each with the shape of a sample."""


def train(run: Run, config: Config) -> dict[str, float]:
    build, shape = MODELS[config.model]
    data = make_data(BATCHES * config.batch_size, *shape)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return build()

    loops = {"run": run_steps(run, model(), data, config.batch_size)}
    for name, options in OPTIONS.items():
        loops[name] = plain_steps(run, DistributedDataParallel(model(), **options), data, config.batch_size)
    return take_turns(run, loops, config.steps, config.rounds)
