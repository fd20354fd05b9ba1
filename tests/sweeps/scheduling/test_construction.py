"""Samplers and pruners as a sweep file names them."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.sweeps.scheduling import construction
from mgpu_slurm.sweeps.scheduling.halving import Promotion, StopOnly
from mgpu_slurm.sweeps.scheduling.scheduler import Decision, OptunaPruner, Scheduler, Unlimited
from mgpu_slurm.sweeps.search.sweep_options import Pruner, Sampler
from mgpu_slurm.sweeps.study.snapshots import Snapshots


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
        assert made._observations.enough == 3  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        ("asked", "said"),
        [
            (Sampler("no.such.Class"), "sampler no.such.Class: No module named 'no'"),
            (Sampler("optuna.samplers.Nothing"), "has no attribute 'Nothing': check the import path"),
            (Sampler("collections.OrderedDict"), "it is not an optuna.samplers.BaseSampler"),
            (
                Sampler("tpe", options={"sed": 1}),
                r"unexpected keyword argument 'sed'(\. Did you mean 'seed'\?)?: fix its options",
            ),
        ],
    )
    def test_invalid_sampler_or_option_is_rejected(self, asked: Sampler, said: str) -> None:
        with pytest.raises(UserError, match=said):
            construction.sampler_of(asked, 0)


def test_pruner_name_selects_the_scheduler() -> None:
    def made(*given: Any, **options: Any) -> Scheduler:
        return construction.scheduler_of(Pruner(*given, **options), "minimize")

    rungs: dict[str, Any] = {"rungs": (1, 3, 9, 27), "factor": 3, "is_maximized": False}
    assert made("hyperband", 1, 27, 3) == StopOnly(**rungs, sizes=(27, 12, 6, 4))
    assert made("asha", 1, 27, 3) == Promotion(**rungs, hedge=True)
    assert made("asha", 1, 27, 3, hedge=False) == Promotion(**rungs, hedge=False)
    assert made("asha", 1, 27, 3, pause=False) == StopOnly(**rungs)
    assert isinstance(made("median"), OptunaPruner)
    assert isinstance(made(), Unlimited)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Pruner("no.such.Class"), "pruner no.such.Class: No module named 'no': check the import path"),
        (Pruner("collections.OrderedDict"), "it is not an optuna.pruners.BasePruner"),
        (
            Pruner("optuna.pruners.ThresholdPruner", options={"lowr": 1}),
            r"'lowr'(\. Did you mean 'lower'\?)?: fix its options",
        ),
    ],
)
def test_invalid_pruner_or_option_is_rejected(asked: Pruner, said: str) -> None:
    with pytest.raises(UserError, match=said):
        construction.scheduler_of(asked, "minimize")


def test_median_pruner_does_not_prune_before_min_resource() -> None:
    scheduler = construction.scheduler_of(Pruner("median", min_resource=3, startup_trials=2), "minimize")
    study = optuna.create_study()
    snapshots = Snapshots(study, scheduler)
    for _ in range(2):
        trial = study.ask()
        for progress in range(1, 5):
            trial.report(0.0, progress)
        study.tell(trial, 0.0)
    bad, pruned = study.ask(), []
    for progress in range(1, 5):
        bad.report(1.0, progress)
        pruned.append(scheduler.decide(snapshots.take(None), 2) is Decision.PRUNE)
    assert pruned == [False, False, True, True]
