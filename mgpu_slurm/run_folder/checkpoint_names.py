"""The checkpoints of a run, found by the names of their folders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from mgpu_slurm.run_folder.layout import RunFolder

_FINAL = re.compile(r"step-(\d{9,})(?:\.(\d+))?")


class CheckpointKey(NamedTuple):
    """Identifies a checkpoint of a run; a later one compares greater.

    A run may save several checkpoints at one step, such as before and after an evaluation that reports. The first is
    `step-000000120`; later ones are `step-000000120.2` and so on, which version 0.1 does not read.
    """

    step: int
    number: int = 1
    """1, 2, ... among the checkpoints of this step."""


def complete_checkpoints(run: RunFolder) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    found = [(key, path) for path in below_checkpoints(run) if (key := checkpoint_key(path)) is not None]
    return [path for _, path in sorted(found)]


def newest_checkpoint(run: RunFolder) -> Path | None:
    return next(reversed(complete_checkpoints(run)), None)


def checkpoint_key(path: Path) -> CheckpointKey | None:
    match = _FINAL.fullmatch(path.name)
    return CheckpointKey(int(match[1]), int(match[2] or 1)) if match else None


def checkpoint_step(path: Path) -> int | None:
    key = checkpoint_key(path)
    return None if key is None else key.step


def below_checkpoints(run: RunFolder) -> list[Path]:
    """Return everything in the checkpoints folder."""
    return list(run.checkpoints.iterdir()) if run.checkpoints.is_dir() else []
