"""Steps of a GPT with 1.4 billion parameters on one GPU; see `benchmarks/gpu.py`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from jobs import gpt
from mgpu_slurm import Run

SHAPE = {"context": 1024, "layers": 28, "heads": 16, "width": 2048}
WARM_UPS = 5


@dataclass
class Config:
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    batch_size: int = 4
    steps: int = 100


def make_optimizer(model: torch.nn.Module, config: Config) -> Any:
    if config.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-4)
    from torchao.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=1e-4)


def endless(loader: Any) -> Iterator[Tensor]:
    for _ in itertools.count():
        for (tokens,) in loader:
            yield tokens


def train(run: Run, config: Config) -> dict[str, float]:
    run.seed(0)
    shape = gpt.Config(batch_size=config.batch_size, **SHAPE)  # type: ignore[arg-type]
    model = run.wrap(gpt.GPT(shape), blocks=(gpt.Block,))
    optimizer = make_optimizer(model, config)
    text, _ = gpt.load_text(shape)
    batches = endless(run.loader(text, batch_size=config.batch_size, shuffle=True, drop_last=True))
    loss, began = torch.zeros(()), 0.0
    for step, tokens in enumerate(itertools.islice(batches, WARM_UPS + config.steps)):
        if step == WARM_UPS:
            torch.cuda.synchronize()
            began = time.perf_counter()
        loss = gpt.next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        run.backward(loss)
        run.update(optimizer, clip=1.0)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return {
        "tokens_per_second": config.steps * config.batch_size * shape.context / seconds,
        "allocated": float(torch.cuda.max_memory_allocated()),
        "loss": float(loss.detach()),
    }
