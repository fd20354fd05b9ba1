"""Samplers that learn from failures too: a trial that its own code ended counts as worse than all that have a value.

Optuna's samplers do not see failed trials, so they propose the same parameters again. In the study these trials stay
what they are; only the sampler is shown a study in which they have ended badly.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, TPESampler
from optuna.samplers._tpe.sampler import default_gamma
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from mgpu_slurm.sweeps.scheduling import optimizers

OWN_FAULT = "mgpu:own_fault"
"""Of a trial that failed, or was pruned: its own code raised the error, or its value was no number."""

INNOCENT = "mgpu:innocent:"
"""Of a study, followed by the number of a worker: trials that failed because its node is broken."""

DOUBT = "mgpu:doubt"
"""Of a trial that failed on a worker whose node may be broken: which worker, when, why and after how many reports."""

SAFETY = 0.3
"""Power of the probability that a trial does not fail, by which TPE's gain is weighed.

When half of a space fails and the best values lie at its edge, 41 of 100 trials fail without it, 34 with it, and 22
with a power of 1, which finds worse values.
"""

_Density = Callable[[dict[str, Any]], Any]


def learning_from_failures(cls: Callable[..., Any]) -> Callable[..., Any]:
    """Return a subclass that learns from failures too, if the class is one of those known to learn."""
    for known, learning in _LEARNING.items():
        if isinstance(cls, type) and issubclass(cls, known):
            return learning if cls is known else type(cls.__name__, (learning, cls), {})
    return cls


class _LearnsFromFailures(BaseSampler):
    """A base to put before the class of a sampler."""

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return super().infer_relative_search_space(self._shown(study), trial)  # type: ignore[safe-super]

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return super().sample_relative(self._shown(study), trial, search_space)  # type: ignore[safe-super]

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return super().sample_independent(self._shown(study), trial, param_name, param_distribution)  # type: ignore[safe-super]

    def _shown(self, study: Study) -> Any:
        return study if isinstance(study, _View) else _View(study, self._as_worst)

    def _as_worst(self, trials: Sequence[FrozenTrial], bad: set[int], direction: StudyDirection) -> list[FrozenTrial]:
        """Return the trials with those of these numbers as worse than all others."""
        raise NotImplementedError


class _Tpe(_LearnsFromFailures, TPESampler):
    _odds: tuple[_Density, _Density] | None = None
    """Of the trials that have a value, and of the bad ones."""

    def _as_worst(self, trials: Sequence[FrozenTrial], bad: set[int], direction: StudyDirection) -> list[FrozenTrial]:
        # it is asked for them four times for each new trial, and they have ended
        copies: dict[int, FrozenTrial] = vars(self).setdefault("_copies", {})
        for trial in trials:
            if trial.number in bad and trial.number not in copies:
                # TPE ranks pruned trials after complete ones, and those without a report last
                copies[trial.number] = _copied(trial, TrialState.PRUNED)
        return [copies[trial.number] if trial.number in bad else trial for trial in trials]

    def _sample(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        ended = study._get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        ended = [each for each in ended if search_space.keys() <= each.params.keys()]
        good = list(filter(_has_value, ended))
        bad = [each for each in ended if not _has_value(each)]
        # bad trials stay out of the best share, also while fewer trials than its size have a value
        asked = vars(self).setdefault("_asked_gamma", self._gamma or default_gamma)
        self._gamma = lambda count: min(asked(count), len(good))
        self._odds = None
        if bad:
            self._odds = self._density(study, search_space, good), self._density(study, search_space, bad)
        return super()._sample(study, trial, search_space)

    def _density(self, study: Study, search_space: dict[str, BaseDistribution], trials: list[FrozenTrial]) -> _Density:
        estimator = self._build_parzen_estimator(study, search_space, trials, handle_below=False)
        # the estimator's prior counts as one
        return lambda samples: estimator.log_pdf(samples) + math.log(len(trials) + 1)

    def _compute_acquisition_func(self, samples: dict[str, Any], mpe_below: Any, mpe_above: Any) -> Any:
        gain = super()._compute_acquisition_func(samples, mpe_below, mpe_above)
        if self._odds is None:
            return gain
        good, bad = (density(samples) for density in self._odds)
        return gain + SAFETY * (good - np.logaddexp(good, bad))


class _ByValue(_LearnsFromFailures):
    def _as_worst(self, trials: Sequence[FrozenTrial], bad: set[int], direction: StudyDirection) -> list[FrozenTrial]:
        complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
        values = [trial.value for trial in complete if trial.value is not None]
        if not values:
            # a model of equal values would propose one corner of the space again and again
            return list(trials)
        low, high = min(values), max(values)
        # not by much more than values differ: a model would see nothing but the step between good and bad
        margin = (high - low) or max(abs(high), 1.0)
        worse = low - margin if direction == StudyDirection.MAXIMIZE else high + margin
        return [_copied(trial, TrialState.COMPLETE, worse) if trial.number in bad else trial for trial in trials]


class _Gp(_ByValue, GPSampler):
    pass


class _Cmaes(_ByValue, CmaEsSampler):
    """It keeps its optimizer as JSON, where Optuna's own unpickles what a trial's attributes have.

    Whoever can write to the study's storage would run code in all workers. The methods are private ones of Optuna 5.0.
    """

    _optimizer: Any = None
    """Of the proposal that is being made."""

    def _restore_optimizer(self, completed_trials: list[FrozenTrial]) -> Any:
        self._optimizer = next(filter(None, map(self._kept, reversed(completed_trials))), None)
        return self._optimizer

    def _kept(self, trial: FrozenTrial) -> Any:
        key = self._attr_key_optimizer
        parts = {name: part for name, part in trial.system_attrs.items() if name.startswith(key)}
        text = "".join(str(parts.get(f"{key}:{place}", "")) for place in range(len(parts)))
        return optimizers.from_text(text) if parts else None

    def _init_optimizer(self, *given: Any) -> Any:
        self._optimizer = super()._init_optimizer(*given)
        return self._optimizer

    def _split_optimizer_str(self, optimizer_str: str) -> dict[str, str]:
        # it is given the pickle of that optimizer
        return super()._split_optimizer_str(optimizers.to_text(self._optimizer))


_LEARNING: dict[type, type] = {TPESampler: _Tpe, GPSampler: _Gp, CmaEsSampler: _Cmaes}


class _View:
    """A study with other trials; everything else is the study's."""

    def __init__(
        self, study: Study, as_worst: Callable[[Sequence[FrozenTrial], set[int], StudyDirection], list[FrozenTrial]]
    ) -> None:
        self._study = study
        self._as_worst = as_worst

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)

    def get_trials(self, deepcopy: bool = True, states: Container[TrialState] | None = None) -> list[FrozenTrial]:
        return self._get_trials(deepcopy, states)

    def _get_trials(
        self, deepcopy: bool = True, states: Container[TrialState] | None = None, use_cache: bool = False
    ) -> list[FrozenTrial]:
        trials = self._study._get_trials(deepcopy=False, use_cache=use_cache)
        bad = {trial.number for trial in trials if OWN_FAULT in trial.system_attrs and trial.state.is_finished()}
        if bad:
            notes = self._study._storage.get_study_system_attrs(self._study._study_id)
            bad -= _innocent(trials, notes)
            trials = self._as_worst(trials, bad, self._study.direction)
        found = [trial for trial in trials if states is None or trial.state in states]
        return copy.deepcopy(found) if deepcopy else found


