"""All schedulers: they decide from a snapshot alone, and sweeps under each of them end."""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.pruners import ThresholdPruner

from mgpu_slurm.sweeps.scheduling import construction
from mgpu_slurm.sweeps.scheduling.halving import Promotion
from mgpu_slurm.sweeps.scheduling.scheduler import (
    BEGIN,
    Action,
    Decision,
    Entry,
    EntryState,
    Job,
    OptunaPruner,
    Scheduler,
    Snapshot,
)
from mgpu_slurm.sweeps.search import sweep_file
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.search.sweep_options import Pruner
from mgpu_slurm.sweeps.study.snapshots import Snapshots
from tests.sweeps.scheduling.simulated_sweep import SimulatedSweep
from tests.sweeps.sweeps import VALUES

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "median": {"startup_trials": 2},
    "hyperband": {"max_resource": 9},
    "asha": {"max_resource": 27},
    "pbt": {"population": 20, "interval": 2, "max_resource": 9, "perturb": ("x",)},
    "optuna.pruners.PatientPruner": {"options": {"wrapped_pruner": None, "patience": 2}},
}


def scheduler_of(name: str, direction: str = "minimize", **options: Any) -> Scheduler:
    return construction.scheduler_of(Pruner(name, **OPTIONS[name] | options), direction)


def file_of(name: str) -> Sweep | None:
    """Return a sweep file for schedulers that make copies."""
    if name != "pbt":
        return None
    options = OPTIONS["pbt"] | {"name": "pbt", "perturb": ["x"]}
    return sweep_file.parse(VALUES | {"trials": None, "sampler": {"name": "random", "seed": 1}, "pruner": options}, "")


class TestContract:
    """What every scheduler has to do."""

    @pytest.mark.parametrize("name", OPTIONS)
    @pytest.mark.parametrize("direction", ["minimize", "maximize"])
    def test_sweep_ends_with_a_complete_trial(self, name: str, direction: str) -> None:
        scheduler, file = scheduler_of(name, direction), file_of(name)
        sweep = SimulatedSweep(scheduler, seed=1, trials=20, workers=3, direction=direction, sweep=file)
        sweep.run()
        entries = sweep.snapshot().entries
        assert sum(entry.replaces is None for entry in entries.values()) == 20
        states = Counter(entry.state for entry in entries.values())
        assert states[EntryState.COMPLETE] >= 1
        assert not states[EntryState.RUNNING]
        assert not states[EntryState.GIVEN_BACK]

    @pytest.mark.parametrize("name", OPTIONS)
    def test_answers_change_nothing_and_repeat(self, name: str) -> None:
        scheduler = scheduler_of(name)
        sweep = SimulatedSweep(scheduler, seed=2, trials=20, workers=3, sweep=file_of(name))
        for _ in range(40):
            sweep.step()
            snapshot = sweep.snapshot()
            before = copy.deepcopy(dict(snapshot.entries))
            assert scheduler.next_job(snapshot) == scheduler.next_job(snapshot)
            for entry in before.values():
                if entry.state is EntryState.RUNNING and entry.has_arrived:
                    assert scheduler.decide(snapshot, entry.number) == scheduler.decide(snapshot, entry.number)
            assert snapshot.entries == before

    @pytest.mark.parametrize("name", OPTIONS)
    def test_nothing_begins_when_the_limit_is_reached_or_the_budget_spent(self, name: str) -> None:
        scheduler = scheduler_of(name)
        assert scheduler.next_job(Snapshot({})) == BEGIN
        assert scheduler.next_job(Snapshot({}, trials=0, may_begin=False)) is None
        assert scheduler.next_job(Snapshot({}, may_begin=False, is_over=True)) is None

    @pytest.mark.parametrize("name", OPTIONS)
    def test_trial_at_the_end_is_not_pruned(self, name: str) -> None:
        """A trial that is at its end would lose its value."""
        scheduler = scheduler_of(name, **{} if name == "none" else {"max_resource": 9})
        sweep = SimulatedSweep(scheduler, seed=3, trials=12, workers=1, epochs=9, sweep=file_of(name))
        sweep.run()
        reached = [trial for trial in sweep.study.trials if 9 in trial.intermediate_values]
        assert reached
        assert {trial.state for trial in reached} == {optuna.trial.TrialState.COMPLETE}


@pytest.mark.parametrize(("progress", "is_due"), [(2, True), (3, False), (4, False)])
def test_pruner_of_optuna_is_not_asked_at_the_end(progress: int, is_due: bool) -> None:
    assert OptunaPruner(ThresholdPruner(lower=0.5), max_resource=3).is_due(progress - 1, progress) is is_due


