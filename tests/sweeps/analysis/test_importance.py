"""Which parameters matter, and where the estimate comes from."""

from __future__ import annotations

import optuna
import pytest
from optuna.study import Study
from optuna.trial import TrialState

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.sweeps.analysis.importance import importance
from mgpu_slurm.sweeps.search import sweep_file
from mgpu_slurm.sweeps.search.sweep import Sweep
from tests.sweeps.sweeps import VALUES

SPACE = {name: {"float": [0.0, 1.0]} for name in ("much", "little", "none")}


def sweep_of(**values: object) -> Sweep:
    return sweep_file.parse(VALUES | {"space": SPACE, "direction": "minimize"} | values, "test")


def study_of(trials: int, long: int = 0, direction: str = "minimize") -> Study:
    """Return a study of trials that were pruned after one epoch, but for the first ones, which had nine."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction=direction, sampler=optuna.samplers.RandomSampler(seed=1))
    sign = -1 if direction == "maximize" else 1
    for number in range(trials):
        trial = study.ask()
        much, little, _ = (trial.suggest_float(name, 0, 1) for name in SPACE)
        value = sign * ((much - 0.3) ** 2 + 0.02 * (little - 0.5) ** 2)
        trial.report(value, 1)
        if number < long:
            trial.report(value, 9)
            study.tell(trial, value)
        else:
            study.tell(trial, state=TrialState.PRUNED)
    return study


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_parameter_that_decides_is_first_and_intervals_hold_the_estimate(direction: str) -> None:
    pruner = {"name": "hyperband", "max_resource": 9}
    found = importance(study_of(60, direction=direction), sweep_of(direction=direction, pruner=pruner))
    assert (found.parameters[0].name, found.at, found.trials) == ("much", "progress 1", 60)
    assert sum(each.share for each in found.parameters) == pytest.approx(1)
    assert found.parameters[0].share > 0.5
    for each in found.parameters:
        assert 0 <= each.low <= each.high <= 1
    assert found.lines()[0] == "importance of the parameters of study s for score, by 60 values at progress 1"


@pytest.mark.parametrize(("long", "at"), [(29, "progress 1"), (30, "progress 9")])
def test_highest_rung_with_enough_values_is_used(long: int, at: str) -> None:
    assert importance(study_of(60, long), sweep_of(pruner={"name": "asha", "max_resource": 9})).at == at


def test_without_rungs_final_values_count() -> None:
    assert importance(study_of(40, 40), sweep_of()).at == "the end"


@pytest.mark.parametrize(
    ("pruner", "said"),
    [
        ({"name": "asha", "max_resource": 9}, "study s: 20 trials have a value at progress 1 or later: 10 more are"),
        ("none", "study s: 5 trials have a value at their end: 25 more are needed"),
    ],
)
def test_too_few_values_are_an_error_that_says_how_many_are_missing(pruner: object, said: str) -> None:
    with pytest.raises(UserError, match=said):
        importance(study_of(20, 5), sweep_of(pruner=pruner))
