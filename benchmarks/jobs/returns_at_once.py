"""A job function that imports torch and does nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mgpu_slurm import Run


@dataclass
class Config:
    lr: float = 0.1


def train(run: Run, config: Config) -> float:
    return torch.tensor(config.lr).item()
