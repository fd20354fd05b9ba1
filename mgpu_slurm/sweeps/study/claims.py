"""Which worker has a trial, and how it loses it: the trial is given back, paused, in doubt, or failed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime

from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from mgpu_slurm.sweeps import optuna_adapter
from mgpu_slurm.sweeps.scheduling import samplers
from mgpu_slurm.sweeps.study.snapshots import SECONDS, SETTLED

_CLAIM = "mgpu:claim:"

REASON = "mgpu:reason"
"""Attribute of a trial that failed or was pruned: the reason."""

LOSSES = "mgpu:losses"
"""Attribute of a trial: its attempts in which the worker died, or left without a checkpoint."""

SIZE = "mgpu:size"
"""Attribute of a paused trial: bytes of its checkpoints."""


@dataclass(frozen=True)
class Worker:
    """One attempt of a sweep's worker."""

    number: int
    attempt: int
    process: int = 0
    """As in `Rank`: each of a worker's processes takes its own trials."""

    @property
    def claim(self) -> str:
        """Name of the attribute by which a trial names this worker."""
        return f"{_CLAIM}{self.number}{f'/{self.process}' if self.process else ''}"

    def has(self, trial: FrozenTrial) -> bool:
        """Return whether the trial is, or was to its end, in the hands of this worker."""
        return bool(trial.system_attrs.get(self.claim) == self.attempt)


def claim(study: Study, worker: Worker, trial: FrozenTrial) -> bool:
    """Take a waiting trial; return whether no other worker was faster.

    The worker writes its claim first, so that a running trial always names its worker, even if that worker dies at the
    same moment. The caller must hold the lock: else another worker could take the trial and give it back between the
    two writes, which removes this claim as well.
    """
    optuna_adapter.set_trial_attribute(study, trial, worker.claim, worker.attempt)
    is_mine = optuna_adapter.set_trial_state(study, trial, TrialState.RUNNING)
    if not is_mine:
        optuna_adapter.set_trial_attribute(study, trial, worker.claim, None)
    return is_mine


def claims(trial: FrozenTrial) -> dict[int, int]:
    """Return who may be running the trial: attempts by worker number."""
    return {int(key[len(_CLAIM) :].partition("/")[0]): value for key, value in _claims(trial).items()}


def claimants(trial: FrozenTrial) -> int:
    """Return how many processes of workers claim the trial."""
    return len(_claims(trial))


def _claims(trial: FrozenTrial) -> dict[str, int]:
    attributes = trial.system_attrs.items()
    return {key: value for key, value in attributes if key.startswith(_CLAIM) and value is not None}


def give_back(study: Study, trial: FrozenTrial) -> None:
    """Queue an unfinished running trial again; it keeps its number and belongs to no worker."""
    assert trial.datetime_start is not None
    seconds = trial.system_attrs.get(SECONDS, 0.0) + (datetime.now() - trial.datetime_start).total_seconds()
    optuna_adapter.set_trial_attribute(study, trial, SECONDS, seconds)
    _disclaim(study, trial)
    optuna_adapter.set_trial_state(study, trial, TrialState.WAITING)


def pause(study: Study, trial: FrozenTrial, size: int) -> None:
    """Let a running trial wait at its rung.

    Args:
        size: bytes of its checkpoints.
    """
    optuna_adapter.set_trial_attribute(study, trial, SIZE, size)
    if samplers.DOUBT in trial.system_attrs:
        optuna_adapter.set_trial_attribute(study, trial, SETTLED, True)
    give_back(study, trial)


def doubt(study: Study, trial: FrozenTrial, worker: Worker, reason: str) -> None:
    """Give back a trial that failed, so that another worker shows whether it fails there too."""
    time = datetime.now().astimezone().isoformat()
    doubt = samplers.Doubt(worker.number, time, reason, reports=len(trial.intermediate_values))
    optuna_adapter.set_trial_attribute(study, trial, samplers.DOUBT, asdict(doubt))
    give_back(study, trial)


def fail(study: Study, trial: FrozenTrial, reason: str, is_own_fault: bool = False) -> None:
    """End a trial without a value; `is_own_fault` as for `blame`."""
    blame(study, trial, reason, is_own_fault)
    optuna_adapter.set_trial_state(study, trial, TrialState.FAIL)


def blame(study: Study, trial: FrozenTrial, reason: str, is_own_fault: bool) -> None:
    """Record why a trial has no value.

    Args:
        is_own_fault: whether its own code is the cause and would fail again; the sampler then avoids its parameters.
    """
    optuna_adapter.set_trial_attribute(study, trial, REASON, reason)
    if is_own_fault:
        optuna_adapter.set_trial_attribute(study, trial, samplers.OWN_FAULT, True)


def _disclaim(study: Study, trial: FrozenTrial) -> None:
    for key in _claims(trial):
        optuna_adapter.set_trial_attribute(study, trial, key, None)
