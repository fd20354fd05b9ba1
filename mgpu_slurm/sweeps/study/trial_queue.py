"""The study of a sweep, and the queue of its trials.

A worker takes a waiting trial, which only one worker can do, or begins the next one. A lock on a file that all workers
share keeps the number of trials within the sweep's limit, even if several workers begin one at the same moment.
Parameters are chosen when a trial begins. A trial that is given back keeps its number, its parameters and its reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import locked
from mgpu_slurm.run_folder.record_types import SweepOver
from mgpu_slurm.sweeps import optuna_adapter
from mgpu_slurm.sweeps.optuna_adapter import FIXED_PARAMS
from mgpu_slurm.sweeps.scheduling import samplers
from mgpu_slurm.sweeps.scheduling.construction import pruner_of, sampler_of
from mgpu_slurm.sweeps.search.parameters import Values, label
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep_file import Sweep
from mgpu_slurm.sweeps.study.journal import JournalFile
from mgpu_slurm.sweeps.study.storage import storage_of

_CLAIM = "mgpu:claim:"

REASON = "mgpu:reason"
"""Attribute of a trial that failed or was pruned: the reason."""

LOSSES = "mgpu:losses"
"""Attribute of a trial: its attempts in which the worker died, or left without a checkpoint."""

SECONDS = "mgpu:seconds"
"""Attribute of a trial that was given back: how long workers had it before, in seconds."""

OVER = "mgpu:over"
"""Attribute of a study: a `SweepOver`."""

ORIGIN = "mgpu:origin"
"""Attribute of a trial copied from an earlier study at the start: the name of that study."""

ORIGINS = "mgpu:origins"
"""Attribute of a study: the number of such trials."""


@dataclass(frozen=True)
class Worker:
    """One attempt of a sweep's worker."""

    number: int
    attempt: int

    @property
    def claim(self) -> str:
        """Name of the attribute by which a trial names this worker."""
        return f"{_CLAIM}{self.number}"


def create(sweep: Sweep, journal: Path) -> Study:
    """Create the study and queue its enqueued points, before any worker starts.

    Args:
        journal: absolute path of the journal, used unless the sweep names a database.

    Raises:
        UserError: the database cannot be opened, or has a study of that name.
    """
    optuna_adapter.silence()
    try:
        study = optuna.create_study(
            storage=storage_of(sweep, journal, is_new=True), study_name=sweep.study, direction=sweep.direction
        )
    except optuna.exceptions.DuplicatedStudyError:
        raise UserError(f"study {sweep.study!r}: the database already has one of that name: choose another") from None
    queue(study, list(sweep.enqueue))
    return study


def load(sweep: Sweep, journal: Path, worker: Worker | None = None) -> Study:
    """Load the study for a worker, with a sampler that draws differently from every other attempt of any worker.

    Args:
        worker: None if the caller only reads the study or adds to it, and samples nothing: a user's sampler class may
            exist only in the run's code.
    """
    optuna_adapter.silence()
    return optuna.load_study(
        storage=storage_of(sweep, journal),
        study_name=sweep.study,
        sampler=None if worker is None else sampler_of(sweep.sampler, worker.number, worker.attempt),
        pruner=None if worker is None else pruner_of(sweep.pruner),
    )


def queue(study: Study, points: list[Values]) -> None:
    """Queue trials with these values; parameters that a point leaves out are sampled when the trial begins."""
    for point in points:
        study.enqueue_trial(kept(point))


def queued(study: Study) -> list[Values]:
    """Return all points that were ever queued, in the study's form."""
    trials = study.get_trials(deepcopy=False)
    return [trial.system_attrs[FIXED_PARAMS] for trial in trials if FIXED_PARAMS in trial.system_attrs]


def kept(values: Values) -> Values:
    """Return values in the study's form."""
    return {name: label(value) for name, value in values.items()}


def begun(study: Study) -> int:
    """Return the number of trials in the study, without those copied from an earlier study."""
    return optuna_adapter.trial_count(study) - int(notes(study).get(ORIGINS, 0))


