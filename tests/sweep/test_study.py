"""The study: each trial is one worker's, there are never more than asked for, and none loses what it has reported."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner
from optuna.trial import TrialState

from mgpu_slurm.errors import UserError
from mgpu_slurm.sweep import file as files
from mgpu_slurm.sweep import study as studies
from mgpu_slurm.sweep.file import Pruner, Sampler, Sweep
from mgpu_slurm.sweep.space import Space

SPAWN = multiprocessing.get_context("spawn")
SPACE = {"lr": {"float": [1e-4, 1.0], "log": True}, "layers": {"choice": [[8], [8, 8]]}}


@pytest.fixture(params=["journal", "database"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """SQLite stands for a database where one worker acts at a time; it would give two of them the same trial."""
    return None if request.param == "journal" else f"sqlite:///{tmp_path}/study.db"


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "study.journal"


def sweep(storage: str | None = None, **changes: Any) -> Sweep:
    values = {"study": "s", "job": "train.py", "metric": "loss", "direction": "minimize", "trials": 3, "space": SPACE}
    return replace(files.parse(values | changes, "sweep.yaml"), storage=storage)


def take_all(made: Sweep, journal: Path, worker: int) -> list[int]:
    """One worker's trials, each of them ended at once."""
    study = studies.load(made, journal, worker)
    numbers = []
    while (trial := studies.take(study)) is not None:
        assert isinstance(made.space, Space)
        study.tell(trial, made.space.suggest(trial)["lr"])
        numbers.append(trial.number)
    return numbers


def test_workers_that_start_together_share_out_every_trial(journal: Path) -> None:
    made = sweep(trials=24, sampler="random")
    studies.create(made, journal)
    with SPAWN.Pool(4) as pool:
        found = pool.starmap(take_all, [(made, journal, worker) for worker in range(4)], chunksize=1)
    assert sorted(number for numbers in found for number in numbers) == list(range(24))
    study = studies.load(made, journal, worker=0)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 24
    assert len({trial.params["lr"] for trial in study.trials}) == 24
    # more of them, later
    studies.queue(study, [{"lr": 0.5}, {}])
    assert take_all(made, journal, worker=1) == [24, 25]
    assert studies.load(made, journal, worker=0).trials[24].params["lr"] == 0.5


def test_a_trial_that_is_given_back_goes_on_as_the_same_with_what_it_has_reported(
    storage: str | None, journal: Path
) -> None:
    made = sweep(storage=storage)
    assert isinstance(made.space, Space)
    studies.create(made, journal)
    first, second = (studies.load(made, journal, worker) for worker in (0, 1))
    untouched, begun = studies.take(first), studies.take(first)
    assert untouched is not None
    assert begun is not None
    values = made.space.suggest(begun)
    begun.report(0.7, 1)
    studies.give_back(first, untouched.number)
    studies.give_back(first, begun.number)
    # what has begun comes first
    again = studies.take(second)
    assert again is not None
    assert again.number == begun.number == 1
    assert made.space.suggest(again) == values
    again.report(0.6, 2)
    second.tell(again, 0.6)
    (ended,) = second.get_trials(states=(TrialState.COMPLETE,))
    assert ended.intermediate_values == {1: 0.7, 2: 0.6}
    following = [studies.take(second), studies.take(first)]
    assert [trial.number for trial in following if trial is not None] == [0, 2]
    assert studies.take(first) is None


def test_a_grid_is_its_points_whoever_takes_them(storage: str | None, journal: Path) -> None:
    space = {"lr": {"float": [0.1, 0.3], "step": 0.1}, "layers": {"choice": [[8], [8, 8]]}}
    made = sweep(storage=storage, sampler="grid", space=space, trials=5)
    assert isinstance(made.space, Space)
    studies.create(made, journal)
    study = studies.load(made, journal, worker=3)
    found = []
    while (trial := studies.take(study)) is not None:
        found.append(made.space.suggest(trial))
    assert found == made.space.grid()[:5]


def test_a_study_of_that_name_is_not_taken_over(tmp_path: Path) -> None:
    made = sweep(storage=f"sqlite:///{tmp_path}/all.db")
    studies.create(made, tmp_path / "unused")
    with pytest.raises(UserError, match="study 's': the database has one of that name"):
        studies.create(made, tmp_path / "unused")


class TestSamplers:
    @pytest.mark.parametrize("name", ["tpe", "random", "gp", "cmaes", "optuna.samplers.QMCSampler"])
    def test_each_chooses_in_the_space(self, name: str, journal: Path) -> None:
        made = sweep(sampler={"name": name, "seed": 1}, trials=14)
        studies.create(made, journal)
        assert take_all(made, journal, worker=0) == list(range(14))

    def test_each_worker_draws_numbers_of_its_own_and_the_same_again(self) -> None:
        def first(worker: int, **options: Any) -> float:
            study = optuna.create_study(sampler=studies.sampler_of(Sampler("random", **options), worker))
            return study.ask().suggest_float("x", 0, 1)

        assert first(0, seed=7) == first(0, seed=7)
        assert len({first(worker, seed=7) for worker in range(8)}) == 8
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
            (Sampler("tpe", options={"sed": 1}), "unexpected keyword argument 'sed': mend its options"),
        ],
    )
    def test_what_is_no_sampler_is_refused(self, asked: Sampler, said: str) -> None:
        with pytest.raises(UserError, match=said):
            studies.sampler_of(asked, 0)


def test_pruners_have_their_ends_said() -> None:
    hyperband = studies.pruner_of(Pruner("hyperband", 1, 27, 3))
    assert isinstance(hyperband, HyperbandPruner)
    assert (hyperband._min_resource, hyperband._max_resource, hyperband._reduction_factor) == (1, 27, 3)
    assert isinstance(studies.pruner_of(Pruner("median")), MedianPruner)
    assert isinstance(studies.pruner_of(Pruner()), NopPruner)


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


class TestDatabases:
    def test_a_variable_is_looked_up_where_it_is_used(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PLACE", str(tmp_path))
        made = sweep(storage="sqlite:///${PLACE}/secret.db")
        studies.create(made, tmp_path / "unused")
        assert (tmp_path / "secret.db").exists()
        assert not (tmp_path / "unused").exists()

    def test_one_that_is_not_set_is_named_and_no_other_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("USER_NAME", "somebody")
        with pytest.raises(UserError, match=r"\$\{PASSWORD\} is not set") as refused:
            studies.create(sweep(storage="postgresql://${USER_NAME}:${PASSWORD}@db/optuna"), tmp_path / "unused")
        assert "somebody" not in str(refused.value)
