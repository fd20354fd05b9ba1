"""Samplers and pruners as a sweep file names them."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.sweeps.scheduling import construction
from mgpu_slurm.sweeps.search.sweep_options import Pruner, Sampler


class TestSamplers:
    def test_seed_is_reproducible_and_differs_per_worker_and_attempt(self) -> None:
        def first(worker: int, attempt: int = 1, **options: Any) -> float:
            study = optuna.create_study(sampler=construction.sampler_of(Sampler("random", **options), worker, attempt))
            return study.ask().suggest_float("x", 0, 1)

        assert first(0, seed=7) == first(0, seed=7)
        # also where it comes back
        assert len({first(worker, attempt, seed=7) for worker in range(8) for attempt in (1, 2)}) == 16
        assert first(0) != first(0)

    def test_options_are_passed_to_the_sampler(self) -> None:
        made = construction.sampler_of(Sampler("tpe", options={"n_startup_trials": 3}), 0)
        assert made._n_startup_trials == 3  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        ("asked", "said"),
        [
            (Sampler("no.such.Class"), "sampler no.such.Class: No module named 'no'"),
            (Sampler("optuna.samplers.Nothing"), "has no attribute 'Nothing': check the import path"),
            (Sampler("collections.OrderedDict"), "it is not an optuna.samplers.BaseSampler"),
            (Sampler("tpe", options={"sed": 1}), "unexpected keyword argument 'sed': fix its options"),
        ],
    )
    def test_invalid_sampler_or_option_is_rejected(self, asked: Sampler, said: str) -> None:
        with pytest.raises(UserError, match=said):
            construction.sampler_of(asked, 0)


def test_hyperband_bracket_hides_other_trials_from_pruner_but_not_sampler() -> None:
    study = optuna.create_study(pruner=HyperbandPruner(1, 27, 3), study_name="s")
    for number in range(20):
        trial = study.ask()
        trial.report(float(number), 1)
        trial.should_prune()
        study.tell(trial, float(number))
    bracket = optuna.pruners._filter_study(study, study.trials[0])
    # what a pruner asks for, and what a sampler does
    assert (len(bracket.get_trials()) < 20, len(bracket._get_trials())) == (True, 20)


def test_pruner_name_selects_the_optuna_pruner() -> None:
    hyperband = construction.pruner_of(Pruner("hyperband", 1, 27, 3))
    assert isinstance(hyperband, HyperbandPruner)
    assert (hyperband._min_resource, hyperband._max_resource, hyperband._reduction_factor) == (1, 27, 3)
    assert isinstance(construction.pruner_of(Pruner("median")), MedianPruner)
    assert isinstance(construction.pruner_of(Pruner()), NopPruner)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Pruner("no.such.Class"), "pruner no.such.Class: No module named 'no': check the import path"),
        (Pruner("collections.OrderedDict"), "it is not an optuna.pruners.BasePruner"),
        (Pruner("optuna.pruners.ThresholdPruner", options={"lowr": 1}), "'lowr': fix its options"),
    ],
)
def test_invalid_pruner_or_option_is_rejected(asked: Pruner, said: str) -> None:
    with pytest.raises(UserError, match=said):
        construction.pruner_of(asked)


def test_median_pruner_does_not_prune_before_min_resource() -> None:
    study = optuna.create_study(pruner=construction.pruner_of(Pruner("median", min_resource=3, startup_trials=2)))
    for _ in range(2):
        trial = study.ask()
        for progress in range(1, 5):
            trial.report(0.0, progress)
        study.tell(trial, 0.0)
    bad, pruned = study.ask(), []
    for progress in range(1, 5):
        bad.report(1.0, progress)
        pruned.append(bad.should_prune())
    assert pruned == [False, False, True, True]