def test_pruner_of_optuna_decides_on_the_own_trials() -> None:
    study = optuna.create_study()
    scheduler = OptunaPruner(ThresholdPruner(lower=0.5), max_resource=None)
    trial = study.ask()
    for value, decision in ((0.6, Decision.CONTINUE), (0.4, Decision.PRUNE)):
        trial.report(value, trial.number + len(study.trials[0].intermediate_values))
        assert scheduler.decide(Snapshots(study, scheduler).take(None), 0) is decision


# -- successive halving


def entries(*found: tuple[int, dict[int, float], str]) -> dict[int, Entry]:
    """Return entries, numbered in this order, of index of the rung, values and state."""
    return {
        number: Entry(number, until, values, EntryState(state)) for number, (until, values, state) in enumerate(found)
    }


def promotion(**options: Any) -> Promotion:
    return Promotion(**{"rungs": (1, 3, 9, 27), "factor": 3, "is_maximized": False, "hedge": False} | options)


class TestHyperband:
    def test_trials_are_compared_within_their_bracket_from_its_first_rung_on(self) -> None:
        scheduler = scheduler_of("hyperband")
        # brackets of 9, 5 and 3 trials; the second begins to compare at progress 3
        assert scheduler.sizes == (9, 5, 3)
        from mgpu_slurm.sweeps.scheduling.rungs import bracket_of

        brackets = [bracket_of(number, (9, 5, 3)) for number in range(17)]
        first, second, third = (brackets.index(bracket) for bracket in range(3))
        known = entries(*((2, {0: float(number)}, "running") for number in range(17)))
        for number in range(17):
            decision = scheduler.decide(Snapshot(known), number)
            better = sum(brackets[other] == brackets[number] for other in range(number))
            is_pruned = brackets[number] == 0 and better >= 3
            assert decision is (Decision.PRUNE if is_pruned else Decision.CONTINUE), number
        assert len({first, second, third}) == 3

    def test_first_trial_of_a_rung_continues(self) -> None:
        assert scheduler_of("hyperband").decide(Snapshot(entries((2, {0: 5.0}, "running"))), 0) is Decision.CONTINUE


class TestPromotion:
    def test_best_third_is_promoted_and_the_best_of_the_highest_rung_first(self) -> None:
        known = entries(
            (0, {0: 0.3}, "paused"),
            (0, {0: 0.2}, "paused"),
            (0, {0: 0.9}, "paused"),
            (1, {0: 0.4, 1: 0.5}, "paused"),
            (1, {0: 0.5, 1: 0.2}, "paused"),
            (1, {0: 0.6, 1: 0.3}, "paused"),
        )
        assert promotion().next_job(Snapshot(known)) == Job(Action.PROMOTE, 4)

    def test_no_more_than_a_third_is_promoted_out_of_a_rung(self) -> None:
        """Even if each trial is better than those before."""
        known = entries((1, {0: 0.5}, "running"), *((0, {0: value}, "paused") for value in (0.4, 0.3, 0.2, 0.1)))
        assert promotion().next_job(Snapshot(known)) == BEGIN
        assert promotion().next_job(Snapshot(known | {5: Entry(5, 0, {0: 0.6}, EntryState.PAUSED)})) == Job(
            Action.PROMOTE, 4
        )

    def test_running_trial_that_is_the_candidate_continues_without_a_pause(self) -> None:
        known = entries((0, {0: 0.1}, "running"), (0, {0: 0.3}, "paused"), (0, {0: 0.2}, "paused"))
        assert promotion().decide(Snapshot(known, trials=9), 0) is Decision.CONTINUE
        assert promotion().decide(Snapshot(known, trials=9, is_over=True), 0) is Decision.PAUSE

    @pytest.mark.parametrize(("trials", "decision"), [(9, Decision.PAUSE), (5, Decision.PRUNE), (None, Decision.PAUSE)])
    def test_hopeless_trial_is_pruned(self, trials: int | None, decision: Decision) -> None:
        known = entries((0, {0: 0.1}, "paused"), (0, {0: 0.2}, "running"))
        assert promotion().decide(Snapshot(known, trials=trials), 1) is decision

    def test_paused_trials_become_hopeless_as_better_ones_come(self) -> None:
        known = entries(*((0, {0: float(-number)}, "paused") for number in range(5)))
        assert promotion().hopeless(Snapshot(known, trials=9)) == [0, 1]
        assert promotion(is_maximized=True).hopeless(Snapshot(known, trials=9)) == [3, 4]

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("is_maximized", [True, False])
    def test_values_that_are_not_finite_are_worst(self, value: float, is_maximized: bool) -> None:
        known = entries((0, {0: value}, "paused"), (0, {0: 0.2}, "paused"), (0, {0: 0.2}, "paused"))
        assert promotion(is_maximized=is_maximized).next_job(Snapshot(known)) == Job(Action.PROMOTE, 1)

    def test_last_call_promotes_the_furthest_until_one_is_complete(self) -> None:
        known = entries((0, {0: 0.1}, "paused"), (1, {0: 0.5, 1: 0.4}, "paused"))
        for snapshot in (Snapshot(known, may_begin=False), Snapshot(known, may_begin=False, is_over=True)):
            assert promotion().next_job(snapshot) == Job(Action.PROMOTE, 1)
            for state in (EntryState.RUNNING, EntryState.GIVEN_BACK, EntryState.COMPLETE):
                other = {2: Entry(2, 3, {}, state)}
                assert promotion().next_job(replace(snapshot, entries=known | other)) is None

    def test_every_eighth_trial_is_first_compared_at_the_third_rung_with_its_like(self) -> None:
        scheduler = promotion(hedge=True)
        assert [scheduler.first_rung(number) for number in range(16)] == [*[0] * 7, 2, *[0] * 7, 2]
        assert [promotion(hedge=True, rungs=(1, 3, 9)).first_rung(number) for number in (6, 7)] == [0, 0]
        # with 9 of 10 the trial would be nearly whole
        assert promotion(hedge=True, rungs=(1, 3, 9, 10)).first_rung(7) == 1
        hedged = {number: Entry(number, 2, {0: 0.1, 1: 0.1, 2: 0.1}, EntryState.PAUSED) for number in (7, 15)}
        plain = entries(*((0, {0: 0.5}, "paused") for _ in range(3)))
        assert scheduler.next_job(Snapshot(plain | hedged)) == Job(Action.PROMOTE, 0)
        third = {23: Entry(23, 2, {0: 0.1, 1: 0.1, 2: 0.05}, EntryState.PAUSED)}
        assert scheduler.next_job(Snapshot(hedged | third)) == Job(Action.PROMOTE, 23)

    def test_least_promising_are_those_of_low_rungs_without_those_that_may_be_promoted(self) -> None:
        known = entries(
            (0, {0: 0.1}, "paused"),
            (0, {0: 0.9}, "paused"),
            (0, {0: 0.8}, "running"),
            (1, {0: 0.2, 1: 0.9}, "paused"),
            (0, {0: 0.7}, "paused"),
        )
        assert promotion().least_promising(Snapshot(known)) == [1, 4]


