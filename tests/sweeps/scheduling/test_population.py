"""Population based training: who is replaced by a copy of whom, and whose turn it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from optuna.trial import TrialState

from mgpu_slurm.sweeps.scheduling.population import Population
from mgpu_slurm.sweeps.scheduling.scheduler import (
    BEGIN,
    Action,
    Clone,
    Decision,
    Entry,
    EntryState,
    Job,
    Snapshot,
)
from mgpu_slurm.sweeps.study.snapshots import copy_of
from tests.sweeps.scheduling.simulated_sweep import SimulatedSweep
from tests.sweeps.scheduling.test_scheduler import file_of


def population(size: int = 4, **options: object) -> Population:
    given: dict[str, object] = {"rungs": (2, 4, 6), "population": size, "is_maximized": False}
    return Population(**(given | options))  # type: ignore[arg-type]


def members(*values: float, state: str = "paused", until: int = 0) -> dict[int, Entry]:
    """Return members that have come to a rung with these values."""
    return {
        number: Entry(number, until, dict.fromkeys(range(until + 1), value), EntryState(state))
        for number, value in enumerate(values)
    }


def running(known: dict[int, Entry], number: int) -> dict[int, Entry]:
    return known | {number: replace(known[number], state=EntryState.RUNNING)}


class TestDecisions:
    def test_worst_quarter_is_replaced_by_a_copy_of_the_best(self) -> None:
        known = running(members(0.1, 0.4, 0.2, 0.3), 1)
        assert population().decide(Snapshot(known), 1) == Clone(0)
        assert population(is_maximized=True).decide(Snapshot(running(known, 0)), 0) == Clone(1)
        assert population().decide(Snapshot(running(known, 3)), 3) is not Clone(0)

    def test_nobody_is_replaced_while_fewer_than_four_have_come(self) -> None:
        assert population().decide(Snapshot(running(members(0.1, 0.9, 0.2), 1)), 1) is Decision.PAUSE

    def test_trials_that_have_ended_are_compared_but_not_copied(self) -> None:
        known = running(members(0.1, 0.4, 0.2, 0.3), 1)
        for state in (EntryState.PRUNED, EntryState.FAILED, EntryState.COMPLETE):
            known[0] = replace(known[0], state=state)
            assert population().decide(Snapshot(known), 1) is Decision.PAUSE

    def test_member_continues_in_place_if_no_other_waits(self) -> None:
        known = {number: replace(each, state=EntryState.RUNNING) for number, each in members(0.1, 0.2, 0.3).items()}
        known[3] = Entry(3, 0, {}, EntryState.RUNNING)
        assert population().decide(Snapshot(known), 0) is Decision.CONTINUE
        waiting = known | {2: replace(known[2], state=EntryState.PAUSED)}
        assert population().decide(Snapshot(waiting), 0) is Decision.PAUSE
        # one that has come further waits for this one
        further = known | {2: Entry(2, 1, {0: 0.3, 1: 0.3}, EntryState.PAUSED)}
        assert population().decide(Snapshot(further), 0) is Decision.CONTINUE

    def test_spent_budget_pauses_all_and_nothing_is_next(self) -> None:
        known = running(members(0.1, 0.4, 0.2, 0.3), 1)
        assert population().decide(Snapshot(known, is_over=True), 1) is Decision.PAUSE
        assert population().next_job(Snapshot(known, is_over=True)) is None
        assert population().promotable(Snapshot(known, is_over=True)) == 0

    def test_last_rung_completes(self) -> None:
        known = running(members(0.1, 0.2, 0.3, 0.4, until=2), 3)
        assert population().decide(Snapshot(known), 3) is Decision.COMPLETE


class TestNextJob:
    def test_members_begin_first_and_then_the_one_that_is_behind_is_next(self) -> None:
        known = members(0.1, 0.2, 0.3)
        assert population().next_job(Snapshot(known)) == BEGIN
        known[3] = Entry(3, 1, {0: 0.4, 1: 0.4}, EntryState.PAUSED)
        assert population().next_job(Snapshot(known)) == Job(Action.PROMOTE, 0)

    def test_paused_member_is_judged_again_before_it_continues(self) -> None:
        """It was compared with those that had come before it."""
        known = members(0.9, 0.1, 0.2, 0.3)
        assert population().next_job(Snapshot(known)) == Job(Action.CLONE, 0, 1)
        known[1] = replace(known[1], state=EntryState.COMPLETE)
        assert population().next_job(Snapshot(known)) == Job(Action.PROMOTE, 0)

    def test_replaced_trial_gets_one_copy_before_anything_else(self) -> None:
        known = members(0.1, 0.4, 0.2, 0.3)
        known[1] = replace(known[1], state=EntryState.PRUNED, source=0)
        assert population().next_job(Snapshot(known)) == Job(Action.CLONE, 1, 0)
        copied = known | {4: Entry(4, 1, {}, EntryState.RUNNING, replaces=1)}
        assert population().next_job(Snapshot(copied)) == Job(Action.PROMOTE, 0)
        assert (population().promotable(Snapshot(known)), population().promotable(Snapshot(copied))) == (4, 3)
        # two more members begin
        assert population(6).promotable(Snapshot(copied)) == 5

    def test_best_that_is_left_is_copied_if_the_chosen_one_has_gone(self) -> None:
        known = members(0.1, 0.4, 0.2, 0.3)
        known[0] = replace(known[0], state=EntryState.FAILED)
        known[1] = replace(known[1], state=EntryState.PRUNED, source=0)
        assert population().next_job(Snapshot(known)) == Job(Action.CLONE, 1, 2)


@pytest.mark.parametrize(("workers", "seed"), [(1, 3), (3, 11), (20, 5)])
def test_each_replaced_trial_has_one_copy_wherever_a_worker_dies(workers: int, seed: int) -> None:
    def sweep(dies_at: int | None = None) -> SimulatedSweep:
        made = SimulatedSweep(
            population(8), seed=seed, trials=8, workers=workers, sweep=file_of("pbt"), dies_at=dies_at
        )
        made.run()
        return made

    whole = sweep()
    assert any(copy_of(trial) for trial in whole.study.trials), "no trial was replaced"
    for dies_at in range(1, whole.writes + 1, 3):
        made = sweep(dies_at)
        trials = made.study.trials
        copies = Counter(found.trial for trial in trials if (found := copy_of(trial)) is not None)
        replaced = [trial.number for trial in trials if trial.state == TrialState.PRUNED]
        assert copies == Counter(replaced), dies_at
        assert sum(trial.state == TrialState.COMPLETE for trial in trials) == 8
        assert {trial.state for trial in trials} <= {TrialState.COMPLETE, TrialState.PRUNED}
