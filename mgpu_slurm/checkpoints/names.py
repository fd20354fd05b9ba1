"""Which checkpoints a run has, by the names of their folders. Needs no torch."""

from __future__ import annotations

import re
from pathlib import Path

from mgpu_slurm.paths import RunFolder

_FINAL = re.compile(r"step-(\d{9,})")


def complete(run: RunFolder) -> list[Path]:
    """The whole checkpoints of a run, the oldest first."""
    found = [(step, path) for path in below(run) if (step := step_of(path)) is not None]
    return [path for _, path in sorted(found)]


def newest(run: RunFolder) -> Path | None:
    return next(reversed(complete(run)), None)


def step_of(path: Path) -> int | None:
    match = _FINAL.fullmatch(path.name)
    return int(match[1]) if match else None


def below(run: RunFolder) -> list[Path]:
    """Everything that lies where checkpoints do."""
    return list(run.checkpoints.iterdir()) if run.checkpoints.is_dir() else []
