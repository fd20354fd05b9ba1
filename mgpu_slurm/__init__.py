"""mgpu_slurm: multi-node, multi-GPU training as SLURM batch jobs, and the same code on a laptop.

    from mgpu_slurm import submit, runs

    run = submit(train, Config(lr=0.1), nodes=2)
    run.wait()
    run.result()
    study = sweep("sweeps/digits.yaml", trials=100)

A job function has the signature `train(run: Run, config: Config)`. Importing this package loads neither torch nor
optuna.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mgpu_slurm.api import Handle, find, runs, submit, sweep
    from mgpu_slurm.core.errors import UserError
    from mgpu_slurm.rank.torchvision_adapter import import_torchvision
    from mgpu_slurm.training.attach import attach
    from mgpu_slurm.training.average import MovingAverage
    from mgpu_slurm.training.parallel.pipeline import Pipeline
    from mgpu_slurm.training.run import Run
    from mgpu_slurm.training.speed.staging import staged

__all__ = [
    "Handle",
    "MovingAverage",
    "Pipeline",
    "Run",
    "UserError",
    "attach",
    "find",
    "import_torchvision",
    "runs",
    "staged",
    "submit",
    "sweep",
]

_HOMES = {
    "Handle": "mgpu_slurm.api",
    "MovingAverage": "mgpu_slurm.training.average",
    "Pipeline": "mgpu_slurm.training.parallel.pipeline",
    "Run": "mgpu_slurm.training.run",
    "UserError": "mgpu_slurm.core.errors",
    "attach": "mgpu_slurm.training.attach",
    "find": "mgpu_slurm.api",
    "import_torchvision": "mgpu_slurm.rank.torchvision_adapter",
    "runs": "mgpu_slurm.api",
    "staged": "mgpu_slurm.training.speed.staging",
    "submit": "mgpu_slurm.api",
    "sweep": "mgpu_slurm.api",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: a job does not need the launcher, and the launcher does not need torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
