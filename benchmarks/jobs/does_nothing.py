"""A job function whose value follows from its parameters."""

from __future__ import annotations

from dataclasses import dataclass

from mgpu_slurm import Run


@dataclass
class Config:
    reports: bool
    lr: float = 0.1
    momentum: float = 0.9
    dropout: float = 0.0
    width: int = 32
    batch_size: int = 32


def train(run: Run, config: Config) -> dict[str, float]:
    value = (config.momentum - 0.5) ** 2 + config.dropout + abs(config.lr - 0.1) + config.width / 128
    if config.reports:
        run.report(1, value=value)
    return {"value": value}
