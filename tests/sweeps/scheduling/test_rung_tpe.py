"""TPE by rung: which trials it learns from, and that it repeats no point of a finite space."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import optuna
import pytest
from optuna.study import Study
from optuna.trial import Trial, TrialState

from mgpu_slurm.sweeps import optuna_adapter
from mgpu_slurm.sweeps.optuna_adapter import FIXED_PARAMS
from mgpu_slurm.sweeps.scheduling import rung_tpe
from mgpu_slurm.sweeps.scheduling.rung_tpe import RungTpe
from mgpu_slurm.sweeps.search import space_parser
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep_options import Pruner
from mgpu_slurm.sweeps.study import claims as claiming

WIDE = {"x": {"float": [0.0, 1.0]}}


def space_of(given: dict[str, Any]) -> Space:
    return space_parser.parse(given, "sweep.yaml")


def make_study(space: dict[str, Any] | None = None, levels: Sequence[int] = (), **options: Any) -> Study:
    optuna_adapter.silence()
    made = None if space is None else space_of(space)
    return optuna.create_study(sampler=RungTpe(levels, made, **{"seed": 1} | options))


def ask(study: Study) -> Trial:
    """Begin a trial, even if others are paused, which Optuna would take."""
    number = optuna_adapter.create_trial(study, optuna.trial.create_trial(state=TrialState.RUNNING))
    return Trial(study, number)


def seen(study: Study) -> list[tuple[int, str, float | None]] | None:
    """Return number, state and value of the trials as TPE sees them; None if it draws at random."""
    sampler: Any = study.sampler
    trials = study.get_trials(deepcopy=False)
    trials = sampler._observations.of(trials, sampler.own_failures(study, trials))
    return None if trials is None else [(trial.number, trial.state.name, trial.value) for trial in trials]


class TestObservations:
    def told(self, *reports: dict[int, float], levels: Sequence[int] = (1, 3, 9)) -> Study:
        """Return a study with a running trial for each of these reports, learning from two trials on."""
        study = make_study(WIDE, levels, n_startup_trials=2)
        for each in reports:
            trial = ask(study)
            trial.suggest_float("x", 0, 1)
            for progress, value in each.items():
                trial.report(value, progress)
        return study

    def set_state(self, study: Study, number: int, state: TrialState, value: float | None = None) -> None:
        study._storage.set_trial_state_values(study.trials[number]._trial_id, state, None if value is None else [value])

    def test_all_count_with_their_value_at_the_highest_rung_that_enough_have_reached(self) -> None:
        study = self.told({1: 0.5}, {1: 0.4, 3: 0.3}, {1: 0.6, 3: 0.2, 9: 0.1}, {})
        self.set_state(study, 1, TrialState.WAITING)
        self.set_state(study, 2, TrialState.PRUNED)
        # at progress 9 there is one value only; trials below the rung are left out, running ones are pending
        assert seen(study) == [(0, "RUNNING", None), (1, "COMPLETE", 0.3), (2, "COMPLETE", 0.2), (3, "RUNNING", None)]

    def test_a_report_after_the_rung_counts_if_the_rung_was_skipped(self) -> None:
        assert seen(self.told({2: 0.5}, {4: 0.4}, levels=(1, 3))) == [(0, "COMPLETE", 0.5), (1, "COMPLETE", 0.4)]

    def test_too_few_values_draw_at_random(self) -> None:
        assert seen(self.told({1: 0.5}, {})) is None

    def test_own_failures_are_worst_and_count_as_values(self) -> None:
        study = self.told({1: 0.5}, {1: 0.9}, {})
        claiming.fail(study, study.trials[1], "ValueError: boom", is_own_fault=True)
        claiming.fail(study, study.trials[2], "its worker died")
        assert seen(study) == [(0, "COMPLETE", 0.5), (1, "PRUNED", None)]

    def test_failures_alone_teach_nothing(self) -> None:
        study = self.told({}, {})
        for trial in study.trials:
            claiming.fail(study, trial, "ValueError: boom", is_own_fault=True)
        assert seen(study) is None

    def test_complete_trial_counts_with_its_final_value_at_the_last_rung(self) -> None:
        study = self.told({1: 0.5, 3: 0.4}, {1: 0.5, 3: 0.3}, levels=(1, 3))
        self.set_state(study, 1, TrialState.COMPLETE, 0.25)
        assert seen(study) == [(0, "COMPLETE", 0.4), (1, "COMPLETE", 0.25)]

    def test_without_reports_the_final_values_count(self) -> None:
        study = self.told({}, {}, {})
        for number, value in ((0, 0.5), (1, 0.25)):
            self.set_state(study, number, TrialState.COMPLETE, value)
        assert seen(study) == [(0, "COMPLETE", 0.5), (1, "COMPLETE", 0.25), (2, "RUNNING", None)]

    def test_median_has_levels_at_powers_of_three(self) -> None:
        assert Pruner("median", min_resource=2).levels[:4] == (2, 6, 18, 54)
        assert Pruner().levels == ()
        assert Pruner("hyperband", max_resource=9).levels == (1, 3, 9)
        study = self.told(*(dict.fromkeys(range(1, 8), 0.1) for _ in range(2)), levels=Pruner("median").levels)
        assert seen(study) == [(0, "COMPLETE", 0.1), (1, "COMPLETE", 0.1)]


def test_paused_trials_teach_where_optunas_tpe_draws_at_random() -> None:
    """All trials wait at the first rung; only half of the space is good."""
    study = make_study(WIDE, (1, 3))
    for _ in range(40):
        trial = ask(study)
        trial.report((trial.suggest_float("x", 0, 1) - 0.2) ** 2, 1)
        study._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
    later = [abs(trial.params["x"] - 0.2) for trial in study.trials[20:]]
    # at random it is 0.3
    assert sorted(later)[10] < 0.2


@pytest.mark.parametrize("levels", [(), (1, 3, 9)])
def test_one_worker_and_a_seed_draw_the_same_again(levels: Sequence[int]) -> None:
    def drawn() -> list[dict[str, Any]]:
        study = make_study(WIDE | {"n": {"int": [1, 99]}, "c": {"choice": ["a", "b"]}}, levels)
        for _ in range(30):
            trial = ask(study)
            values = study.sampler._space.suggest(trial)  # type: ignore[attr-defined]
            trial.report(values["x"] + values["n"] / 99, 1)
            study.tell(trial, values["x"])
        return [trial.params for trial in study.trials]

    assert drawn() == drawn()


def train(study: Study, suggest: Callable[[Trial], dict[str, Any]], trials: int) -> list[tuple[Any, ...]]:
    """Return the points of so many trials, of which some fail and some are paused."""
    for number in range(trials):
        trial = ask(study)
        values = suggest(trial)
        value = float(sum(zlib.crc32(str(each).encode()) % 100 for each in values.values()))
        if number % 7 == 3:
            claiming.fail(study, study.trials[number], "ValueError: boom", is_own_fault=True)
        elif number % 7 == 5:
            trial.report(value, 1)
            study._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
        elif number % 7 != 6:
            study.tell(trial, value)
    return [tuple(sorted(trial.params.items())) for trial in study.trials]


FINITE = {
    "64 integers": ({"n": {"int": [1, 64]}}, 64),
    "18 points": ({"n": {"int": [2, 6], "step": 2}, "c": {"choice": ["a", "b", "c"]},
                   "b": {"choice": [True, False]}}, 18),
    "steps of 0.1": ({"x": {"float": [0.1, 1.0], "step": 0.1}, "y": {"float": [0.0, 0.9], "step": 0.3}}, 40),
    "conditional": ({"opt": {"choice": ["sgd", "adam"]}, "m": {"choice": [0.0, 0.5, 0.9], "when": {"opt": "sgd"}},
                     "n": {"int": [1, 4]}}, 16),
    "one value": ({"n": {"int": [1, 8]}, "c": {"choice": ["only"]}}, 8),
    "nested": ({"opt": {"choice": ["sgd", "adam"]}, "m": {"choice": [0.0, 0.5], "when": {"opt": "sgd"}},
                "k": {"int": [1, 3], "when": {"m": 0.5}}}, 5),
}  # fmt: skip


@pytest.mark.parametrize("name", FINITE)
@pytest.mark.parametrize("seed", range(3))
def test_no_point_is_repeated_while_untried_ones_remain(name: str, seed: int) -> None:
    given, points = FINITE[name]
    space = space_of(given)
    study = make_study(given, (1, 3), seed=seed, n_startup_trials=5)
    found = train(study, space.suggest, points)
    assert len(space.grid()) == points
    assert len(set(found)) == points
    # afterwards points are repeated, not refused
    assert len(train(study, space.suggest, 3)) == points + 3


def test_points_of_a_space_function_are_not_repeated() -> None:
    def suggest(trial: Trial) -> dict[str, Any]:
        return {"n": trial.suggest_int("n", 1, 12), "c": trial.suggest_categorical("c", ["a", "b"])}

    study = make_study(None, n_startup_trials=5)
    # the first trial shows which parameters there are
    assert len(set(train(study, suggest, 24))) == 24


def test_space_function_may_depend_on_what_it_has_drawn() -> None:
    def suggest(trial: Trial) -> dict[str, Any]:
        layers = trial.suggest_int("layers", 1, 3)
        return {"layers": layers} | {f"w{place}": trial.suggest_float(f"w{place}", 0, 1) for place in range(layers)}

    assert len(set(train(make_study(None, n_startup_trials=5), suggest, 40))) == 40


def test_queued_points_count_as_tried() -> None:
    study = make_study({"n": {"int": [1, 8]}}, n_startup_trials=2)
    for n in (3, 5):
        study.enqueue_trial({"n": n})
    drawn = [ask(study).suggest_int("n", 1, 8) for _ in range(6)]
    assert sorted(drawn) == [1, 2, 4, 6, 7, 8]


def test_given_values_decide_which_parameters_are_drawn() -> None:
    given = {"opt": {"choice": ["sgd", "adam"]}, "m": {"float": [0.0, 0.9], "when": {"opt": "sgd"}}}
    space, study = space_of(given), make_study(given)
    for name, expected in (("sgd", {"opt", "m"}), ("adam", {"opt"})) * 10:
        attributes = {FIXED_PARAMS: {"opt": name}}
        template = optuna.trial.create_trial(state=TrialState.RUNNING, system_attrs=attributes)
        trial = Trial(study, optuna_adapter.create_trial(study, template))
        values = space.suggest(trial)
        assert (values["opt"], values.keys()) == (name, expected)
        study.tell(trial, random.random())


def test_parameters_may_be_drawn_one_by_one_but_not_in_groups() -> None:
    study = make_study(WIDE | {"y": {"float": [0.0, 1.0]}}, multivariate=False)
    train(study, study.sampler._space.suggest, 30)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"group is an option of optuna\.samplers\.TPESampler"):
        RungTpe(group=True)


@pytest.mark.parametrize(
    "given",
    [
        {"float": [0.1, 1.0], "step": 0.1},
        {"float": [1e-4, 1.0], "log": True},
        {"int": [1, 9], "step": 2},
        {"int": [1, 9], "log": True},
        {"choice": [1, "a", None, [1, 2], {"a": 1}]},
    ],
    ids=str,
)
def test_distribution_is_the_one_that_a_trial_suggests_from(given: dict[str, Any]) -> None:
    space = space_of({"p": given})
    trial = optuna.create_study().ask()
    space.suggest(trial)
    (parameter,) = space.parameters
    assert trial.distributions == {"p": parameter.distribution}


class TestPartialTrials:
    def of_earlier(self, count: int) -> Study:
        """Return a study that knows trials of an earlier one, which had no y, and was best at x = 0.3."""
        study = make_study({"x": {"float": [0.0, 1.0]}, "y": {"float": [0.0, 1.0]}})
        uniform = optuna.distributions.FloatDistribution(0, 1)
        for number in range(count):
            x = number / count
            study.add_trial(
                optuna.trial.create_trial(value=abs(x - 0.3), params={"x": x}, distributions={"x": uniform})
            )
        return study

    def points(self, study: Study, count: int) -> list[tuple[float, float]]:
        found = []
        for _ in range(count):
            trial = ask(study)
            x, y = (trial.suggest_float(name, 0, 1) for name in "xy")
            study.tell(trial, abs(x - 0.3) + abs(y - 0.8))
            found.append((x, y))
        return found

    def test_they_inform_the_draws_of_the_parameters_that_they_have(self) -> None:
        found = self.points(self.of_earlier(60), 10)
        # the new parameter is drawn at random until enough trials have it
        assert sum(abs(x - 0.3) < 0.15 for x, _ in found) >= 7, found
        assert max(y for _, y in found) - min(y for _, y in found) > 0.6, found

    def test_the_new_parameter_is_learnt_from_the_trials_that_have_it(self) -> None:
        found = self.points(self.of_earlier(60), 40)
        assert sum(abs(y - 0.8) < 0.2 for _, y in found[20:]) >= 14, found
        assert sum(abs(x - 0.3) < 0.15 for x, _ in found[20:]) >= 14, found

    def test_parameter_that_depends_on_another_is_learnt_from_the_few_that_have_it(self) -> None:
        study = make_study({
            "opt": {"choice": ["a", "b", "c", "d"]}, "m": {"float": [0.0, 1.0], "when": {"opt": "a"}},
        })  # fmt: skip
        found = []
        for _ in range(60):
            trial = ask(study)
            opt = trial.suggest_categorical("opt", ["a", "b", "c", "d"])
            m = trial.suggest_float("m", 0, 1) if opt == "a" else 1.0
            found += [m] if opt == "a" else []
            study.tell(trial, abs(m - 0.3))
        assert sum(abs(m - 0.3) < 0.2 for m in found[len(found) // 2 :]) > 0.6 * len(found) / 2, found

    def test_all_are_drawn_together_when_most_trials_have_all(self) -> None:
        study = self.of_earlier(12)
        self.points(study, 12)
        sampler: Any = study.sampler
        known = sampler._look(study, study.trials[0])
        space = {name: optuna.distributions.FloatDistribution(0, 1) for name in "xy"}
        assert [list(names) for names, _ in rung_tpe._groups(study, known.shown, space, 10)] == [["x", "y"]]
