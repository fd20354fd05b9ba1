"""The search space of a sweep: its parameters and their dependencies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.config import Config
from mgpu_slurm.sweeps.search.parameters import Parameter, Values

if TYPE_CHECKING:
    from optuna.trial import BaseTrial


LARGEST_GRID = 100_000
"""Largest number of points of a grid. A larger one is a mistake in the file, and too large for a study."""


@dataclass(frozen=True)
class Space:
    """All parameters, each after those that it depends on."""

    parameters: tuple[Parameter, ...]

    def suggest(self, trial: BaseTrial) -> Values:
        """Return values for a trial, chosen by the study's sampler."""
        values: Values = {}
        for parameter in self.parameters:
            if parameter.is_active(values):
                values[parameter.name] = parameter.suggest(trial)
        return values

    def part(self, values: Values) -> Values | None:
        """Return those of another space's values that belong to parameters of this one; None if any is out of range."""
        found: Values = {}
        for parameter in self.parameters:
            if parameter.is_active(found) and parameter.name in values:
                if not parameter.takes(values[parameter.name]):
                    return None
                found[parameter.name] = values[parameter.name]
        return found or None

    def restored(self, params: Values) -> Values:
        """Return a trial's parameters as passed to the job, from their form in the study."""
        return {parameter.name: parameter.restored(params[parameter.name]) for parameter in self.parameters
                if parameter.name in params}  # fmt: skip

    def grid(self) -> list[Values]:
        """Return every combination once; the last parameter changes fastest.

        Raises:
            UserError: a range has infinitely many values, or there are more combinations than a study can hold.
        """
        return self._combinations

    @cached_property
    def _combinations(self) -> list[Values]:
        found: list[Values] = [{}]
        for parameter in self.parameters:
            chosen: list[Values] = [{parameter.name: point} for point in parameter.points()]
            grown: list[Values] = []
            for each in found:
                grown += [each | one for one in chosen] if parameter.is_active(each) else [each]
                if len(grown) > LARGEST_GRID:
                    raise UserError(f"space: a grid of more than {LARGEST_GRID:,} points: take larger steps")
            found = grown
        return found

    @cached_property
    def size(self) -> int | None:
        """Number of points of the grid; None if there are too many, or infinitely many."""
        try:
            return len(self.grid())
        except UserError:
            return None

    def probes(self) -> list[Values]:
        """Return values of trials that cover the ends of every parameter, to check them against the job's config."""
        found = []
        for parameter in self.parameters:
            found += [self._with(parameter, value) for value in parameter.probes()]
        return found

    def _with(self, wanted: Parameter, value: object) -> Values:
        """Return the values of a trial in which the parameter is active and has this value."""
        named = {parameter.name: parameter for parameter in self.parameters}
        forced: Values = {wanted.name: value}
        waiting = [wanted]
        while waiting:
            for name, allowed in waiting.pop().when.items():
                if name not in forced:
                    forced[name] = allowed[0]
                    waiting.append(named[name])
        values: Values = {}
        for parameter in self.parameters:
            if parameter.is_active(values):
                values[parameter.name] = forced.get(parameter.name, parameter.ends()[0])
        return values

    def lines(self) -> list[str]:
        """Return a description of the parameters for people."""
        width = max((len(parameter.name) for parameter in self.parameters), default=0)
        return [f"{parameter.name:<{width}}  {parameter.words}{_condition(parameter)}" for parameter in self.parameters]


def _condition(parameter: Parameter) -> str:
    if not parameter.when:
        return ""
    told = [f"{name} is {' or '.join(map(json.dumps, allowed))}" for name, allowed in parameter.when.items()]
    return f", when {' and '.join(told)}"


def nested(values: Values) -> Config:
    """Return `{"model.width": 32}` as `{"model": {"width": 32}}`, the form of a config."""
    found: Config = {}
    for name, value in values.items():
        configs.put(found, name, value, name)
    return found


def differences(old: Space, new: Space) -> list[str]:
    """Return in words how two spaces differ; empty if trials of one fit the other too."""
    before = {parameter.name: parameter for parameter in old.parameters}
    after = {parameter.name: parameter for parameter in new.parameters}
    told = [f"{name} is gone" for name in before if name not in after]
    told += [f"{name} is new" for name in after if name not in before]
    changed = [name for name in before if name in after and before[name] != after[name]]
    told += [f"{name} was {_whole(before[name])} and is {_whole(after[name])}" for name in changed]
    return told


def _whole(parameter: Parameter) -> str:
    return f"{parameter.words}{_condition(parameter)}"