def take(study: Study, sweep: Sweep, worker: Worker, lock: Path, only_given_back: bool = False) -> Trial | None:
    """Take a trial for this worker; return None if the limit of trials is reached.

    Args:
        lock: a file that all workers share.
        only_given_back: take only a trial that was begun before.
    """
    # the sampler may have cached older states of the trials
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
    # the sampler runs here, which may take long
    return Trial(study, new)


@contextmanager
def synced_once(study: Study) -> Iterator[None]:
    """Make writes visible to others at once, but durable only at the end: a journal is synced to disk once.

    A database still commits each call to disk.
    """
    backend = optuna_adapter.journal_of(study)
    with backend.synced_once() if isinstance(backend, JournalFile) else nullcontext():
        yield


def _point(sweep: Sweep, number: int) -> Values:
    """Return the grid point of the trial with this number; without a grid, no values."""
    if sweep.sampler.name != "grid":
        return {}
    assert isinstance(sweep.space, Space)
    return sweep.space.grid()[number]


def _begin(study: Study, worker: Worker, known: Values) -> int:
    """Create a trial that the worker owns from the start, and return its id."""
    attributes: dict[str, object] = {worker.claim: worker.attempt}
    if known:
        # as for a queued trial
        attributes[FIXED_PARAMS] = kept(known)
    template = create_trial(state=TrialState.RUNNING, system_attrs=attributes)
    return optuna_adapter.create_trial(study, template)


def _take_waiting(study: Study, worker: Worker, only_given_back: bool) -> int | None:
    """Take a waiting trial, which was given back or queued, and return its id; None if no trial waits.

    The worker writes its claim first, so that a running trial always names its worker, even if that worker dies at the
    same moment.
    """
    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    if only_given_back:
        waiting = [trial for trial in waiting if was_given_back(trial)]
    for trial in _by_turn(waiting, worker):
        with suppress(UpdateFinishedTrialError):
            optuna_adapter.set_trial_attribute(study, trial, worker.claim, worker.attempt)
            if optuna_adapter.set_trial_state(study, trial, TrialState.RUNNING):
                return optuna_adapter.id_of(trial)
            # another worker was faster
            optuna_adapter.set_trial_attribute(study, trial, worker.claim, None)
    return None


def _by_turn(waiting: list[FrozenTrial], worker: Worker) -> Iterator[FrozenTrial]:
    """Yield the trials that were begun before, then the others. Each worker starts at a different trial, to avoid
    competition for the same one."""
    for kind in (True, False):
        trials = [trial for trial in waiting if was_given_back(trial) is kind]
        start = worker.number % len(trials) if trials else 0
        yield from trials[start:]
        yield from trials[:start]


def was_given_back(trial: FrozenTrial) -> bool:
    """Return whether the trial was begun before and waits to be resumed."""
    return trial.state == TrialState.WAITING and SECONDS in trial.system_attrs


def claims(trial: FrozenTrial) -> dict[int, int]:
    """Return who may be running the trial: attempts by worker number."""
    attributes = trial.system_attrs.items()
    return {int(key[len(_CLAIM) :]): value for key, value in attributes if key.startswith(_CLAIM) and value is not None}


def give_back(study: Study, trial: FrozenTrial) -> None:
    """Queue an unfinished running trial again; it keeps its number and belongs to no worker."""
    assert trial.datetime_start is not None
    seconds = trial.system_attrs.get(SECONDS, 0.0) + (datetime.now() - trial.datetime_start).total_seconds()
    optuna_adapter.set_trial_attribute(study, trial, SECONDS, seconds)
    _disclaim(study, trial)
    optuna_adapter.set_trial_state(study, trial, TrialState.WAITING)


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
    for number in claims(trial):
        optuna_adapter.set_trial_attribute(study, trial, f"{_CLAIM}{number}", None)


def note(study: Study, key: str, value: Any) -> None:
    """Set an attribute of the study, which every worker sees before its next trial."""
    optuna_adapter.set_study_attribute(study, key, value)


def why_over(study: Study) -> SweepOver | None:
    """Return why no more trials start; None if they do."""
    found = notes(study).get(OVER)
    return found and SweepOver.from_json(found)


def set_over(study: Study, over: SweepOver | None) -> None:
    note(study, OVER, None if over is None else over.to_json())


def notes(study: Study) -> dict[str, Any]:
    return optuna_adapter.study_attributes(study)