def has_failed(trial: FrozenTrial) -> bool:
    """Return whether a trial failed, or was pruned because its value is no number."""
    return trial.state == TrialState.FAIL or (trial.state == TrialState.PRUNED and OWN_FAULT in trial.system_attrs)


def _innocent(trials: Sequence[FrozenTrial], notes: dict[str, Any]) -> set[int]:
    """Return the numbers of the trials that failed because a worker's node is broken.

    A worker leaves as soon as another one brings a trial further. If that trial fails there after all, it has shown
    nothing, and the worker's failures are the trials' own again.
    """
    tried_elsewhere: dict[str, list[FrozenTrial]] = {}
    for trial in trials:
        if DOUBT in trial.system_attrs:
            tried_elsewhere.setdefault(f"{INNOCENT}{trial.system_attrs[DOUBT]['worker']}", []).append(trial)
    refuted = {key for key, tried in tried_elsewhere.items() if all(map(has_failed, tried))}
    kept = [numbers for key, numbers in notes.items() if key.startswith(INNOCENT) and key not in refuted]
    return set().union(*kept)


def _copied(trial: FrozenTrial, state: TrialState, value: float | None = None) -> FrozenTrial:
    shown = copy.copy(trial)
    shown.state, shown.intermediate_values = state, {}
    shown.values = None if value is None else [value]
    return shown


def _has_value(trial: FrozenTrial) -> bool:
    return trial.state == TrialState.COMPLETE or (trial.state == TrialState.PRUNED and bool(trial.intermediate_values))
