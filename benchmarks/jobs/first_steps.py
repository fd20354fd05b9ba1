"""A small GPT whose ranks write how long their first step took, from the wrapping of the model, and later ones."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass

import torch

from jobs.gpt import GPT, Block, next_token_loss
from jobs.gpt import Config as Model
from mgpu_slurm import Run


@dataclass
class Config:
    batch_size: int = 16
    steps: int = 20


def train(run: Run, config: Config) -> None:
    start = time.perf_counter()
    run.seed(0)
    made = Model()
    model = run.wrap(GPT(made), blocks=(Block,))
    optimizer = torch.optim.AdamW(model.parameters())
    seconds = []
    for _ in range(config.steps):
        tokens = torch.randint(256, (config.batch_size, made.context + 1), device=run.device)
        run.backward(next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]))
        run.update(optimizer)
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
    took = {"first": seconds[0], "step": statistics.median(seconds[1:])}
    (run.folder / f"took-{run.rank}.json").write_text(json.dumps(took))
