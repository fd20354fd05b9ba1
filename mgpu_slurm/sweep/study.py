"""The study of a sweep: where it is kept, who chooses and who gives up, and the trials that workers take out of it.

Trials are queued before the first worker starts, as many as there may be: to take one is a step that only one worker
can make, so that there are never more, whatever workers do at the same moment. What a trial's parameters are is chosen
when it is taken. One that is given back keeps its number, its parameters and what it has reported.
"""

from __future__ import annotations

import importlib
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.study import Study
from optuna.trial import Trial, TrialState

from mgpu_slurm.errors import UserError
from mgpu_slurm.sweep.file import Pruner, Sampler, Sweep
from mgpu_slurm.sweep.journal import JournalFile
from mgpu_slurm.sweep.space import Space, Values, label

_VARIABLE = re.compile(r"\$\{(\w+)\}")

_SAMPLERS = {
    "tpe": "optuna.samplers.TPESampler",
    "random": "optuna.samplers.RandomSampler",
    # its points are queued with their values, and nothing is left to choose
    "grid": "optuna.samplers.RandomSampler",
    "gp": "optuna.samplers.GPSampler",
    "cmaes": "optuna.samplers.CmaEsSampler",
}


def create(sweep: Sweep, journal: Path) -> Study:
    """Makes the study with its trials, before anybody works on it.

    Args:
        journal: where it is kept, unless the sweep names a database; absolute.

    Raises:
        UserError: the database is not to be had, or has a study of that name.
    """
    try:
        study = optuna.create_study(
            storage=storage_of(sweep, journal, is_new=True), study_name=sweep.study, direction=sweep.direction
        )
    except optuna.exceptions.DuplicatedStudyError:
        raise UserError(f"study {sweep.study!r}: the database has one of that name: give this one another") from None
    queue(study, _points(sweep))
    return study


def load(sweep: Sweep, journal: Path, worker: int) -> Study:
    """The study as one of its workers has it, with a sampler that draws as no other worker's does."""
    return optuna.load_study(
        storage=storage_of(sweep, journal),
        study_name=sweep.study,
        sampler=sampler_of(sweep.sampler, worker),
        pruner=pruner_of(sweep.pruner),
    )


def storage_of(sweep: Sweep, journal: Path, is_new: bool = False) -> BaseStorage:
    """Where the study is kept.

    Args:
        is_new: makes what a database needs; workers that did so at the same moment would break it.

    Raises:
        UserError: a variable of the URL is not set.
    """
    if sweep.storage is None:
        return JournalStorage(JournalFile(journal))
    return RDBStorage(_expanded(sweep.storage), skip_compatibility_check=not is_new, skip_table_creation=not is_new)


def _expanded(url: str) -> str:
    """With the values of its variables, which stand in no file."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise UserError(f"storage {url!r}: {match[0]} is not set: export it, also where the workers run")
        return os.environ[match[1]]

    return _VARIABLE.sub(value, url)


def sampler_of(asked: Sampler, worker: int) -> BaseSampler:
    """The sampler of one worker.

    Raises:
        UserError: there is no such class, or it does not take these options.
    """
    cls = _class(_SAMPLERS.get(asked.name, asked.name))
    options = dict(asked.options)
    if asked.seed is not None:
        # one seed for all would let workers that start together try the same points
        options["seed"] = int(np.random.SeedSequence((asked.seed, worker)).generate_state(1)[0])
    try:
        with warnings.catch_warnings():
            # who names such a sampler, or option, knows
            warnings.simplefilter("ignore", ExperimentalWarning)
            made = cls(**options)
    except (TypeError, ValueError) as error:
        raise UserError(f"sampler {asked.name}: {error}: mend its options") from None
    if not isinstance(made, BaseSampler):
        raise UserError(f"sampler {asked.name}: it is no optuna.samplers.BaseSampler")
    return made


def _class(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"sampler {path}: {error}: check the import path") from None
    return found


def pruner_of(asked: Pruner) -> BasePruner:
    if asked.name == "hyperband":
        assert asked.max_resource is not None
        return HyperbandPruner(asked.min_resource, asked.max_resource, asked.reduction_factor)
    if asked.name == "median":
        # what is reported at the least resource is looked at already
        return MedianPruner(n_startup_trials=asked.startup_trials, n_warmup_steps=asked.min_resource)
    return NopPruner()


def _points(sweep: Sweep) -> list[Values]:
    """Of each trial that there may be, the values that are known before it starts."""
    if sweep.sampler.name == "grid":
        assert isinstance(sweep.space, Space)
        return sweep.space.grid()[: sweep.trials]
    return [{}] * (sweep.trials or 0)


def queue(study: Study, points: list[Values]) -> None:
    """Adds trials with these values; what a point does not say is chosen when it is taken."""
    for point in points:
        study.enqueue_trial({name: label(value) for name, value in point.items()})


def take(study: Study) -> Trial | None:
    """A trial that nobody else has, from now on this worker's; None where none is left.

    One that was given back comes first: all that it has reported would be lost with it.
    """
    storage = study._storage
    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    for trial in sorted(waiting, key=lambda trial: not trial.intermediate_values):
        try:
            if storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING):
                return Trial(study, trial._trial_id)
        except UpdateFinishedTrialError:
            # somebody has taken it, and ended it, in between
            continue
    return None


def give_back(study: Study, number: int) -> None:
    """Queues a trial again that is not at its end; it goes on under its own number."""
    study._storage.set_trial_state_values(study.trials[number]._trial_id, TrialState.WAITING)
