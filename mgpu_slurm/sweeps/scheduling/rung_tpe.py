"""TPE by rung: it learns from what all trials had reached at the highest rung at which enough of them have a value.

Optuna's TPE learns from ended trials only, at different lengths. Here a trial counts with its value at one rung,
whatever it does now: it may be paused, pruned later, or still run. Points of a finite space are not repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from mgpu_slurm.sweeps.optuna_adapter import FIXED_PARAMS, TrialsView, trial_count
from mgpu_slurm.sweeps.scheduling.observations import Observations
from mgpu_slurm.sweeps.scheduling.samplers import LearningTpe
from mgpu_slurm.sweeps.search.parameters import Choice, Float, Int, Parameter, Values, kept
from mgpu_slurm.sweeps.search.space import Space

ENOUGH = 10
"""Number of trials, with a value at a rung or failed, from which the sampler learns at this rung."""

REDRAWS = 10
"""Number of draws that may repeat a point, before an untried one is drawn at random."""

RANDOM_DRAWS = 200
"""Number of random points to try before all points of the space are listed."""


@dataclass
class _Known:
    """What a draw for one trial is based on."""

    number: int
    """The number of that trial."""
    shown: TrialsView | None
    """The study as TPE sees it; None while too few trials have a value."""
    space: Space
    is_whole: bool
    """Whether the trials so far have no parameters outside of the space."""


class RungTpe(LearningTpe):
    """TPE by rung, for one objective."""

    def __init__(
        self,
        levels: Sequence[int] = (),
        space: Space | None = None,
        *,
        seed: int | None = None,
        n_startup_trials: int = ENOUGH,
        multivariate: bool = True,
        group: bool = False,
        **options: Any,
    ) -> None:
        """
        Args:
            levels: progress values at which trials are compared, ascending. If too few trials have a value at each of
                them, or if there are none, the final values count.
            space: the parameters; None if a function chooses them, so that only trials show which there are.
            n_startup_trials: the number of trials from which the sampler learns at a level; see `ENOUGH`.
            multivariate: draw all parameters together, instead of one by one.
            options: further arguments of Optuna's `TPESampler`.

        Raises:
            ValueError: `group` is set; parameters that depend on others need no groups here.
        """
        if group:
            raise ValueError("group is an option of optuna.samplers.TPESampler")
        super().__init__(seed=seed, n_startup_trials=0, **options)
        self._space = space
        self._observations = Observations(levels, max(1, n_startup_trials))
        self._draws_together = multivariate
        self._random = RandomSampler(seed=seed)
        self._known: _Known | None = None
        self._has_bad = False
        """Whether there were trials, at the last look, that had failed by themselves or violated a constraint."""

    # -- Optuna's interface

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        known = self._known = self._look(study, trial)
        return {each.name: each.distribution for each in known.space.parameters if not each.distribution.single()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        known = self._known_for(study, trial)
        point = self._new_point(study, trial, known)
        drawn = {name: value for name, value in point.items() if name in search_space}
        if drawn:
            self.share(study, trial, drawn)
        return drawn

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        known = self._known_for(study, trial)
        return self._drawn(study, known, trial, {param_name: param_distribution})[param_name]

    # -- what is known

    def _known_for(self, study: Study, trial: FrozenTrial) -> _Known:
        if self._known is None or self._known.number != trial.number:
            self._known = self._look(study, trial)
        return self._known

    def _look(self, study: Study, trial: FrozenTrial) -> _Known:
        others = [each for each in study.get_trials(deepcopy=False) if each.number != trial.number]
        worst = self.own_failures(study, others)
        observations = self._observations.of(others, worst)
        self._has_bad = bool(worst) or self._observations.has_infeasible
        shown = None if observations is None else TrialsView(study, observations)
        if self._space is not None:
            return _Known(trial.number, shown, self._space, is_whole=True)
        seen = [each for each in others if each.distributions]
        learnt = seen if observations is None else [each for each in observations if each.state.is_finished()]
        space = _space_of(learnt)
        names = {each.name for each in space.parameters}
        return _Known(trial.number, shown, space, all(names == each.distributions.keys() for each in seen))

    def prepare(self, study: Study, search_space: dict[str, BaseDistribution]) -> None:
        if self._has_bad:
            super().prepare(study, search_space)
        else:
            # the same, without looking at all trials again
            self.learn_from(study, self._observations.count)

    # -- drawing

    def _drawn(
        self, study: Study, known: _Known, trial: FrozenTrial, space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return values for these parameters; at random while too little is known."""
        if known.shown is None:
            return self._at_random(study, trial, space)
        shown = known.shown
        if len(space) <= 1 or not self._draws_together:
            return {name: self.draw(shown, trial, {name: each})[name] for name, each in space.items()}
        drawn: dict[str, Any] = {}
        for names, view in _groups(study, shown, space, self._observations.enough):
            part = {name: space[name] for name in names}
            drawn |= self._at_random(study, trial, part) if view is None else self.draw(view, trial, part)
        return drawn

    def _at_random(self, study: Study, trial: FrozenTrial, space: dict[str, BaseDistribution]) -> dict[str, Any]:
        return {name: self._random.sample_independent(study, trial, name, each) for name, each in space.items()}

    def _new_point(self, study: Study, trial: FrozenTrial, known: _Known) -> Values:
        """Return a point, in the study's form, that no other trial has while there is one."""
        space = known.space
        taken: set[Point] = set()
        if known.is_whole and is_finite(space) and not trial.system_attrs.get(FIXED_PARAMS):
            taken = self.taken(study, space, besides=trial.number)
        for _ in range(REDRAWS):
            point = self._point(study, known, trial)
            if not taken or key_of(space, point) not in taken:
                return point
        return self._untried(study, known, trial, taken) or point

    def _point(self, study: Study, known: _Known, trial: FrozenTrial) -> Values:
        """Return a point: first the parameters that do not depend on others, drawn together."""
        point: Values = dict(trial.system_attrs.get(FIXED_PARAMS, {}))
        free = {
            each.name: each.distribution
            for each in known.space.parameters
            if not each.when and each.name not in point and not each.distribution.single()
        }
        point |= self._drawn(study, known, trial, free)
        active: Values = {}
        for parameter in known.space.parameters:
            if not parameter.is_active(active):
                continue
            name, distribution = parameter.name, parameter.distribution
            if name not in point:
                point[name] = (
                    parameter.only_value if distribution.single()
                    else self._drawn(study, known, trial, {name: distribution})[name]
                )  # fmt: skip
            active[name] = parameter.restored(point[name])
        return {name: value for name, value in point.items() if name in active}

    def _untried(self, study: Study, known: _Known, trial: FrozenTrial, taken: set[Point]) -> Values | None:
        """Return a random point that no trial has; None if there is none, or the space is too large to list."""
        at_random = _Known(known.number, None, known.space, known.is_whole)
        for _ in range(RANDOM_DRAWS):
            point = self._point(study, at_random, trial)
            if key_of(known.space, point) not in taken:
                return point
        left = [point for point in points_of(known.space) if key_of(known.space, point) not in taken]
        return left[int(self.random_numbers().randint(len(left)))] if left else None

    @property
    def repeats_no_point(self) -> bool:
        """Whether the space is finite, and known."""
        return self._space is not None and is_finite(self._space)

    def has_tried_all(self, study: Study) -> bool:
        """Return whether trials have all points of a finite space; False if these are unknown or too many to list."""
        space, trials = self._space, trial_count(study)
        if space is None or not is_finite(space):
            return False
        # a large space takes long to list
        if trials < math.prod(len(each.points()) for each in space.parameters if not each.when):
            return False
        if space.size is None or trials < space.size:
            return False
        return {key_of(space, point) for point in points_of(space)} <= self.taken(study, space)

    def taken(self, study: Study, space: Space, besides: int | None = None) -> set[Point]:
        """Return the points of all trials, whatever they do, also of queued ones.

        Args:
            besides: the number of a trial to leave out.
        """
        found = set()
        for each in study.get_trials(deepcopy=False):
            if each.number != besides:
                params = self.parameters_of(study, each) or each.system_attrs.get(FIXED_PARAMS, {})
                found.add(key_of(space, params))
        return found


