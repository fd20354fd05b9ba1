"""Samplers learn from trials that their own code ended, and the study keeps them as they are."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path
from statistics import mean
from typing import Any

import optuna
import pytest
from optuna.samplers import BaseSampler, CmaEsSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.study import Study
from optuna.trial import Trial, TrialState

from mgpu_slurm.run_folder import layout
from mgpu_slurm.sweeps.scheduling import construction, samplers
from mgpu_slurm.sweeps.scheduling.rung_tpe import RungTpe
from mgpu_slurm.sweeps.scheduling.scheduler import Decision, Scheduler
from mgpu_slurm.sweeps.search import space_parser
from mgpu_slurm.sweeps.search.sweep_options import Pruner, Sampler
from mgpu_slurm.sweeps.study import claims as claiming
from mgpu_slurm.sweeps.study import recovery
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.snapshots import Snapshots
from tests.sweeps.sweeps import begin, finish, kill, make, states, study_of, sweep_of, worker


def make_study(
    name: str, seed: int, direction: str = "maximize", pruner: Pruner | None = None, **options: Any
) -> Study:
    levels = (pruner or Pruner()).levels
    sampler = construction.sampler_of(Sampler(name, seed, options), worker=0, levels=levels)
    return optuna.create_study(sampler=sampler, direction=direction)


def fail(study: Study, trial: Trial) -> None:
    claiming.fail(study, study._storage.get_trial(trial._trial_id), "ValueError: boom", is_own_fault=True)


def failures(study: Study, trials: int = 100, pruner: Pruner | None = None) -> int:
    """Train trials of which half of the space fails, and the others are the better the nearer they are to that half."""
    scheduler = construction.scheduler_of(pruner or Pruner(), study.direction.name.lower())
    epochs = range(1, pruner.max_resource if pruner is not None and pruner.max_resource is not None else 0)
    sign = 1 if study.direction == optuna.study.StudyDirection.MAXIMIZE else -1
    failed = 0
    for _ in range(trials):
        trial = study.ask()
        x, y = (trial.suggest_float(name, 0, 1) for name in "xy")
        value = sign * (x - 0.1 * (y - 0.3) ** 2)
        if x > 0.5:
            failed += 1
            fail(study, trial)
        elif any(_is_pruned(study, scheduler, trial, value - sign / epoch, epoch) for epoch in epochs):
            study.tell(trial, state=TrialState.PRUNED)
        else:
            study.tell(trial, value)
    return failed


def _is_pruned(study: Study, scheduler: Scheduler, trial: Trial, value: float, epoch: int) -> bool:
    trial.report(value, epoch)
    snapshot = Snapshots(study, scheduler).take(None)
    return scheduler.is_due(epoch - 1, epoch) and scheduler.decide(snapshot, trial.number) is Decision.PRUNE


@pytest.mark.parametrize(
    ("direction", "pruner", "seeds"),
    [("maximize", None, 10), ("minimize", Pruner("hyperband", max_resource=9), 4)],
    ids=["plain", "hyperband"],
)
def test_tpe_avoids_the_failing_half_of_the_space(direction: str, pruner: Pruner | None, seeds: int) -> None:
    """Optuna's own TPE does not see the failed trials, and fails 90 times."""
    found = [failures(make_study("tpe", seed, direction, pruner), pruner=pruner) for seed in range(seeds)]
    assert mean(found) <= 40, found


@pytest.mark.parametrize(("name", "trials", "seeds"), [("gp", 10, 2), ("cmaes", 90, 5)])
def test_gp_and_cmaes_fail_less_often_than_random(name: str, trials: int, seeds: int) -> None:
    studies_of_it = [make_study(name, seed, n_startup_trials=6) for seed in range(seeds)]
    for study in studies_of_it:
        failures(study, 6)
    found = [failures(study, trials) for study in studies_of_it]
    assert mean(found) <= trials / 3, found


