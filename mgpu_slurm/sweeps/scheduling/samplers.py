"""Samplers that learn from failures too: a trial that failed in its own code counts as worse than all with a value.

Optuna's samplers ignore failed trials, so they propose the same parameters again. The study keeps these trials as they
are; only the sampler sees a study in which they have bad values.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, TPESampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from mgpu_slurm.run_folder.record_types import from_known
from mgpu_slurm.sweeps import optuna_adapter
from mgpu_slurm.sweeps.optuna_adapter import CONSTRAINT, Density, Samples, StudyView, TextCmaEs, WeightedTpe
from mgpu_slurm.sweeps.scheduling import optimizers
from mgpu_slurm.sweeps.scheduling.judged_values import is_feasible

OWN_FAULT = "mgpu:own_fault"
"""Attribute of a trial that failed or was pruned: its own code raised the error, or its value was NaN or infinite."""

INNOCENT = "mgpu:innocent:"
"""Attribute of a study, followed by a worker's number: trials that failed because its node is broken."""

DOUBT = "mgpu:doubt"
"""Attribute of a trial that failed on a worker whose node may be broken: a `Doubt`."""

SAFETY = 0.3
"""Power of the probability that a trial does not fail, by which TPE's gain is weighted.

If half of a space fails and the best values lie at its edge, 41 of 100 trials fail without it, 34 with it, and 22
with a power of 1, which finds worse values.
"""


@dataclass(frozen=True)
class Doubt:
    """A failure of a trial that may be due to the worker's node."""

    worker: int
    time: str
    """Time in ISO 8601 with the zone."""
    reason: str
    reports: int
    """Number of the trial's reports until then."""


def doubt_of(trial: FrozenTrial) -> Doubt | None:
    """Return the doubt about a failure of the trial; None if there is none."""
    found = trial.system_attrs.get(DOUBT)
    return None if found is None else from_known(Doubt, found)


def learning_from_failures(cls: Callable[..., Any]) -> Callable[..., Any]:
    """Return a subclass that learns from failures too, if the class is one of those known to learn."""
    for known, learning in _LEARNING.items():
        if isinstance(cls, type) and issubclass(cls, known):
            return learning if cls is known else type(cls.__name__, (learning, cls), {})
    return cls


class _LearnsFromFailures(BaseSampler):
    """A mixin to put before the class of a sampler."""

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
        return study if isinstance(study, StudyView) else StudyView(study, lambda trials: self.with_bad(study, trials))

    def with_bad(self, study: Study, trials: list[FrozenTrial]) -> list[FrozenTrial]:
        bad = self.own_failures(study, trials)
        return self._as_worst(trials, bad, study.directions) if bad else trials

    @staticmethod
    def own_failures(study: Study, trials: Sequence[FrozenTrial]) -> set[int]:
        """Return the numbers of the trials that failed by their own code or value, not because of a broken node."""
        bad = {trial.number for trial in trials if OWN_FAULT in trial.system_attrs and trial.state.is_finished()}
        return bad - _innocent(trials, optuna_adapter.study_attributes(study)) if bad else bad

    def _as_worst(
        self, trials: Sequence[FrozenTrial], bad: set[int], directions: Sequence[StudyDirection]
    ) -> list[FrozenTrial]:
        """Return the trials, with those in `bad` made worse than all others."""
        raise NotImplementedError


class LearningTpe(_LearnsFromFailures, WeightedTpe):
    """TPE that learns from failures too."""

    _odds: tuple[Density, Density] | None = None
    """Densities of the trials with a value and of the bad trials, weighted by their counts."""

    def _as_worst(
        self, trials: Sequence[FrozenTrial], bad: set[int], directions: Sequence[StudyDirection]
    ) -> list[FrozenTrial]:
        # copies are kept: the sampler reads them four times per new trial, and ended trials do not change
        copies: dict[int, FrozenTrial] = vars(self).setdefault("_copies", {})
        for trial in trials:
            if trial.number in bad and trial.number not in copies:
                copies[trial.number] = as_failed(trial)
        return [copies[trial.number] if trial.number in bad else trial for trial in trials]

    def prepare(self, study: Study, search_space: dict[str, BaseDistribution]) -> None:
        ended = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        ended = [each for each in ended if search_space.keys() <= each.params.keys()]
        good = list(filter(_is_good, ended))
        bad = [each for each in ended if not _is_good(each)]
        self.learn_from(study, sum(map(_has_value, ended)))
        if bad:
            self._odds = self._odds_of(study, search_space, good), self._odds_of(study, search_space, bad)

    def learn_from(self, study: Study, count: int) -> None:
        """Prepare for a proposal without regard to failures.

        Args:
            count: the number of trials with a value.
        """
        # keep failures out of the best share even while fewer trials than its size have a value
        self.limit_best_share(study, count)
        self._odds = None

    def _odds_of(self, study: Study, search_space: dict[str, BaseDistribution], trials: list[FrozenTrial]) -> Density:
        density = self.density(study, search_space, trials)
        # the estimator's prior counts as one
        return lambda samples: density(samples) + math.log(len(trials) + 1)

    def weigh(self, gain: Any, samples: Samples) -> Any:
        if self._odds is None:
            return gain
        good, bad = (odds(samples) for odds in self._odds)
        return gain + SAFETY * (good - np.logaddexp(good, bad))


