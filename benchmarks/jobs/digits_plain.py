"""The training loop of `jobs/digits.py` in plain torch, for tuners that know no `run`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from jobs.digits import Config, Net, load_digits, make_optimizer


def train(config: Config, report: Callable[[float], None]) -> None:
    """
    Args:
        report: hears the accuracy after each epoch.
    """
    torch.manual_seed(config.seed)
    train_set, test_set = load_digits()
    model = Net(config.width, config.dropout)
    optimizer = make_optimizer(config, list(model.parameters()))
    data = DataLoader(train_set, batch_size=config.batch_size, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=config.epochs * len(data))
    for _ in range(config.epochs):
        model.train()
        for images, labels in data:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        model.eval()
        with torch.no_grad():
            hits = sum(
                int((model(images).argmax(dim=1) == labels).sum()) for images, labels in DataLoader(test_set, 256)
            )
        report(hits / len(test_set))
