"""The outcome of a trial, in its folder: `result.json`, or `failure.json` if it failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mgpu_slurm.core import retry
from mgpu_slurm.core.files import write_json
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder


@dataclass(frozen=True)
class Complete:
    state: ClassVar[str] = "COMPLETE"
    result: dict[str, float]
    """The job's result, by metric."""
    value: float
    step: int
    progress: int


@dataclass(frozen=True)
class Pruned:
    state: ClassVar[str] = "PRUNED"
    reason: str
    progress: int


@dataclass(frozen=True)
class Failed:
    state: ClassVar[str] = "FAIL"
    message: str


def write(trial: RunFolder, outcome: Complete | Pruned | Failed) -> None:
    """Write how a trial ended, and remove an outcome of a worker that died before reporting it to the study."""
    record = {"run": trial.run, "state": outcome.state, **vars(outcome), "ended": records.now()}
    file, other = trial.result, trial.failure
    if isinstance(outcome, Failed):
        file, other = other, file
    retry.while_unavailable(lambda: write_json(file, record, sync=False), f"{str(file)!r} cannot be written")
    other.unlink(missing_ok=True)
