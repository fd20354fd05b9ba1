"""A tiny DDP model that trains until it is told to stop; says when each attempt has made its first step."""

from __future__ import annotations

from pathlib import Path

import torch

from mgpu_slurm import Run


def train(run: Run, out: str = "") -> None:
    model = run.wrap(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = run.restore(model=model, optimizer=optimizer)
    for _ in state.epochs(1_000_000):
        run.backward(model(torch.ones(2, 4)).sum())
        run.update(optimizer)
        if run.is_main:
            Path(out, f"attempt-{run.attempt}").touch()
