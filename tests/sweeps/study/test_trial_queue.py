"""The study and its trials. What it promises of them in each storage is held in test_storage.py."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core.files import hold_if_free
from mgpu_slurm.sweeps import optuna_adapter
from mgpu_slurm.sweeps.scheduling import construction
from mgpu_slurm.sweeps.scheduling.scheduler import Decision
from mgpu_slurm.sweeps.search import sweep_file
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import claims
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.claims import Worker
from mgpu_slurm.sweeps.study.snapshots import Snapshots

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


@pytest.mark.parametrize("name", ["tpe", "random", "gp", "cmaes", "optuna.samplers.QMCSampler"])
def test_each_sampler_completes_all_trials(name: str, journal: Path) -> None:
    made = sweep(sampler={"name": name, "seed": 1}, trials=14)
    studies.create(made, journal)
    assert take_all(made, journal, worker=0) == list(range(14))


def test_sweep_without_a_trial_limit_never_runs_out_of_trials(journal: Path) -> None:
    made = sweep(trials=None, budget={"hours": 1}, sampler="random", enqueue=[{"lr": 0.5}])
    studies.create(made, journal)
    one, other = (studies.load(made, journal, Worker(worker, 1)) for worker in (0, 1))
    for number in range(0, 60, 2):
        for worker, study in ((0, one), (1, other)):
            trial = studies.take(study, made, Worker(worker, 1), journal.with_name("trials.lock"))
            assert trial is not None
            assert trial.number == number + worker
            study.tell(trial, 0.0)


def test_trial_that_another_worker_gives_back_meanwhile_still_names_who_has_it(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, lock, write = sweep(), journal.with_name("trials.lock"), optuna_adapter.set_trial_attribute
    studies.create(made, journal)
    first = studies.load(made, journal, Worker(0, 1))
    begun = studies.take(first, made, Worker(0, 1), lock)
    assert begun is not None
    claims.give_back(first, first.trials[0])

    def other() -> None:
        held = hold_if_free(lock)
        if held is not None:
            study = studies.load(made, journal, Worker(2, 1))
            assert claims.claim(study, Worker(2, 1), study.trials[0])
            claims.give_back(study, study.trials[0])
            os.close(held)

    def disturbed(*given: Any) -> None:
        write(*given)
        monkeypatch.setattr(optuna_adapter, "set_trial_attribute", write)
        process = multiprocessing.get_context("fork").Process(target=other)
        process.start()
        process.join()
        assert process.exitcode == 0

    study = studies.load(made, journal, Worker(1, 1))
    monkeypatch.setattr(optuna_adapter, "set_trial_attribute", disturbed)
    trial = studies.take(study, made, Worker(1, 1), lock)
    assert trial is not None
    assert trial.number == begun.number
    assert Worker(1, 1).has(study.trials[trial.number])


def test_new_study_has_no_trials(journal: Path) -> None:
    studies.create(sweep(), journal)
    assert studies.load(sweep(), journal, Worker(0, 1)).trials == []


def test_points_added_later_are_queued_and_tried_once(journal: Path) -> None:
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


def test_pruner_given_by_import_path_uses_its_options(journal: Path) -> None:
    asked = {"name": "optuna.pruners.ThresholdPruner", "options": {"lower": 0.5}}
    made = sweep(pruner=asked)
    assert made.pruner.words == "optuna.pruners.ThresholdPruner (lower 0.5)"
    studies.create(made, journal)
    study = studies.load(made, journal, Worker(0, 1))
    trial = studies.take(study, made, Worker(0, 1), journal.with_name("trials.lock"))
    assert trial is not None
    scheduler = construction.scheduler_of(made.pruner, made.direction)
    snapshots = Snapshots(study, scheduler)
    trial.report(0.6, 1)
    assert scheduler.decide(snapshots.take(None), 0) is Decision.CONTINUE
    trial.report(0.4, 2)
    assert scheduler.decide(snapshots.take(None), 0) is Decision.PRUNE
