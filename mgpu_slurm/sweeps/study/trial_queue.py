"""The study of a sweep, and the trials that workers take out of it.

A worker takes a trial that waits, which is a step that only one can make, or begins the next one; a lock on a file that
all workers share keeps their number below what the sweep says, whatever they do at the same moment. What the parameters
of a trial are is chosen when it begins. One that is given back keeps its number, its parameters and its reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.sweeps import optuna_adapter
from mgpu_slurm.sweeps.optuna_adapter import FIXED_PARAMS
from mgpu_slurm.sweeps.scheduling import samplers
from mgpu_slurm.sweeps.scheduling.construction import pruner_of, sampler_of
from mgpu_slurm.sweeps.search.parameters import Values, label
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep_file import Sweep
from mgpu_slurm.sweeps.study.file_locks import locked
from mgpu_slurm.sweeps.study.journal import JournalFile
from mgpu_slurm.sweeps.study.storage import storage_of

_CLAIM = "mgpu:claim:"

REASON = "mgpu:reason"
"""Of a trial that failed or was pruned: why."""

LOSSES = "mgpu:losses"
"""Of a trial: those of its attempts over which a worker has died, or left without a checkpoint."""

SECONDS = "mgpu:seconds"
"""Of a trial that was given back: how long workers had it before."""

OVER = "mgpu:over"
"""Of a study: why no trial starts any more."""

ORIGIN = "mgpu:origin"
"""Of a trial that another study has made, with which this one started: that study's name."""

ORIGINS = "mgpu:origins"
"""Of a study: how many such trials it has."""


@dataclass(frozen=True)
class Worker:
    """One attempt of a sweep's worker."""

    number: int
    attempt: int

    @property
    def claim(self) -> str:
        """The name of what a trial says of this worker."""
        return f"{_CLAIM}{self.number}"


def create(sweep: Sweep, journal: Path) -> Study:
    """Makes the study with the points that are known to be good, before anybody works on it.

    Args:
        journal: where it is kept, unless the sweep names a database; absolute.

    Raises:
        UserError: the database cannot be opened, or has a study of that name.
    """
    optuna_adapter.silence()
    try:
        study = optuna.create_study(
            storage=storage_of(sweep, journal, is_new=True), study_name=sweep.study, direction=sweep.direction
        )
    except optuna.exceptions.DuplicatedStudyError:
        raise UserError(f"study {sweep.study!r}: the database has one of that name: give this one another") from None
    queue(study, list(sweep.enqueue))
    return study


def load(sweep: Sweep, journal: Path, worker: Worker | None = None) -> Study:
    """The study as one of its workers has it, with a sampler that draws as no other attempt of any worker does.

    Args:
        worker: None for who looks at it or adds to it, and chooses nothing: the class of a sampler of one's own may be
            nowhere but in the run's code.
    """
    optuna_adapter.silence()
    return optuna.load_study(
        storage=storage_of(sweep, journal),
        study_name=sweep.study,
        sampler=None if worker is None else sampler_of(sweep.sampler, worker.number, worker.attempt),
        pruner=None if worker is None else pruner_of(sweep.pruner),
    )


def queue(study: Study, points: list[Values]) -> None:
    """Adds trials with these values, for whoever comes next; what a point does not say is chosen when it is taken."""
    for point in points:
        study.enqueue_trial(kept(point))


def queued(study: Study) -> list[Values]:
    """All points that were ever added, as they are kept."""
    trials = study.get_trials(deepcopy=False)
    return [trial.system_attrs[FIXED_PARAMS] for trial in trials if FIXED_PARAMS in trial.system_attrs]


def kept(values: Values) -> Values:
    """Values as the study has them."""
    return {name: label(value) for name, value in values.items()}


def begun(study: Study) -> int:
    """How many trials the study has, but for those that it started with."""
    return optuna_adapter.trial_count(study) - int(notes(study).get(ORIGINS, 0))


def take(study: Study, sweep: Sweep, worker: Worker, lock: Path, only_given_back: bool = False) -> Trial | None:
    """A trial that nobody else has, from now on this worker's; None where there may be no more.

    Args:
        lock: a file that all workers share.
        only_given_back: one that has been begun before, and no other.
    """
    # the sampler may have kept the trials as they were
    optuna_adapter.forget_cached_trials(study)
    waiting = _take_waiting(study, worker, only_given_back)
    if waiting is not None:
        return Trial(study, waiting)
    if only_given_back:
        return None
    with locked(lock):
        number = begun(study)
        if sweep.trials is not None and number >= sweep.trials:
            return None
        new = _begin(study, worker, _point(sweep, number))
    # the sampler chooses here, which may take long
    return Trial(study, new)


