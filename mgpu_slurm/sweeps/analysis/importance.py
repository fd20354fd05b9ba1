"""Which parameters matter: PED-ANOVA of Optuna (Watanabe et al., IJCAI 2023), with its uncertainty."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import optuna
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.sweeps.scheduling.judged_values import is_feasible, value_of
from mgpu_slurm.sweeps.scheduling.observations import Observations
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import summary

ENOUGH = 30
"""Number of values that an estimate needs."""

RESAMPLES = 100
"""Number of studies drawn from the trials, with repetition, to find how much the estimate varies."""

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Importance:
    """The share of a parameter in how good the best tenth of the trials is."""

    name: str
    share: float
    """From 0 to 1; those of all parameters sum to 1."""
    low: float
    high: float
    """The ends of the 95% interval, by bootstrap over trials."""


@dataclass(frozen=True)
class Importances:
    """What the trials of a study show of its parameters."""

    study: str
    metric: str
    """The metric by which they are compared: the first one."""
    at: str
    """Where the trials are compared: `progress 9`, or `the end`."""
    trials: int
    """Number of values there."""
    parameters: tuple[Importance, ...]
    """The most important first."""

    def lines(self) -> list[str]:
        """Return a description for people."""
        width = max((len(each.name) for each in self.parameters), default=0)
        return [
            f"importance of the parameters of study {self.study} for {self.metric}, by {self.trials} values at"
            f" {self.at}",
            *(
                f"{each.name:<{width}}  {each.share:4.0%}  ({each.low:.0%} to {each.high:.0%})"
                for each in self.parameters
            ),
        ]


def importance(study: Study, sweep: Sweep, seed: int = 0) -> Importances:
    """Return the importance of each parameter, from the values at the highest rung at which enough trials have one.

    Raises:
        UserError: too few trials have a value.
    """
    levels = sweep.pruner.levels
    observations = Observations(levels, ENOUGH)
    own = [trial for trial in summary.own_trials(study) if trial.params]
    found = observations.of(own, worst=())
    if found is None:
        raise UserError(f"study {sweep.study}: {_missing(own, levels)}")
    observed = [trial for trial in found if trial.state.is_finished()]
    names = [
        *dict.fromkeys(name for trial in observed for name, each in trial.distributions.items() if not each.single())
    ]
    whole = _shares(observed, names, sweep)
    draw = random.Random(seed)
    drawn = [_shares(draw.choices(observed, k=len(observed)), names, sweep) for _ in range(RESAMPLES)]
    tail = round(RESAMPLES * (1 - CONFIDENCE) / 2)
    parameters = []
    for name in sorted(names, key=lambda name: -whole[name]):
        shares = sorted(each[name] for each in drawn)
        parameters.append(Importance(name, whole[name], shares[tail], shares[-1 - tail]))
    level = observations.level
    at = "the end" if level is None else f"progress {level}"
    return Importances(sweep.study, sweep.metric, at, len(observed), tuple(parameters))


def _shares(trials: Sequence[FrozenTrial], names: Sequence[str], sweep: Sweep) -> dict[str, float]:
    study = optuna.create_study(direction=sweep.direction)
    values = [value for trial in trials if (value := value_of(trial)) is not None]
    worst = min(values) if sweep.direction == "maximize" else max(values)
    study.add_trials(
        create_trial(
            value=value_of(trial) if is_feasible(trial) else worst,
            params=trial.params,
            distributions=trial.distributions,
        )
        for trial in trials
    )
    # a parameter that depends on others may be in none of the trials that were drawn
    present = [name for name in names if any(name in trial.params for trial in trials)]
    found = PedAnovaImportanceEvaluator().evaluate(study, params=present)
    total = sum(found.values())
    return {name: found.get(name, 0.0) / total if total else 0.0 for name in names}


def _missing(trials: Sequence[FrozenTrial], levels: Sequence[int]) -> str:
    first = f"at progress {levels[0]} or later" if levels else "at their end"
    complete = TrialState.COMPLETE
    count = sum(bool(trial.intermediate_values) if levels else trial.state == complete for trial in trials)
    return f"{count} trials have a value {first}: {ENOUGH - count} more are needed for the importance of parameters"
