"""Trials that were left running, by an earlier attempt of this worker or by a process of this one that has died."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from mgpu_slurm.core import retry
from mgpu_slurm.core.files import locked, write_json
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps import optuna_adapter
from mgpu_slurm.sweeps.client.worker_health import WorkerHealth
from mgpu_slurm.sweeps.client.worker_study import WorkerStudy
from mgpu_slurm.sweeps.study import claims as claiming
from mgpu_slurm.sweeps.study import recovery
from mgpu_slurm.sweeps.study.claims import Worker
from mgpu_slurm.sweeps.study.recovery import Death


def note_death(folder: RunFolder, attempt: int, process: int, death: Death) -> None:
    """Note that a process of a worker has died, for the others: one of them gives its trial back to the study."""
    file = folder.logs / f"{attempt}-{process}.gone"
    retry.for_the_disk(lambda: write_json(file, asdict(death)), file)


def settle(shared: WorkerStudy, health: WorkerHealth) -> None:
    """Release what earlier attempts of this worker left running.

    Raises:
        SweepFailed, BrokenWorker: see `WorkerHealth.check`.
    """
    own = shared.worker
    for trial in _running(shared):
        claims = claiming.claims(trial)
        attempt = claims.pop(own.number, own.attempt)
        # if others claim it too, another worker may have been faster: `recover` checks whether they are alive
        if attempt < own.attempt and not claims:
            _release(shared, health, trial, recovery.of_attempt(shared.folder, attempt, trial.number))


def settle_deaths(shared: WorkerStudy, health: WorkerHealth, is_last: bool) -> None:
    """Release the trials of processes of this attempt that have died.

    Args:
        is_last: whether no other study of this worker may have these trials.

    Raises:
        SweepFailed, BrokenWorker: see `WorkerHealth.check`.
    """
    for file in shared.folder.logs.glob(f"{shared.worker.attempt}-*.gone"):
        with suppress(FileNotFoundError):
            if _settle_death(shared, health, file) or is_last:
                # another process may be faster
                file.unlink()


def _settle_death(shared: WorkerStudy, health: WorkerHealth, file: Path) -> bool:
    """Release the trial of a process; return whether it had one in this study."""
    dead = replace(shared.worker, process=int(file.stem.rpartition("-")[2]))
    death = Death(**json.loads(file.read_text()))
    found = [trial for trial in _running(shared) if dead.has(trial)]
    for trial in found:
        if claiming.claimants(trial) == 1:
            _release(shared, health, trial, death, dead)
        else:
            # it died before it knew that another one had taken the trial
            optuna_adapter.set_trial_attribute(shared.study, trial, dead.claim, None)
    return bool(found)


def _running(shared: WorkerStudy) -> list[FrozenTrial]:
    return shared.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))


def _release(
    shared: WorkerStudy, health: WorkerHealth, trial: FrozenTrial, death: Death | None, dead: Worker | None = None
) -> None:
    """
    Args:
        dead: the process that had it; None for an earlier attempt of this worker.
    """
    death = death or Death("its worker died")
    claims, has_failed = claiming.claims(trial), False
    with locked(shared.folder.trials_lock):
        now = optuna_adapter.read_trial(shared.study, trial)
        is_left = now.state == TrialState.RUNNING and claiming.claims(now) == claims and (dead is None or dead.has(now))
        if is_left and death.is_trials_fault and health.is_doubtful(now, death.reason):
            claiming.doubt(shared.study, now, shared.worker, death.reason)
        elif is_left:
            has_failed = recovery.release(shared.study, shared.sweep_folder, now, death, shared.sweep)
    if has_failed:
        health.check(death.reason)
