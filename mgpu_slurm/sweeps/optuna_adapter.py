"""All uses of private names of Optuna.

Optuna may change these names in any version. This module was written for Optuna 5.0.0, and 5.0 is the oldest supported
version; its test checks that each private name exists. No other module uses one.
"""

from __future__ import annotations

import copy
import json
from abc import abstractmethod
from collections.abc import Callable, Container, Sequence
from typing import Any, TypeAlias

import numpy.typing as npt
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import CmaEsSampler, TPESampler
from optuna.samplers._tpe.sampler import (
    _RELATIVE_PARAMS_KEY,
    _SYSTEM_ATTR_MAX_LENGTH,
    default_gamma,
    default_gamma_multiobjective,
)
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import BaseJournalBackend
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

FIXED_PARAMS = "fixed_params"
"""Attribute of a trial that begins with given parameters, as `Study.enqueue_trial` sets it."""

CONSTRAINT = "constraints:"
"""Attribute of a trial, followed by a name: by how much it violates a constraint, as `Trial.set_constraint` sets it."""

Samples: TypeAlias = dict[str, npt.NDArray[Any]]
"""Values by parameter, of several samples."""

Density: TypeAlias = Callable[[Samples], Any]
"""A function from samples to the logarithm of their probability densities."""


def silence() -> None:
    """Let Optuna print only warnings: this package prints how trials end."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)


# -- studies


def delete_study(study: Study) -> None:
    study._storage.delete_study(study._study_id)


def study_attributes(study: Study) -> dict[str, Any]:
    return study._storage.get_study_system_attrs(study._study_id)


def set_study_attribute(study: Study, key: str, value: Any) -> None:
    study._storage.set_study_system_attr(study._study_id, key, value)


def journal_of(study: Study) -> BaseJournalBackend | None:
    """Return the backend of the study's journal; None if the study is kept in a database."""
    backend: BaseJournalBackend | None = getattr(study._storage, "_backend", None)
    return backend


def forget_cached_trials(study: Study) -> None:
    """Make the next sampler read the trials again, as `Study.ask` does."""
    study._thread_local.cached_all_trials = None


# -- trials


def trial_count(study: Study) -> int:
    """Return the number of trials in all states, without reading them."""
    count: int = study._storage.get_n_trials(study._study_id)
    return count


def create_trial(study: Study, template: FrozenTrial) -> int:
    """Create a trial like the template, and return its id."""
    return study._storage.create_new_trial(study._study_id, template_trial=template)


def id_of(trial: FrozenTrial) -> int:
    return trial._trial_id


def read_trial(study: Study, trial: Trial | FrozenTrial) -> FrozenTrial:
    """Return the current state of the trial in the study."""
    return study._storage.get_trial(trial._trial_id)


def set_trial_attribute(study: Study, trial: FrozenTrial, key: str, value: Any) -> None:
    study._storage.set_trial_system_attr(trial._trial_id, key, value)


def report(study: Study, trial: Trial | FrozenTrial, progress: int, value: float) -> None:
    """Store a value that the trial has reported; also for a study with several objectives."""
    study._storage.set_trial_intermediate_value(trial._trial_id, progress, value)


def end_trial(study: Study, trial: Trial | FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
    """End a trial with its values; None if it has none."""
    study._storage.set_trial_state_values(trial._trial_id, state, values)


def set_trial_state(study: Study, trial: FrozenTrial, state: TrialState) -> bool:
    """Set the state; return False if the trial was to be started and another worker has started it."""
    return study._storage.set_trial_state_values(trial._trial_id, state)


# -- storages


class CheckedJournalStorage(JournalStorage):
    """Optuna's journal; a subclass handles errors in reading what others have appended."""

    @abstractmethod
    def read_new(self, read: Callable[[], None]) -> None:
        """Call `read`, by which Optuna reads new records."""

    def _sync_with_backend(self) -> None:
        self.read_new(super()._sync_with_backend)


class CreateOnceStorage(RDBStorage):
    """Optuna's storage without its retry, which creates a second trial if the first one is not confirmed."""

    @abstractmethod
    def creation_lost(self) -> Exception:
        """Return the error to raise if it is unknown whether a new trial is stored."""

    def _create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> FrozenTrial:
        self._is_prepared = False
        return super()._create_new_trial(study_id, template_trial)

    def _get_prepared_new_trial(self, *given: Any) -> Any:
        if self._is_prepared:
            # all statements succeeded and only the commit failed: it may have taken effect
            raise self.creation_lost()
        prepared = super()._get_prepared_new_trial(*given)
        self._is_prepared = True
        return prepared


# -- samplers


class StudyView:
    """A study that shows a sampler different trials and is otherwise the same."""

    def __init__(self, study: Study, shown: Callable[[list[FrozenTrial]], list[FrozenTrial]]) -> None:
        """
        Args:
            shown: takes the study's trials and returns those to show.
        """
        self._study = study
        self._shown = shown

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)

    @property
    def direction(self) -> StudyDirection:
        """That of the first objective, by which trials are pruned; a study with several refuses to tell."""
        return self._study.directions[0]

    def get_trials(self, deepcopy: bool = True, states: Container[TrialState] | None = None) -> list[FrozenTrial]:
        return self._get_trials(deepcopy, states)

    def _get_trials(
        self, deepcopy: bool = True, states: Container[TrialState] | None = None, use_cache: bool = False
    ) -> list[FrozenTrial]:
        trials = self._shown(self._study._get_trials(deepcopy=False, use_cache=use_cache))
        found = [trial for trial in trials if states is None or trial.state in states]
        return copy.deepcopy(found) if deepcopy else found


