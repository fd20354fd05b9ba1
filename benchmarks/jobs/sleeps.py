"""A job function that takes as long as it is told."""

from __future__ import annotations

import time
from dataclasses import dataclass

from mgpu_slurm import Run


@dataclass
class Config:
    seconds: float = 1.0


def train(run: Run, config: Config) -> dict[str, float]:
    time.sleep(config.seconds)
    return {"value": config.seconds}
