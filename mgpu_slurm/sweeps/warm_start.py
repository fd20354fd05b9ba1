"""Use of an earlier study: its trials as a start, or a grid around its best ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.registry import lookup, sweep_state
from mgpu_slurm.request.config import Config
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.optuna_adapter import CONSTRAINT
from mgpu_slurm.sweeps.scheduling.observations import COPY_OF
from mgpu_slurm.sweeps.search import sweep_file
from mgpu_slurm.sweeps.search.parameters import Choice, Float, Int, Parameter, Values, kept
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import summary
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.snapshots import ORIGIN

BEST_SHARE = 0.1
"""Share of the complete trials whose region is searched again."""

LEAST_BEST = 3
POINTS = 3
"""Number of points per range in a grid around the best trials."""


def find(name: str) -> tuple[RunFolder, Sweep, Study]:
    """Return a study by the name of its sweep, with its folder and sweep file.

    Raises:
        UserError: there is no such sweep.
    """
    folder = lookup.find(name)
    if not sweep_state.is_sweep(folder):
        raise sweep_state.not_a_sweep(repr(name))
    sweep = sweep_file.load(folder.sweep)
    return folder, sweep, studies.load(sweep, folder.journal)


# -- warm start


def known_trials(sweep: Sweep, name: str) -> list[FrozenTrial]:
    """Return copies of an earlier study's trials that are in the space of this one.

    Parameters that this space lacks are dropped. A trial may lack parameters of this space: it informs the draws of the
    others.

    Raises:
        UserError: the earlier study has another metric or direction, or none of its trials is in this space.
    """
    _, other, known = find(name)
    if other.objectives != sweep.objectives:
        raise UserError(
            f"warm_start {name}: it is to {_aims(other)}, and this study to {_aims(sweep)}: their trials cannot be"
            " compared"
        )
    found = list(filter(_is_observed, known.get_trials(deepcopy=False)))
    copies = [copy for copy in (_copied(trial, other, sweep) for trial in found) if copy is not None]
    if not copies:
        raise UserError(f"warm_start {name}: none of its {len(found)} trials is in this space: remove it")
    return copies


def _is_observed(trial: FrozenTrial) -> bool:
    """Return whether a trial shows what its parameters are good for: it is complete, pruned, or paused."""
    if COPY_OF in trial.system_attrs:
        return False
    has_stopped = trial.state in (TrialState.PRUNED, TrialState.WAITING) and bool(trial.intermediate_values)
    return trial.state == TrialState.COMPLETE or has_stopped


def _aims(sweep: Sweep) -> str:
    return " and ".join(f"{each.direction} {each.metric}" for each in sweep.objectives)


def _copied(trial: FrozenTrial, other: Sweep, sweep: Sweep) -> FrozenTrial | None:
    params, distributions = trial.params, trial.distributions
    if isinstance(sweep.space, Space):
        values = sweep.space.part(summary.parameters(trial, other))
        if values is None:
            return None
        params = kept(values)
        distributions = {each.name: each.distribution for each in sweep.space.parameters if each.name in params}
    return create_trial(
        state=TrialState.COMPLETE if trial.state == TrialState.COMPLETE else TrialState.PRUNED,
        values=trial.values,
        params=params,
        distributions=distributions,
        intermediate_values=trial.intermediate_values,
        system_attrs={ORIGIN: other.study} | _violations(trial, other, sweep),
    )


def _violations(trial: FrozenTrial, other: Sweep, sweep: Sweep) -> dict[str, Any]:
    """Return the attributes for the constraints that a trial has violated; those of another study are unknown."""
    if other.constraints != sweep.constraints:
        return {f"{CONSTRAINT}{each.metric}": 0.0 for each in sweep.constraints}
    return {key: value for key, value in trial.system_attrs.items() if key.startswith(CONSTRAINT)}


# -- grid around the best trials


def around(values: Config, name: str) -> Config:
    """Return the values of a sweep file, with the space replaced by a grid around an earlier study's best trials.

    Each range becomes some points between the extremes of the best tenth of its trials, each choice those that occur
    there.

    Raises:
        UserError: there is no such sweep, or too few of its trials are complete.
    """
    folder, sweep, study = find(name)
    if not isinstance(sweep.space, Space):
        raise UserError(f"--around {name}: its space is a function, whose ranges are unknown")
    complete = summary.ranked(summary.own_trials(study), sweep)
    feasible = " and violate no constraint" if sweep.constraints else ""
    if len(complete) < LEAST_BEST:
        raise UserError(f"--around {name}: {len(complete)} of its trials are complete{feasible}: it needs {LEAST_BEST}")
    best = [summary.parameters(trial, sweep) for trial in complete[: max(LEAST_BEST, _share(len(complete)))]]
    # the file's number of trials would search a part of the grid
    changed = {key: value for key, value in values.items() if key not in ("enqueue", "warm_start", "trials")}
    if changed.get("study") == folder.run:
        changed["study"] = f"{folder.run}-around"
    return changed | {"sampler": "grid", "space": _grid(sweep.space, best)}


def _share(trials: int) -> int:
    return math.ceil(trials * BEST_SHARE)


def _grid(space: Space, best: Sequence[Values]) -> Config:
    """Return the `space:` of a sweep file."""
    grid: Config = {}
    choices: dict[str, list[Any]] = {}
    for parameter in space.parameters:
        # a parameter that is active in none of the best trials is left out
        there = [values[parameter.name] for values in best if parameter.name in values]
        if not there:
            continue
        choices[parameter.name] = _points(parameter, there)
        when = {
            name: [value for value in allowed if value in choices[name]] for name, allowed in parameter.when.items()
        }
        grid[parameter.name] = {"choice": choices[parameter.name]} | ({"when": when} if when else {})
    return grid


def _points(parameter: Parameter, there: list[Any]) -> list[Any]:
    if isinstance(parameter, Choice):
        return [value for value in parameter.values if value in there]
    assert isinstance(parameter, (Float, Int))
    low, high = min(there), max(there)
    between = [_between(low, high, place / (POINTS - 1), parameter.log) for place in range(POINTS)]
    if isinstance(parameter, Int):
        steps = [round((value - parameter.low) / parameter.step) for value in between]
        return list(dict.fromkeys(parameter.low + step * parameter.step for step in steps))
    # four digits are as precise as a tenth of a few trials can be
    return list(dict.fromkeys(float(f"{value:.4g}") for value in between))


def _between(low: float, high: float, share: float, log: bool) -> float:
    return low * (high / low) ** share if log else low + (high - low) * share
