"""Handwritten digits: a small convolutional network on 8x8 images, the shortest job that is whole. Copy it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from mgpu_slurm import Run

DATA = Path(__file__).parent / "data" / "digits.npz"


@dataclass
class Config:
    epochs: int = 10
    """Passes over the training images."""
    batch_size: int = 32
    """Images per optimizer step, over all ranks together."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Adam with decoupled weight decay, or SGD with momentum."""
    lr: float = 3e-3
    """Learning rate at the start; it falls to zero along a cosine. SGD wants about thirty times Adam's."""
    momentum: float = 0.9
    """Of SGD; Adam does not read it."""
    weight_decay: float = 1e-4
    """Pull of every weight towards zero."""
    width: int = 32
    """Channels of the first convolution; the second has twice as many."""
    dropout: float = 0.4
    """Share of the last layer's inputs that is left out in training."""
    seed: int = 0
    """The same seed on the same number of ranks gives the same result: bit for bit on CPUs, nearly so on GPUs."""


class Net(nn.Sequential):
    """Images (N, 1, 8, 8) in 0..1 to logits (N, 10)."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__(
            nn.Conv2d(1, width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * width * 4 * 4, 10),
        )


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set: float images (N, 1, 8, 8) in 0..1 and labels (N,).

    Every fifth image of each digit is for testing, whatever the seed: results of all runs compare.
    """
    with np.load(DATA) as arrays:
        images = torch.from_numpy(arrays["images"]).float().div(16).unsqueeze(1)
        labels = torch.from_numpy(arrays["labels"]).long()
    by_digit = labels.argsort(stable=True)
    for_testing = torch.arange(len(labels)) % 5 == 0
    train, test = by_digit[~for_testing], by_digit[for_testing]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def make_optimizer(config: Config, parameters: list[Tensor]) -> torch.optim.Optimizer:
    if config.optimizer == "adam":
        return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


@torch.no_grad()
def test_accuracy(run: Run, model: nn.Module, test_set: TensorDataset) -> float:
    """The share of the test images that the model names right; every rank judges its own part of them."""
    model.eval()
    hits = count = 0
    for images, labels in run.shard(test_set, batch_size=256):
        hits += int((model(images).argmax(dim=1) == labels).sum())
        count += len(labels)
    return run.mean(hits, count)


def train(run: Run, config: Config) -> dict[str, float]:
    """Trains the network; returns its accuracy on the test images, and its number of parameters."""
    run.seed(config.seed)
    train_set, test_set = load_digits()
    net = Net(config.width, config.dropout)
    parameters = sum(each.numel() for each in net.parameters())
    model = run.wrap(net, blocks=(nn.Conv2d, nn.Linear))
    optimizer = make_optimizer(config, list(model.parameters()))
    data = run.loader(train_set, batch_size=config.batch_size, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=config.epochs * len(data))
    mean_loss = run.meter("loss")
    state = run.restore(model=model, optimizer=optimizer, scheduler=scheduler, data=data)

    for epoch in state.epochs(config.epochs):
        model.train()
        # data.batch is the number of the batch, also in an epoch that a restarted run continues
        for images, labels in data:
            loss = cross_entropy(model(images), labels)
            run.backward(loss)
            run.update(optimizer, clip=1.0)
            scheduler.step()
            mean_loss.add(loss)
        run.report(epoch, accuracy=test_accuracy(run, model, test_set), loss=mean_loss.mean())

    return {"accuracy": test_accuracy(run, model, test_set), "parameters": parameters}