def test_sampler_given_by_import_path_samples_like_the_named_one() -> None:
    paths = ("optuna.samplers.CmaEsSampler", "cmaes")
    by_path, by_name = (make_study(each, 3, n_startup_trials=4) for each in paths)
    for study in (by_path, by_name):
        failures(study, 30)
    assert [trial.params for trial in by_path.trials] == [trial.params for trial in by_name.trials]


def test_optunas_tpe_is_available_by_its_path_and_learns_from_failures_too() -> None:
    study = make_study("optuna.samplers.TPESampler", 3)
    assert isinstance(study.sampler, TPESampler)
    assert not isinstance(study.sampler, RungTpe)
    assert failures(study) <= 50


def test_custom_sampler_class_keeps_its_overrides() -> None:
    class Own(TPESampler):
        def reseed_rng(self) -> None:
            raise KeyError

    made = samplers.learning_from_failures(Own)()
    assert isinstance(made, Own)
    with pytest.raises(KeyError):
        made.reseed_rng()
    random = optuna.samplers.RandomSampler
    assert samplers.learning_from_failures(random) is random


class TestTrialsShownToSampler:
    def seen(self, study: Study) -> list[tuple[str, float | None]]:
        shown: Any = study.sampler
        if isinstance(shown, RungTpe):
            trials = study.get_trials(deepcopy=False)
            observed = shown._observations.of(trials, shown.own_failures(study, trials)) or ()
            return [(trial.state.name, trial.value) for trial in observed]
        return [(trial.state.name, trial.value) for trial in shown._shown(study)._get_trials(deepcopy=False)]

    def told(self, name: str, direction: str = "maximize", **options: Any) -> Study:
        study = make_study(name, 0, direction, **options)
        for value in (1.0, None, 3.0, float("nan")):
            trial = study.ask()
            trial.suggest_float("x", 0, 1)
            if value is None:
                fail(study, trial)
            elif value != value:
                trial.report(5.0, 1)
                claiming.blame(study, study.trials[trial.number], "score is nan", is_own_fault=True)
                study.tell(trial, state=TrialState.PRUNED)
            else:
                study.tell(trial, value)
        return study

    def test_tpe_sees_bad_trials_as_pruned_before_their_first_report(self) -> None:
        study = self.told("tpe", n_startup_trials=4)
        assert self.seen(study) == [("COMPLETE", 1.0), ("PRUNED", None), ("COMPLETE", 3.0), ("PRUNED", None)]
        assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "COMPLETE", "PRUNED"]
        assert study.trials[3].intermediate_values == {1: 5.0}

    @pytest.mark.parametrize("name", ["gp", "cmaes"])
    @pytest.mark.parametrize(("direction", "bad"), [("maximize", -1.0), ("minimize", 5.0)])
    def test_gp_and_cmaes_see_bad_trials_as_complete_and_worst(self, name: str, direction: str, bad: float) -> None:
        study = self.told(name, direction)
        expected = [("COMPLETE", 1.0), ("COMPLETE", bad), ("COMPLETE", 3.0), ("COMPLETE", bad)]
        assert self.seen(study) == expected
        assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "COMPLETE", "PRUNED"]

    def test_bad_trial_is_worse_than_the_only_complete_one(self) -> None:
        study = make_study("gp", 0)
        for number in range(2):
            trial = study.ask()
            trial.suggest_float("x", 0, 1)
            fail(study, trial) if number else study.tell(trial, 3.0)
        assert self.seen(study) == [("COMPLETE", 3.0), ("COMPLETE", 0.0)]

    def test_failure_blamed_on_a_worker_stays_failed(self) -> None:
        study = self.told("tpe", n_startup_trials=2)
        trial = study.ask()
        trial.suggest_float("x", 0, 1)
        claiming.fail(study, study.trials[4], "worker 0 is FAILED")
        studies.note(study, f"{samplers.INNOCENT}3", [1])
        # a failure that is not the trial's own says nothing
        assert self.seen(study) == [("COMPLETE", 1.0), ("COMPLETE", 3.0), ("PRUNED", None)]

    def test_bad_trials_are_never_among_the_best(self) -> None:
        """Even if fewer trials have a value than would be among the best."""
        study = make_study("tpe", 0)
        for number in range(40):
            trial = study.ask()
            x = trial.suggest_float("x", 0, 1)
            if number != 20:
                fail(study, trial)
            else:
                study.tell(trial, x)
        study.ask().suggest_float("x", 0, 1)
        sampler: Any = study.sampler
        assert sampler._gamma(40) == 1

    @pytest.mark.parametrize("name", ["tpe", "gp", "cmaes"])
    def test_sampler_proposes_new_points_even_if_all_trials_failed(self, name: str) -> None:
        study = make_study(name, 0, n_startup_trials=3)
        for _ in range(8):
            trial = study.ask()
            for parameter in "xy":
                trial.suggest_float(parameter, 0, 1)
            fail(study, trial)
        assert len({(trial.params["x"], trial.params["y"]) for trial in study.trials}) == 8

    def test_tpe_avoids_a_failing_choice_in_a_conditional_space(self) -> None:
        """One choice fails, and one of the parameters exists only with it."""
        given = {
            "kind": {"choice": ["good", "bad"]},
            "own": {"float": [0.0, 1.0], "when": {"kind": "bad"}},
            "x": {"float": [0.0, 1.0]},
        }
        conditional = space_parser.parse(given, "sweep.yaml")
        study = optuna.create_study(direction="maximize", sampler=RungTpe(space=conditional, seed=0))
        for _ in range(60):
            trial = study.ask()
            values = conditional.suggest(trial)
            if values["kind"] == "bad":
                fail(study, trial)
            else:
                study.tell(trial, values["x"])
        kinds = [trial.params["kind"] for trial in study.trials]
        assert kinds[20:].count("bad") <= 8, kinds