class _ByValue(_LearnsFromFailures):
    def _as_worst(
        self, trials: Sequence[FrozenTrial], bad: set[int], directions: Sequence[StudyDirection]
    ) -> list[FrozenTrial]:
        values = [trial.values for trial in trials if trial.state == TrialState.COMPLETE]
        if not values:
            # a model of equal values would propose one corner of the space again and again
            return list(trials)
        worse = [_worse(column, each) for column, each in zip(zip(*values, strict=True), directions, strict=True)]
        violations = _most_violated(trials)
        copies = {trial.number: _copied(trial, TrialState.COMPLETE, worse) for trial in trials if trial.number in bad}
        for each in copies.values():
            # GP needs all constraints of each trial
            each.system_attrs = {**each.system_attrs, **violations}
        return [copies.get(trial.number, trial) for trial in trials]


def _most_violated(trials: Sequence[FrozenTrial]) -> dict[str, float]:
    """Return the largest violation of each constraint, by its attribute."""
    found: dict[str, float] = {}
    for trial in trials:
        for name, violation in trial.constraints.items():
            found[f"{CONSTRAINT}{name}"] = max(violation, found.get(f"{CONSTRAINT}{name}", violation))
    return found


def _worse(values: Sequence[float], direction: StudyDirection) -> float:
    """Return a value that is worse than all of these."""
    low, high = min(values), max(values)
    # no larger than the range of values: a model would otherwise see only the step between good and bad
    margin = (high - low) or max(abs(high), 1.0)
    return low - margin if direction == StudyDirection.MAXIMIZE else high + margin


class _Gp(_ByValue, GPSampler):
    def with_bad(self, study: Study, trials: list[FrozenTrial]) -> list[FrozenTrial]:
        return list(map(_with_sorted_constraints, super().with_bad(study, trials)))


def _with_sorted_constraints(trial: FrozenTrial) -> FrozenTrial:
    """Return the trial with its constraints in the same order as those of others, which is that of GP's columns."""
    if len(trial.constraints) < 2:
        return trial
    shown = copy.copy(trial)
    shown.system_attrs = dict(sorted(trial.system_attrs.items()))
    return shown


class _Cmaes(_ByValue, TextCmaEs):
    """CMA-ES that stores its optimizer as JSON."""

    def to_text(self, optimizer: Any) -> str:
        return optimizers.to_text(optimizer)

    def from_text(self, text: str) -> Any:
        return optimizers.from_text(text)


_LEARNING: dict[type, type] = {TPESampler: LearningTpe, GPSampler: _Gp, CmaEsSampler: _Cmaes}


def has_failed(trial: FrozenTrial) -> bool:
    """Return whether a trial failed, or was pruned because its value is NaN or infinite."""
    return trial.state == TrialState.FAIL or (trial.state == TrialState.PRUNED and OWN_FAULT in trial.system_attrs)


def _innocent(trials: Sequence[FrozenTrial], notes: dict[str, Any]) -> set[int]:
    """Return the numbers of the trials that failed because a worker's node is broken.

    A worker leaves as soon as its failed trial gets further on another worker. If that trial fails there after all, it
    proves nothing, and the worker's failures count as the trials' own again.
    """
    tried_elsewhere: dict[str, list[FrozenTrial]] = {}
    for trial in trials:
        if doubt := doubt_of(trial):
            tried_elsewhere.setdefault(f"{INNOCENT}{doubt.worker}", []).append(trial)
    refuted = {key for key, tried in tried_elsewhere.items() if all(map(has_failed, tried))}
    kept = [numbers for key, numbers in notes.items() if key.startswith(INNOCENT) and key not in refuted]
    return set().union(*kept)


def as_failed(trial: FrozenTrial) -> FrozenTrial:
    """Return a copy of a trial that TPE ranks after all others, also after those that violate a constraint."""
    shown = _copied(trial, TrialState.PRUNED, None)
    shown.system_attrs = {**trial.system_attrs, f"{CONSTRAINT}failed": math.inf}
    return shown


def _copied(trial: FrozenTrial, state: TrialState, values: list[float] | None) -> FrozenTrial:
    shown = copy.copy(trial)
    shown.state, shown.values, shown.intermediate_values = state, values, {}
    return shown


def _is_good(trial: FrozenTrial) -> bool:
    return _has_value(trial) and is_feasible(trial)


def _has_value(trial: FrozenTrial) -> bool:
    return trial.state == TrialState.COMPLETE or (trial.state == TrialState.PRUNED and bool(trial.intermediate_values))
