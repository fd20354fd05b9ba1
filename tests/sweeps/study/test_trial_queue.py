"""The study: who chooses and who gives up. What it promises of its trials is held in test_storage.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.sweeps.search import sweep_file
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep_file import Sweep
from mgpu_slurm.sweeps.search.sweep_options import Pruner, Sampler
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.trial_queue import Worker

SPACE = {"lr": {"float": [1e-4, 1.0], "log": True}, "layers": {"choice": [[8], [8, 8]]}}


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "study.journal"


def sweep(**changes: Any) -> Sweep:
    values = {"study": "s", "job": "train.py", "metric": "loss", "direction": "minimize", "trials": 3, "space": SPACE}
    return sweep_file.parse(values | changes, "sweep.yaml")


def take_all(made: Sweep, journal: Path, worker: int) -> list[int]:
    """One worker's trials, each of them ended at once."""
    study = studies.load(made, journal, Worker(worker, 1))
    numbers = []
    while (trial := studies.take(study, made, Worker(worker, 1), journal.with_name("trials.lock"))) is not None:
        assert isinstance(made.space, Space)
        study.tell(trial, made.space.suggest(trial)["lr"])
        numbers.append(trial.number)
    return numbers


class TestSamplers:
    @pytest.mark.parametrize("name", ["tpe", "random", "gp", "cmaes", "optuna.samplers.QMCSampler"])
    def test_each_chooses_in_the_space(self, name: str, journal: Path) -> None:
        made = sweep(sampler={"name": name, "seed": 1}, trials=14)
        studies.create(made, journal)
        assert take_all(made, journal, worker=0) == list(range(14))

    def test_each_worker_draws_numbers_of_its_own_and_the_same_again(self) -> None:
        def first(worker: int, attempt: int = 1, **options: Any) -> float:
            study = optuna.create_study(sampler=studies.sampler_of(Sampler("random", **options), worker, attempt))
            return study.ask().suggest_float("x", 0, 1)

        assert first(0, seed=7) == first(0, seed=7)
        # also where it comes back
        assert len({first(worker, attempt, seed=7) for worker in range(8) for attempt in (1, 2)}) == 16
        assert first(0) != first(0)

    def test_options_reach_the_class(self) -> None:
        made = studies.sampler_of(Sampler("tpe", options={"n_startup_trials": 3}), 0)
        assert made._n_startup_trials == 3  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        ("asked", "said"),
        [
            (Sampler("no.such.Class"), "sampler no.such.Class: No module named 'no'"),
            (Sampler("optuna.samplers.Nothing"), "has no attribute 'Nothing': check the import path"),
            (Sampler("collections.OrderedDict"), "it is no optuna.samplers.BaseSampler"),
            (Sampler("tpe", options={"sed": 1}), "unexpected keyword argument 'sed': fix its options"),
        ],
    )
    def test_what_is_no_sampler_is_refused(self, asked: Sampler, said: str) -> None:
        with pytest.raises(UserError, match=said):
            studies.sampler_of(asked, 0)


def test_a_sweep_without_a_number_of_trials_never_runs_dry(journal: Path) -> None:
    made = sweep(trials=None, budget={"hours": 1}, sampler="random", enqueue=[{"lr": 0.5}])
    studies.create(made, journal)
    one, other = (studies.load(made, journal, Worker(worker, 1)) for worker in (0, 1))
    for number in range(0, 60, 2):
        for worker, study in ((0, one), (1, other)):
            trial = studies.take(study, made, Worker(worker, 1), journal.with_name("trials.lock"))
            assert trial is not None
            assert trial.number == number + worker
            study.tell(trial, 0.0)


def test_no_trial_is_there_before_somebody_takes_it(journal: Path) -> None:
    studies.create(sweep(), journal)
    assert studies.load(sweep(), journal, Worker(0, 1)).trials == []


def test_points_that_come_later_are_queued_and_none_is_tried_twice(journal: Path) -> None:
    made = sweep(trials=10, sampler="random", enqueue=[{"lr": 0.5}])
    studies.create(made, journal)
    study = studies.load(made, journal, Worker(0, 1))
    more = sweep(trials=10, sampler="random", enqueue=[{"lr": 0.5}, {"lr": 0.25}, {"lr": 0.125}])
    studies.queue(study, list(more.enqueue[1:]))
    rates = []
    while (trial := studies.take(study, more, Worker(0, 1), journal.with_name("trials.lock"))) is not None:
        assert isinstance(more.space, Space)
        rates.append(more.space.suggest(trial)["lr"])
        study.tell(trial, 0.0)
    assert len(rates) == 10
    assert [rates.count(lr) for lr in (0.5, 0.25, 0.125)] == [1, 1, 1]
    assert rates[:3] == [0.5, 0.25, 0.125]


def test_brackets_compare_their_own_trials_and_the_sampler_learns_from_all() -> None:
    study = optuna.create_study(pruner=HyperbandPruner(1, 27, 3), study_name="s")
    for number in range(20):
        trial = study.ask()
        trial.report(float(number), 1)
        trial.should_prune()
        study.tell(trial, float(number))
    bracket = optuna.pruners._filter_study(study, study.trials[0])
    # what a pruner asks for, and what a sampler does
    assert (len(bracket.get_trials()) < 20, len(bracket._get_trials())) == (True, 20)


def test_pruners_have_their_ends_said() -> None:
    hyperband = studies.pruner_of(Pruner("hyperband", 1, 27, 3))
    assert isinstance(hyperband, HyperbandPruner)
    assert (hyperband._min_resource, hyperband._max_resource, hyperband._reduction_factor) == (1, 27, 3)
    assert isinstance(studies.pruner_of(Pruner("median")), MedianPruner)
    assert isinstance(studies.pruner_of(Pruner()), NopPruner)


def test_a_pruner_by_its_import_path_takes_its_options_and_decides(journal: Path) -> None:
    asked = {"name": "optuna.pruners.ThresholdPruner", "options": {"lower": 0.5}}
    made = sweep(pruner=asked)
    assert made.pruner.words == "optuna.pruners.ThresholdPruner (lower 0.5)"
    studies.create(made, journal)
    study = studies.load(made, journal, Worker(0, 1))
    trial = studies.take(study, made, Worker(0, 1), journal.with_name("trials.lock"))
    assert trial is not None
    trial.report(0.6, 1)
    assert not trial.should_prune()
    trial.report(0.4, 2)
    assert trial.should_prune()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Pruner("no.such.Class"), "pruner no.such.Class: No module named 'no': check the import path"),
        (Pruner("collections.OrderedDict"), "it is no optuna.pruners.BasePruner"),
        (Pruner("optuna.pruners.ThresholdPruner", options={"lowr": 1}), "'lowr': fix its options"),
    ],
)
def test_what_is_no_pruner_is_refused(asked: Pruner, said: str) -> None:
    with pytest.raises(UserError, match=said):
        studies.pruner_of(asked)


def test_a_median_is_not_asked_before_the_least_resource() -> None:
    study = optuna.create_study(pruner=studies.pruner_of(Pruner("median", min_resource=3, startup_trials=2)))
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
