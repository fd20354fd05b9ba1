"""How the values of a trial count: by its first objective, and as worst while it violates a constraint."""

from __future__ import annotations

import bisect
import copy
import math
from collections.abc import Mapping, Sequence

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from mgpu_slurm.sweeps.optuna_adapter import CONSTRAINT
from mgpu_slurm.sweeps.search.goals import Constraint

CHANGES = "mgpu:infeasible"
"""Attribute of a trial that has violated a constraint: the progress values at which this began, ended, began again and
so on."""


def value_of(trial: FrozenTrial) -> float | None:
    """Return the value of the first objective of an ended trial; None if it has none."""
    return trial.values[0] if trial.values else None


def is_feasible(trial: FrozenTrial) -> bool:
    """Return whether the trial violates no constraint, as far as it has reported."""
    return all(violation <= 0 for violation in trial.constraints.values())


def violations_of(constraints: Sequence[Constraint], metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the violations that metrics show, by the attribute for each constraint."""
    return {
        f"{CONSTRAINT}{each.metric}": each.violation(metrics[each.metric])
        for each in constraints
        if each.metric in metrics
    }


def is_feasible_at(trial: FrozenTrial, progress: int) -> bool:
    changes: list[int] = trial.system_attrs.get(CHANGES, [])
    return bisect.bisect_right(changes, progress) % 2 == 0


def judged(trial: FrozenTrial, direction: StudyDirection) -> FrozenTrial:
    """Return the trial with its reports as they count: the worst value where it violated a constraint."""
    if CHANGES not in trial.system_attrs:
        return trial
    worst = -math.inf if direction == StudyDirection.MAXIMIZE else math.inf
    shown = copy.copy(trial)
    shown.intermediate_values = {
        progress: value if is_feasible_at(trial, progress) else worst
        for progress, value in trial.intermediate_values.items()
    }
    return shown
