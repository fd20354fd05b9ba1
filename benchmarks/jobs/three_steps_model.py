"""The tiny model and its data, the same for the job function and the script."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

STEPS = 3
BATCH_SIZE = 32
"""Of all ranks together."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def make_data() -> TensorDataset:
    """As many samples as three steps take."""
    generator = torch.Generator().manual_seed(0)
    size = STEPS * BATCH_SIZE
    return TensorDataset(torch.randn(size, 32, generator=generator), torch.randint(10, (size,), generator=generator))


def write_down_the_end(out: Path, rank: int) -> None:
    """The time at which this rank's third step was done, by the clock that all processes share."""
    done = time.monotonic()
    (out / str(rank)).write_text(str(done))