class TestBlame:
    def own_faults(self, folder: layout.RunFolder) -> list[bool]:
        return [samplers.OWN_FAULT in trial.system_attrs for trial in study_of(folder).trials]

    def test_job_errors_and_bad_values_are_own_faults_but_sigkill_is_not(self, tmp_path: Path) -> None:
        folder = make(tmp_path, max_retries=0)
        part = worker(folder, 0)
        begin(part)
        part.fail("ValueError: boom")
        begin(part)
        finish(part, float("nan"))
        begin(part)
        part.complete({}, {}, step=1, progress=1)
        begin(part)
        part.lose("its command was ended by SIGKILL")
        assert states(folder) == ["FAIL", "PRUNED", "FAIL", "FAIL"]
        assert self.own_faults(folder) == [True, True, True, False]

    def test_trial_of_a_dead_worker_is_not_blamed(self, tmp_path: Path) -> None:
        folder = make(tmp_path, max_retries=0)
        begin(worker(folder, 0))
        kill(folder, 0)
        recovery.recover(study_of(folder), folder, sweep_of(folder))
        assert (states(folder), self.own_faults(folder)) == (["FAIL"], [False])

    def test_failure_of_the_space_function_is_not_blamed_on_the_trial(self, tmp_path: Path) -> None:
        folder = make(tmp_path, space="choices.py:choose")
        folder.code.mkdir()
        body = "    trial.suggest_float('x', 0, 1)\n    return {'x': 1 // trial.number}\n"
        (folder.code / "choices.py").write_text(f"def choose(trial):\n{body}")
        assert begin(worker(folder, 0)).number == 1
        assert (states(folder), self.own_faults(folder)) == (["FAIL", "RUNNING"], [False, False])


