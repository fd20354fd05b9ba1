"""The executors, and the choice of one for a request."""

from __future__ import annotations

import os
import shutil

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.executors.allocation import AllocationExecutor
from mgpu_slurm.executors.base import HELD_JOB_VARIABLE, Executor
from mgpu_slurm.executors.local import LocalExecutor
from mgpu_slurm.executors.slurm import SlurmExecutor
from mgpu_slurm.run_folder.record_types import RunState

EXECUTORS: dict[str, Executor] = {each.name: each for each in (SlurmExecutor(), AllocationExecutor(), LocalExecutor())}
"""Executors by their names in specs and states."""


def is_queued(state: RunState) -> bool:
    """Return whether a run's executor has a queue; False if the state could not be read."""
    executor = EXECUTORS.get(state.executor)
    return executor is not None and executor.is_queued


def choose(name: str) -> tuple[Executor, str]:
    """Return the executor of a request, and the reason. A named executor is never replaced by another one.

    Args:
        name: `auto`, or the name of an executor.

    Raises:
        UserError: no executor has that name.
    """
    if name == "auto":
        held = os.environ.get(HELD_JOB_VARIABLE)
        here = f"; --executor allocation would use job {held}, which is held here" if held else ""
        if shutil.which("sbatch") is None:
            return EXECUTORS[LocalExecutor.name], "no sbatch on PATH"
        return EXECUTORS[SlurmExecutor.name], f"sbatch is on PATH{here}"
    if name not in EXECUTORS:
        *names, last = "auto", *EXECUTORS
        raise UserError(f"--executor {name!r}: expected {', '.join(names)} or {last}")
    return EXECUTORS[name], "requested"