# -- sweeps that are simulated on a study, with workers that die

SWEEPS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "trials": st.integers(1, 40),
        "workers": st.integers(1, 8),
    }
)


def check(sweep: SimulatedSweep) -> None:
    scheduler, found = sweep.scheduler, sweep.snapshot().entries
    assert isinstance(scheduler, Promotion)
    assert len(found) == sweep.trials
    assert max(Counter(sweep.promoted).values(), default=1) == 1, "a trial was promoted twice out of a rung"
    assert any(entry.state is EntryState.COMPLETE for entry in found.values()), "no trial is complete"
    assert not any(entry.state in (EntryState.RUNNING, EntryState.GIVEN_BACK) for entry in found.values())
    for is_hedged in (False, True):
        alike = [entry for entry in found.values() if scheduler.is_hedged(entry.number) is is_hedged]
        first = scheduler.first_rung(7) if is_hedged else 0
        for rung in range(first, len(scheduler.rungs) - 1):
            there = [entry for entry in alike if rung in entry.values]
            assert sum(entry.until > rung for entry in there) <= max(1, len(there) // scheduler.factor), rung


@settings(max_examples=60, deadline=None)
@given(SWEEPS, st.integers(2, 4), st.sampled_from([1, 2, 9, 10, 27, 50]), st.booleans())
def test_no_trial_is_promoted_twice_and_one_is_complete(
    sweep: dict[str, int], factor: int, most: int, hedge: bool
) -> None:
    made = SimulatedSweep(promotion(rungs=rungs(most, factor), factor=factor, hedge=hedge), **sweep)
    made.run()
    check(made)


def rungs(most: int, factor: int) -> tuple[int, ...]:
    from mgpu_slurm.sweeps.scheduling.rungs import rungs_of

    return rungs_of(1, most, factor)


@pytest.mark.parametrize("seed", range(12))
def test_worker_may_die_at_any_write(seed: int) -> None:
    """A worker dies before a write of the study, at each of them in turn; the others continue its trial."""
    given = {"seed": seed, "trials": 3 + seed % 9, "workers": 1 + seed % 4}
    scheduler = promotion(rungs=rungs(9 if seed % 3 else 27, 2 + seed % 2), factor=2 + seed % 2, hedge=True)
    whole = SimulatedSweep(scheduler, **given)
    whole.run()
    assert whole.writes > 20
    for dies_at in range(1, whole.writes + 1):
        made = SimulatedSweep(scheduler, **given, dies_at=dies_at)
        made.run()
        assert made.deaths == 1
        check(made)


def test_one_worker_with_a_seed_repeats_a_sweep() -> None:
    def run() -> list[Any]:
        sweep = SimulatedSweep(promotion(), seed=5, trials=40, workers=1)
        sweep.run()
        return [(trial.params, trial.state, trial.intermediate_values) for trial in sweep.study.trials]

    assert run() == run()
