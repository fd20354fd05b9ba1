"""A first job: classify points of two noisy spirals. Adapt it to your own task.

mgpu-slurm submit                       # all GPUs of one node, or a single process without GPUs
mgpu-slurm submit --nodes 2             # two nodes; simulated on a machine without SLURM
mgpu-slurm submit lr=0.003 width=64     # other settings
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

from mgpu_slurm import Run


@dataclass
class Config:
    epochs: int = 15
    """Passes over the training points."""
    batch_size: int = 64
    """Points per optimizer step, over all ranks."""
    lr: float = 0.01
    """Learning rate of Adam."""
    width: int = 32
    """Units of the two hidden layers."""
    noise: float = 0.02
    """Standard deviation of the points from their spiral, which has a radius of 1."""
    seed: int = 0
    """The same seed on the same number of ranks gives the same result."""


def spirals(count: int, noise: float, seed: int) -> TensorDataset:
    """Return points (N, 2), and labels (N, 1): which of the two spirals each point is on."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    radius = torch.rand(count, generator=random).sqrt()
    angle = 3 * torch.pi * radius + torch.pi * labels
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    points += noise * torch.randn(count, 2, generator=random)
    return TensorDataset(points, labels.float().unsqueeze(1))


def make_net(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))


@torch.no_grad()
def test_accuracy(run: Run, model: nn.Module, test_set: TensorDataset) -> float:
    """Return the accuracy on the test points; each rank evaluates its own part of them."""
    model.eval()
    hits = count = 0
    for points, labels in run.shard(test_set):
        hits += int(((model(points) > 0) == (labels > 0)).sum())
        count += len(labels)
    return run.mean(hits, count)


def train(run: Run, config: Config) -> dict[str, float]:
    """Train the net; return its accuracy on unseen points."""
    run.seed(config.seed)
    model = run.wrap(make_net(config.width), blocks=(nn.Linear,))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    data = run.loader(spirals(2000, config.noise, seed=1), batch_size=config.batch_size, shuffle=True)
    test_set = spirals(1000, config.noise, seed=2)
    mean_loss = run.meter("loss")
    # continues from the newest checkpoint if the run was interrupted
    state = run.restore(model=model, optimizer=optimizer, data=data)

    for epoch in state.epochs(config.epochs):
        model.train()
        # data.batch is the index of the batch, also in an epoch that a restarted run continues
        for points, labels in data:
            loss = binary_cross_entropy_with_logits(model(points), labels)
            run.backward(loss)
            run.update(optimizer)
            mean_loss.add(loss)
        run.report(epoch, accuracy=test_accuracy(run, model, test_set), loss=mean_loss.mean())

    return {"accuracy": test_accuracy(run, model, test_set)}
