"""The scheduler prunes what the pruner prunes, and lets a trial that is at its end complete."""

from __future__ import annotations

import optuna
import pytest
from optuna.pruners import ThresholdPruner
from optuna.trial import Trial

from mgpu_slurm.sweeps.scheduling.scheduler import Decision, PrunerScheduler


@pytest.fixture
def trial() -> Trial:
    return optuna.create_study(pruner=ThresholdPruner(lower=0.5)).ask()


def test_a_trial_continues_until_the_pruner_prunes_it(trial: Trial) -> None:
    scheduler = PrunerScheduler(max_resource=None)
    trial.report(0.6, 1)
    assert scheduler.decide(trial, 1) is Decision.CONTINUE
    trial.report(0.4, 2)
    assert scheduler.decide(trial, 2) is Decision.PRUNE


@pytest.mark.parametrize(
    ("progress", "decision"), [(2, Decision.PRUNE), (3, Decision.CONTINUE), (4, Decision.CONTINUE)]
)
def test_trial_at_max_resource_is_not_pruned(trial: Trial, progress: int, decision: Decision) -> None:
    trial.report(0.4, progress)
    assert PrunerScheduler(max_resource=3).decide(trial, progress) is decision