class TrialsView(StudyView):
    """A study that shows given trials, without reading any."""

    def __init__(self, study: Study, trials: Sequence[FrozenTrial]) -> None:
        super().__init__(study, list)
        self.trials_shown = trials

    def _get_trials(
        self, deepcopy: bool = True, states: Container[TrialState] | None = None, use_cache: bool = False
    ) -> list[FrozenTrial]:
        found = [trial for trial in self.trials_shown if states is None or trial.state in states]
        return copy.deepcopy(found) if deepcopy else found


class WeightedTpe(TPESampler):
    """TPE; a subclass limits the best share of trials and weighs the gain of samples."""

    @abstractmethod
    def prepare(self, study: Study, search_space: dict[str, BaseDistribution]) -> None:
        """Prepare for a proposal."""

    @abstractmethod
    def weigh(self, gain: Any, samples: Samples) -> Any:
        """Return the gain by which the best of the samples is chosen."""

    def limit_best_share(self, study: Study, limit: int) -> None:
        """Limit the number of best trials, from which TPE draws."""
        usual = default_gamma if len(study.directions) == 1 else default_gamma_multiobjective
        asked = vars(self).setdefault("_asked_gamma", self._gamma or usual)
        self._gamma = lambda count: min(asked(count), limit)

    def draw(self, study: Any, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """Return values for these parameters, drawn together, whatever the number of trials."""
        return self._sample(study, trial, search_space)

    def parameters_of(self, study: Any, trial: FrozenTrial) -> dict[str, Any]:
        """Return the parameters of a trial, also those that its worker has drawn and not stored one by one yet."""
        return self._get_params(trial, study)

    def random_numbers(self) -> Any:
        """Return the sampler's generator, a `numpy.random.RandomState`."""
        return self._rng.rng

    @staticmethod
    def share(study: Any, trial: FrozenTrial, params: dict[str, Any]) -> None:
        """Store drawn parameters where the samplers of other workers look for them."""
        text, longest = json.dumps(params), _SYSTEM_ATTR_MAX_LENGTH
        for place, start in enumerate(range(0, len(text), longest)):
            key = f"{_RELATIVE_PARAMS_KEY}:{place}"
            study._storage.set_trial_system_attr(trial._trial_id, key, text[start : start + longest])

    def density(self, study: Study, search_space: dict[str, BaseDistribution], trials: list[FrozenTrial]) -> Density:
        """Return the density of the trials' parameters."""
        return self._build_parzen_estimator(study, search_space, trials, handle_below=False).log_pdf

    def _sample(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        self.prepare(study, search_space)
        return super()._sample(study, trial, search_space)

    def _compute_acquisition_func(self, samples: Samples, mpe_below: Any, mpe_above: Any) -> Any:
        return self.weigh(super()._compute_acquisition_func(samples, mpe_below, mpe_above), samples)


class TextCmaEs(CmaEsSampler):
    """CMA-ES whose optimizer a subclass stores as text; Optuna itself unpickles it from attributes of trials.

    With a pickle, anyone who can write to the study's storage could run code in all workers.
    """

    _optimizer: Any = None
    """Optimizer of the current proposal."""

    @abstractmethod
    def to_text(self, optimizer: Any) -> str: ...

    @abstractmethod
    def from_text(self, text: str) -> Any:
        """Return the optimizer; None if the text is not that of an optimizer."""

    def _restore_optimizer(self, completed_trials: list[FrozenTrial]) -> Any:
        self._optimizer = next(filter(None, map(self._kept, reversed(completed_trials))), None)
        return self._optimizer

    def _kept(self, trial: FrozenTrial) -> Any:
        key = self._attr_key_optimizer
        parts = {name: part for name, part in trial.system_attrs.items() if name.startswith(key)}
        text = "".join(str(parts.get(f"{key}:{place}", "")) for place in range(len(parts)))
        return self.from_text(text) if parts else None

    def _init_optimizer(self, *given: Any) -> Any:
        self._optimizer = super()._init_optimizer(*given)
        return self._optimizer

    def _split_optimizer_str(self, optimizer_str: str) -> dict[str, str]:
        # the argument is a pickle of that optimizer
        return super()._split_optimizer_str(self.to_text(self._optimizer))
