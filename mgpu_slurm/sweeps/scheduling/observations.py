"""What trials of different lengths show: their values at the highest of several levels that enough have reached."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from optuna.trial import FrozenTrial, TrialState

from mgpu_slurm.sweeps.scheduling.judged_values import is_feasible, value_of
from mgpu_slurm.sweeps.scheduling.rungs import values_at
from mgpu_slurm.sweeps.scheduling.samplers import as_failed

COPY_OF = "mgpu:copy_of"
"""Attribute of a trial that is a copy of another one: its values are not those of its parameters alone."""


@dataclass(frozen=True, slots=True)
class _Facts:
    trial: FrozenTrial
    values: tuple[float, ...]
    """Its value at each level that it has reached, which is the first one that it reported there or later."""
    final: float | None
    """The value of a complete trial; it counts at the last level, and without levels."""
    is_feasible: bool


class Observations:
    """The trials of a study as observations; each is looked at again only if it has changed."""

    def __init__(self, levels: Sequence[int], enough: int) -> None:
        """
        Args:
            levels: progress values, ascending.
            enough: number of trials with a value at a level, or failed, for which it is used.
        """
        self._levels = levels
        self.enough = enough
        self._facts: dict[int, _Facts] = {}
        self._shown: dict[tuple[int, int], tuple[FrozenTrial, FrozenTrial]] = {}
        """Trials, and how they are shown, by number and level."""
        self.count = 0
        """Number of values at the level that was used last."""
        self.level: int | None = None
        """That level; None for final values."""
        self.has_infeasible = False
        """Whether any trial violated a constraint then."""

    def of(self, trials: Sequence[FrozenTrial], worst: Collection[int]) -> list[FrozenTrial] | None:
        """Return the trials with a value at the highest level that enough of them have, as complete; None if there is
        no such level.

        Running trials without a value there are returned as they are: TPE avoids their neighbourhood. Those that
        violate a constraint keep the attributes by which Optuna ranks them after the others. Copies of other trials
        are left out.

        Args:
            worst: numbers of the trials that are worse than all others at each level.
        """
        facts = [self._facts_of(trial) for trial in trials if COPY_OF not in trial.system_attrs]
        self.has_infeasible = not all(each.is_feasible for each in facts)
        level = self._highest_level(facts, worst)
        if level is None:
            return None
        self.level = self._levels[level] if level < len(self._levels) else None
        found, self.count = [], 0
        for each in facts:
            trial = each.trial
            value = None if trial.number in worst or trial.state == TrialState.FAIL else self._value(each, level)
            self.count += value is not None
            if value is not None or trial.number in worst:
                found.append(self._as_observed(trial, level, value))
            elif trial.state == TrialState.RUNNING:
                found.append(trial)
        return found

    def _facts_of(self, trial: FrozenTrial) -> _Facts:
        known = self._facts.get(trial.number)
        # storages replace a trial that changes
        if known is None or known.trial is not trial:
            final = value_of(trial) if trial.state == TrialState.COMPLETE else None
            # a trial has come to all levels below the highest one
            values = tuple(values_at(self._levels, trial.intermediate_values).values())
            known = self._facts[trial.number] = _Facts(trial, values, final, is_feasible(trial))
        return known

    def _highest_level(self, facts: Sequence[_Facts], worst: Collection[int]) -> int | None:
        """Return the index of the level; one more than the last for final values alone, if no level has enough."""
        levels = len(self._levels)
        # trials by the number of levels that they have reached
        reached = [0] * (levels + 1)
        finals = 0
        for each in facts:
            if each.trial.number in worst or each.trial.state == TrialState.FAIL:
                continue
            finals += each.final is not None
            reached[levels if each.final is not None else len(each.values)] += 1
        count = 0
        for level in reversed(range(levels)):
            count += reached[level + 1]
            if count and count + len(worst) >= self.enough:
                return level
        return levels if finals and finals + len(worst) >= self.enough else None

    def _value(self, facts: _Facts, level: int) -> float | None:
        if facts.final is not None and level >= len(self._levels) - 1:
            return facts.final
        if level < len(facts.values):
            return facts.values[level]
        # a complete trial that was shorter than the level
        return facts.final

    def _as_observed(self, trial: FrozenTrial, level: int, value: float | None) -> FrozenTrial:
        """Return a trial as complete with this value, or, without one, as worse than all others."""
        if trial.state == TrialState.COMPLETE and trial.values == [value]:
            return trial
        known = self._shown.get((trial.number, level))
        if known is None or known[0] is not trial:
            known = self._shown[trial.number, level] = trial, _shown(trial, value)
        return known[1]


def _shown(trial: FrozenTrial, value: float | None) -> FrozenTrial:
    if value is None:
        return as_failed(trial)
    shown = copy.copy(trial)
    shown.state, shown.values, shown.intermediate_values = TrialState.COMPLETE, [value], {}
    return shown
