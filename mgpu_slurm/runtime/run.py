"""`mgpu_slurm.training.run` at the name of version 0.1 (see `mgpu_slurm.runtime`)."""

from __future__ import annotations

from mgpu_slurm.training.run import Run

__all__ = ["Run"]