def _groups(
    study: Study, shown: TrialsView, space: Mapping[str, BaseDistribution], enough: int
) -> Iterator[tuple[Sequence[str], TrialsView | None]]:
    """Yield the parameters that are drawn together, with the study that shows what is good for them; None if too few
    trials have them.

    That is one group, unless most trials are from an earlier study that lacked some of the parameters.

    Args:
        space: parameters that do not depend on others.
        enough: fewest trials from which to learn.
    """
    ended = [each for each in shown.trials_shown if each.state.is_finished()]
    whole = sum(space.keys() <= each.params.keys() for each in ended)
    if 2 * whole >= len(ended):
        yield list(space), shown
        return
    groups: dict[tuple[bool, ...], list[str]] = {}
    for name in space:
        groups.setdefault(tuple(name in each.params for each in ended), []).append(name)
    for has, names in groups.items():
        with_them = {each.number for each, is_there in zip(ended, has, strict=True) if is_there}
        observed = [each for each in shown.trials_shown if not each.state.is_finished() or each.number in with_them]
        yield names, TrialsView(study, observed) if len(with_them) >= enough else None


# -- the points of a finite space

Point = tuple[tuple[str, Any], ...]
"""Identifies a point: names of parameters and the places of their values."""


def key_of(space: Space, point: Mapping[str, Any]) -> Point:
    """Return what identifies a point, given in the study's form; without parameters that have one value only."""
    present = [each for each in space.parameters if each.name in point and not each.distribution.single()]
    return tuple((each.name, each.place(point[each.name])) for each in present)


def is_finite(space: Space) -> bool:
    return all(isinstance(each, (Choice, Int)) or _has_steps(each) for each in space.parameters)


def _has_steps(parameter: Parameter) -> bool:
    return isinstance(parameter, Float) and parameter.step is not None


def points_of(space: Space) -> Iterable[Values]:
    """Return all points in the study's form; none if they are too many to list."""
    return () if space.size is None else map(kept, space.grid())


def _space_of(trials: Sequence[FrozenTrial]) -> Space:
    """Return the parameters that all of these trials have, with the same ranges."""
    common: dict[str, BaseDistribution] | None = None
    for trial in trials:
        own = trial.distributions
        common = own if common is None else {name: each for name, each in common.items() if own.get(name) == each}
    return Space(tuple(_parameter(name, each) for name, each in sorted((common or {}).items())))


def _parameter(name: str, distribution: BaseDistribution) -> Parameter:
    if isinstance(distribution, CategoricalDistribution):
        return Choice(name, {}, tuple(distribution.choices))
    if isinstance(distribution, IntDistribution):
        return Int(name, {}, distribution.low, distribution.high, distribution.log, distribution.step)
    assert isinstance(distribution, FloatDistribution)
    return Float(name, {}, distribution.low, distribution.high, distribution.log, distribution.step)