class Touches:
    """Makes a file as it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
class TestCmaesState:
    """The state is kept in the study, which others may write to."""

    def told(self, sampler: BaseSampler, storage: RDBStorage | None = None, trials: int = 25) -> Study:
        study = optuna.create_study(storage=storage, study_name="s", sampler=sampler)
        for _ in range(trials):
            self.train(study)
        return study

    def train(self, study: Study) -> dict[str, Any]:
        trial = study.ask()
        x, y, n = (
            trial.suggest_float("x", -2, 2),
            trial.suggest_float("y", 0.1, 1, log=True),
            trial.suggest_int("n", 1, 9),
        )
        study.tell(trial, (x - 1) ** 2 + y + 0.1 * (n - 4) ** 2)
        return trial.params

    def ours(self, **options: Any) -> BaseSampler:
        return construction.sampler_of(Sampler("cmaes", None, {"seed": 5} | options), worker=0)

    def kept(self, study: Study) -> list[dict[str, Any]]:
        """What trials keep of the optimizer, by trial."""
        attributes = (trial.system_attrs.items() for trial in study.trials)
        found = ({name: value for name, value in each if ":optimizer:" in name} for each in attributes)
        return [parts for parts in found if parts]

    @pytest.mark.parametrize("name", ["_restore_optimizer", "_init_optimizer", "_split_optimizer_str"])
    def test_installed_optuna_has_the_overridden_methods(self, name: str) -> None:
        assert name in vars(CmaEsSampler), f"Optuna {optuna.__version__} may unpickle what is in the study: see _Cmaes"

    @pytest.mark.parametrize(
        "options", [{}, {"lr_adapt": True}, {"use_separable_cma": True}, {"with_margin": True}], ids=str
    )
    def test_proposals_match_optunas_own_sampler(self, tmp_path: Path, options: dict[str, Any]) -> None:
        # one of them through a database, which is slow
        storage = None if options else RDBStorage(f"sqlite:///{tmp_path}/study.db")
        kept = self.told(self.ours(**options), storage)
        own = self.told(CmaEsSampler(seed=5, **options))
        assert [trial.params for trial in kept.trials] == [trial.params for trial in own.trials]
        assert len(self.kept(kept)) == len(self.kept(own)) >= 3
        if storage is not None:
            storage.remove_session()
            storage.engine.dispose()

    def test_state_parts_fit_into_every_database(self) -> None:
        study = self.told(self.ours(popsize=20), trials=50)
        (first, *_) = self.kept(study)
        assert len(first) > 1
        assert all(len(json.dumps(part)) <= 2048 for part in first.values())

    def next_proposal(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Return the proposal after a trial with these attributes that somebody has put into the study."""
        study = self.told(self.ours())
        last = study.trials[-1]
        space = {"params": last.params, "distributions": last.distributions}
        study.add_trial(optuna.trial.create_trial(value=9.0, system_attrs=attributes, **space))
        return self.train(study)

    def test_pickled_state_is_not_executed_and_the_previous_state_is_used(self, tmp_path: Path) -> None:
        forged = pickle.dumps(Touches(tmp_path / "ran")).hex()
        assert self.next_proposal({"cma:optimizer:0": forged}) == self.next_proposal({})
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize("kind", ["truncated", "unknown attribute", "another class", "number", "wrong shape"])
    def test_malformed_state_is_ignored_and_the_previous_state_is_used(self, kind: str) -> None:
        genuine = "".join(self.kept(self.told(self.ours()))[-1].values())
        content = json.loads(base64.b64decode(genuine))
        forged: Any = {
            "truncated": genuine[:400],
            "unknown attribute": as_text(content | {"state": content["state"] | {"ask": 1}}),
            "another class": as_text(content | {"class": "Popen"}),
            "number": 5,
            "wrong shape": as_text(content | {"state": content["state"] | {"_c_1d": 0.5}}),
        }[kind]
        assert self.next_proposal({"cma:optimizer:0": forged}) == self.next_proposal({})

    def test_study_begun_by_optuna_continues_with_a_new_optimizer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        study = self.told(CmaEsSampler(seed=5))
        before = len(self.kept(study))
        study.sampler = self.ours()
        monkeypatch.setattr(pickle, "loads", None)
        for _ in range(20):
            self.train(study)
        assert len(self.kept(study)) >= before + 2


def as_text(content: dict[str, Any]) -> str:
    return base64.b64encode(json.dumps(content).encode()).decode()
