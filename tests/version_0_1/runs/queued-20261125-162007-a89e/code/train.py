"""A job of version 0.1: linear regression, with an evaluation after each epoch."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from mgpu_slurm import Run


@dataclass
class Config:
    lr: float = 0.1
    epochs: int = 4
    seed: int = 0
    pause_in: int = 0
    """The epoch in which rank 0 waits to be stopped, in the first attempt."""


def train(run: Run, config: Config) -> dict[str, float]:
    run.seed(config.seed)
    inputs = torch.arange(16.0).reshape(16, 1) / 16
    data = run.loader(TensorDataset(inputs, 3 * inputs + 1), batch_size=4)
    model = run.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    meter = run.meter("loss")
    state = run.restore(model=model, optimizer=optimizer, data=data)
    last = float("nan")
    for epoch in state.epochs(config.epochs):
        for batch, wanted in data:
            loss = (model(batch) - wanted).square().mean()
            run.backward(loss)
            run.update(optimizer)
            meter.add(loss, len(batch))
            if epoch == config.pause_in and run.attempt == 1:
                Path(run.folder, "paused").touch()
                while not Path(run.folder, "go").exists():
                    time.sleep(0.01)
        last = meter.mean()
        run.report(epoch, loss=last)
    return {"loss": last}


def fails(run: Run, config: Config) -> None:
    run.report(1, loss=1.0)
    raise ValueError("the data is broken")
