"""Three steps of a tiny model, as a job function."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.jobs.three_steps_model import BATCH_SIZE, make_data, make_model, write_down_the_end
from mgpu_slurm import Run


@dataclass
class Config:
    out: Path
    """Where each rank writes when it was done."""


def train(run: Run, config: Config) -> dict[str, float]:
    model = run.wrap(make_model(), blocks=(nn.Linear,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for features, labels in run.loader(make_data(), batch_size=BATCH_SIZE, shuffle=True):
        run.backward(cross_entropy(model(features), labels))
        run.update(optimizer)
    write_down_the_end(config.out, run.rank)
    return {"steps": run.step, "cpu_seconds": time.process_time()}
