"""Trials that an earlier attempt of this worker, or a process of this attempt, left running when it died."""

from __future__ import annotations

import json
import os
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass, replace

from optuna.trial import FrozenTrial, TrialState

from mgpu_slurm.core.files import locked
from mgpu_slurm.sweeps import optuna_adapter
from mgpu_slurm.sweeps.client.worker_health import WorkerHealth
from mgpu_slurm.sweeps.client.worker_study import WorkerStudy
from mgpu_slurm.sweeps.study import claims as claiming
from mgpu_slurm.sweeps.study import recovery
from mgpu_slurm.sweeps.study.recovery import Death

_VARIABLE = "MGPU_REPLACES"
"""A `Predecessor` as JSON, in the environment of the process that replaces it."""


@dataclass(frozen=True)
class Predecessor:
    """A process of this worker that has ended, and is replaced by another one."""

    process: int
    death: Death

    def variables(self) -> dict[str, str]:
        """Return the environment variable for the process that replaces it."""
        return {_VARIABLE: json.dumps(asdict(self))}


def take_predecessor(environ: MutableMapping[str, str] = os.environ) -> Predecessor | None:
    """Return the process that this one replaces, and remove it from the environment."""
    told = environ.pop(_VARIABLE, None)
    if told is None:
        return None
    values = json.loads(told)
    return Predecessor(values["process"], Death(**values["death"]))


def settle(shared: WorkerStudy, health: WorkerHealth, replaced: Predecessor | None = None) -> None:
    """Release the trials that earlier attempts of this worker left running, and the process that this one replaces.

    Raises:
        SweepFailed, BrokenWorker: see `WorkerHealth.check`.
    """
    own = shared.worker
    if replaced is not None:
        shared.show(replaces=replaced.process)
    for trial in shared.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if replaced is not None and replace(own, process=replaced.process).has(trial):
            _settle(shared, health, trial, own.attempt, replaced.death)
            continue
        claims = claiming.claims(trial)
        attempt = claims.pop(own.number, own.attempt)
        # if others claim it too, another worker may have been faster: `recover` checks whether they are alive
        if attempt < own.attempt and not claims:
            death = recovery.of_attempt(shared.folder, attempt) or Death("its worker died")
            _settle(shared, health, trial, attempt, death)


def _settle(shared: WorkerStudy, health: WorkerHealth, trial: FrozenTrial, attempt: int, death: Death) -> None:
    has_failed = False
    with locked(shared.folder.trials_lock):
        now = optuna_adapter.read_trial(shared.study, trial)
        is_own = now.state == TrialState.RUNNING and claiming.claims(now).get(shared.worker.number) == attempt
        if is_own and death.is_trials_fault and health.is_doubtful(now, death.reason):
            claiming.doubt(shared.study, now, shared.worker, death.reason)
        elif is_own:
            has_failed = recovery.release(shared.study, shared.sweep_folder, now, death, shared.sweep)
    if has_failed:
        health.check()
