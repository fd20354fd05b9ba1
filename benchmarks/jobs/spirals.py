"""Two spirals, one inside the other: which one a point is on, by a small network whose shape and optimizer matter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from mgpu_slurm import Run

TURNS = 2.0
NOISE = 0.03


@dataclass
class Config:
    epochs: int = 9
    batch_size: int = 32
    lr: float = 1e-2
    beta: float = 0.9
    width: int = 32
    depth: int = 2
    weight_decay: float = 1e-5
    seed: int = 0


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points (N, 2) of both spirals and which one each is on (N,)."""
    chance = torch.Generator().manual_seed(seed)
    way = torch.rand(count, generator=chance).sqrt()
    spiral = torch.arange(count) % 2
    angle = 2 * math.pi * TURNS * way + math.pi * spiral
    noise = NOISE * torch.randn(count, 2, generator=chance)
    return 3 * torch.stack([way * angle.cos(), way * angle.sin()], dim=1) + noise, spiral


def network(width: int, depth: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs in [2, *[width] * (depth - 1)]:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 2))


def train(run: Run, config: Config) -> float:
    run.seed(config.seed)
    model = run.wrap(network(config.width, config.depth))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(config.beta, 0.999), weight_decay=config.weight_decay
    )
    data = run.loader(TensorDataset(*points(512, seed=1)), batch_size=config.batch_size, shuffle=True)
    x_test, y_test = points(1024, seed=2)
    state = run.restore(model=model, optimizer=optimizer, data=data)
    accuracy = 0.0
    for epoch in state.epochs(config.epochs):
        for x, y in data:
            run.backward(cross_entropy(model(x), y))
            run.update(optimizer)
        with torch.no_grad():
            accuracy = (model(x_test).argmax(dim=1) == y_test).float().mean().item()
        run.report(epoch, accuracy=accuracy)
    return run.last_metrics["accuracy"]
