"""A trial that sleeps in each epoch, can be continued after any of them, and is worth what its parameter says."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import nn

from mgpu_slurm import Run


@dataclass
class Config:
    seconds: float = 1.0
    """Of each epoch."""
    epochs: int = 9


class Still:
    """An optimizer that does nothing: each worker would import torch's compiler for one of torch."""

    def step(self) -> None:
        pass

    def zero_grad(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def train(run: Run, config: Config) -> float:
    model = run.wrap(nn.Linear(1, 1))
    state = run.restore(model=model, optimizer=Still())
    for epoch in state.epochs(config.epochs):
        time.sleep(config.seconds)
        # so that which trials are promoted does not depend on their length alone
        run.report(epoch, value=config.seconds * 1000 % 7)
    return run.last_metrics["value"]