@contextmanager
def synced_once(study: Study) -> Iterator[None]:
    """What is written within it is there for others at once, and durable at its end: a journal waits for its disk once.

    A database has each call on its disk, within it too.
    """
    backend = optuna_adapter.journal_of(study)
    with backend.synced_once() if isinstance(backend, JournalFile) else nullcontext():
        yield


def _point(sweep: Sweep, number: int) -> Values:
    """Of a grid, that of the trial of this number."""
    if sweep.sampler.name != "grid":
        return {}
    assert isinstance(sweep.space, Space)
    return sweep.space.grid()[number]


def _begin(study: Study, worker: Worker, known: Values) -> int:
    """The id of a new trial, the worker's from the start."""
    attributes: dict[str, Any] = {worker.claim: worker.attempt}
    if known:
        # as of one that was queued
        attributes[FIXED_PARAMS] = kept(known)
    template = create_trial(state=TrialState.RUNNING, system_attrs=attributes)
    return optuna_adapter.create_trial(study, template)


def _take_waiting(study: Study, worker: Worker, only_given_back: bool) -> int | None:
    """The id of a trial that has waited, because it was given back or added; None where none does.

    The worker says beforehand that it may have the trial from now on: one that is running always names who runs it,
    also where that one died in the same moment.
    """
    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    if only_given_back:
        waiting = [trial for trial in waiting if was_given_back(trial)]
    for trial in _by_turn(waiting, worker):
        with suppress(UpdateFinishedTrialError):
            optuna_adapter.set_trial_attribute(study, trial, worker.claim, worker.attempt)
            if optuna_adapter.set_trial_state(study, trial, TrialState.RUNNING):
                return optuna_adapter.id_of(trial)
            # somebody else was faster
            optuna_adapter.set_trial_attribute(study, trial, worker.claim, None)
    return None


def _by_turn(waiting: list[FrozenTrial], worker: Worker) -> Iterator[FrozenTrial]:
    """Those that have been begun before the others; each worker starts with another one, as those who want the same
    trial get into each other's way."""
    for kind in (True, False):
        trials = [trial for trial in waiting if was_given_back(trial) is kind]
        start = worker.number % len(trials) if trials else 0
        yield from trials[start:]
        yield from trials[:start]


def was_given_back(trial: FrozenTrial) -> bool:
    """Whether it has been begun, and waits to go on."""
    return trial.state == TrialState.WAITING and SECONDS in trial.system_attrs


def claims(trial: FrozenTrial) -> dict[int, int]:
    """Who may be running the trial: attempts by the number of their worker."""
    attributes = trial.system_attrs.items()
    return {int(key[len(_CLAIM) :]): value for key, value in attributes if key.startswith(_CLAIM) and value is not None}


def give_back(study: Study, trial: FrozenTrial) -> None:
    """Queues a running trial again that is not at its end; it goes on under its own number, as nobody's."""
    assert trial.datetime_start is not None
    seconds = trial.system_attrs.get(SECONDS, 0.0) + (datetime.now() - trial.datetime_start).total_seconds()
    optuna_adapter.set_trial_attribute(study, trial, SECONDS, seconds)
    _disclaim(study, trial)
    optuna_adapter.set_trial_state(study, trial, TrialState.WAITING)


def doubt(study: Study, trial: FrozenTrial, worker: Worker, reason: str) -> None:
    """Give back a trial that failed, so that another worker shows whether it fails there too."""
    time = datetime.now().astimezone().isoformat()
    facts: dict[str, Any] = {
        "worker": worker.number,
        "time": time,
        "reason": reason,
        "reports": len(trial.intermediate_values),
    }
    optuna_adapter.set_trial_attribute(study, trial, samplers.DOUBT, facts)
    give_back(study, trial)


def fail(study: Study, trial: FrozenTrial, reason: str, is_own_fault: bool = False) -> None:
    """End a trial without a value; `is_own_fault` as for `blame`."""
    blame(study, trial, reason, is_own_fault)
    optuna_adapter.set_trial_state(study, trial, TrialState.FAIL)


def blame(study: Study, trial: FrozenTrial, reason: str, is_own_fault: bool) -> None:
    """Write down why a trial has no value.

    Args:
        is_own_fault: its own code is the cause, which would end it again: the sampler keeps away from its parameters.
    """
    optuna_adapter.set_trial_attribute(study, trial, REASON, reason)
    if is_own_fault:
        optuna_adapter.set_trial_attribute(study, trial, samplers.OWN_FAULT, True)


def _disclaim(study: Study, trial: FrozenTrial) -> None:
    for number in claims(trial):
        optuna_adapter.set_trial_attribute(study, trial, f"{_CLAIM}{number}", None)


def note(study: Study, key: str, value: Any) -> None:
    """Writes down something about the whole study, which every worker sees before its next trial."""
    optuna_adapter.set_study_attribute(study, key, value)


def notes(study: Study) -> dict[str, Any]:
    return optuna_adapter.study_attributes(study)
