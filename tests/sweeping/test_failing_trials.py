"""Trials that fail: which failures end a sweep, and which a worker, whose node may be broken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mgpu_slurm import paths, records
from mgpu_slurm.launch import sweeps
from mgpu_slurm.paths import RunFolder
from mgpu_slurm.runtime.stopping import Stop
from mgpu_slurm.spec import TERMINATED_EXIT_CODE
from mgpu_slurm.sweeping import participant
from mgpu_slurm.sweeping import study as studies
from mgpu_slurm.sweeping.orders import BrokenWorker, Leave, SweepFailed
from mgpu_slurm.sweeping.own_trial import HOPELESS
from mgpu_slurm.sweeping.participant import Participant
from tests.sweeping.sweeps import begin, finish, kill, leave, make, states, study_of, worker


class TestCommonFailures:
    def test_the_same_error_in_the_first_trials_of_all_workers_ends_the_sweep(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=9)
        parts = [worker(folder, number) for number in range(2)]
        for part in parts:
            begin(part)
        # a message may name the trial's values
        parts[0].fail("ValueError: no data at 0.25")
        with pytest.raises(SweepFailed, match="all of the first 2 trials failed alike: ValueError: no data at 1e-05"):
            parts[1].fail("ValueError: no data at 1e-05")
        # the other one hears of it
        order = leave(parts[0])
        assert (order.exit_code, order.reason) == (
            1,
            "all of the first 2 trials failed alike: ValueError: no data at 1e-05",
        )

    def test_different_ones_or_one_success_do_not(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=9)
        part = worker(folder, 0)
        for reason in ("ValueError: a", "ValueError: b", "ValueError: b"):
            begin(part)
            part.fail(reason)
        folder = make(tmp_path / "other", trials=9)
        part = worker(folder, 0)
        begin(part)
        finish(part, 1.0)
        for _ in range(3):
            begin(part)
            part.fail("ValueError: 1")
        assert states(folder)[:4] == ["COMPLETE", "FAIL", "FAIL", "FAIL"]

    def test_not_where_a_trial_goes_well(self, tmp_path: Path) -> None:
        """One worker may have a broken node."""
        folder = make(tmp_path, trials=9)
        well, broken = worker(folder, 0), worker(folder, 1)
        begin(well)
        assert well.judge(1, {"score": 0.9}) is None
        for _ in range(3):
            begin(broken)
            broken.fail("OSError: no GPU")
        finish(well, 0.9)
        assert states(folder) == ["COMPLETE", *["FAIL"] * 3]

    def test_as_many_as_workers_end_no_sweep_while_one_of_them_is_silent(self, tmp_path: Path) -> None:
        """It may do well, and the others sit on a broken node."""
        folder = make(tmp_path, trials=9)
        silent, broken = worker(folder, 0), worker(folder, 1)
        begin(silent)
        for _ in range(2):
            begin(broken)
            broken.fail("OSError: no GPU")
        with pytest.raises(SweepFailed, match="all of the first 3 trials failed alike: OSError: no GPU"):
            silent.fail("OSError: no GPU")

    def test_the_only_trial_is_enough(self, tmp_path: Path) -> None:
        part = worker(make(tmp_path, trials=1, workers=1), 0)
        begin(part)
        with pytest.raises(SweepFailed, match="the only trial failed alike: KeyError: 'a'"):
            part.fail("KeyError: 'a'")


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(participant, "PAUSE", 0.0)


def fail(part: Participant, count: int = 1, reason: str = "OSError: no GPU") -> None:
    for _ in range(count):
        begin(part)
        part.fail(reason)


def do_well(*parts: Participant) -> None:
    for part in parts:
        begin(part)
        finish(part, 0.5)


@pytest.mark.usefixtures("no_pause")
class TestWaitingForNews:
    """Of the others, where all that a worker has had failed alike: its node may be broken."""

    def test_of_their_first_trials(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=9)
        silent, broken = worker(folder, 0), worker(folder, 1)
        begin(silent)
        fail(broken, 2)
        assert [broken.next(Stop.NO) for _ in range(3)] == [None] * 3
        state = records.read_state(folder.of_task(1))
        assert ("waits for news of other workers" in state["reason"], state["trial"]) == (True, None)
        assert broken.next(Stop.END) == Leave(TERMINATED_EXIT_CODE, "asked to end")
        silent.judge(1, {"score": 0.5})
        assert begin(broken).number == 3
        assert records.read_state(folder.of_task(1))["reason"] == ""

    def test_of_one_that_has_its_nodes_and_no_trial_yet(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=9)
        broken, starting = worker(folder, 1), worker(folder, 0)
        fail(broken, 2)
        assert broken.next(Stop.NO) is None
        begin(starting)
        with pytest.raises(SweepFailed, match="all of the first 3 trials failed alike"):
            starting.fail("OSError: no GPU")
        assert leave(broken).exit_code == 1

    def test_of_later_trials(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=9)
        well, broken = worker(folder, 0), worker(folder, 1)
        do_well(well, broken)
        begin(well)
        fail(broken, 3)
        assert broken.next(Stop.NO) is None
        well.judge(1, {"score": 0.5})
        assert begin(broken).number == 6

    def test_is_not_of_the_dead(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=4)
        dead, broken = worker(folder, 0), worker(folder, 1)
        begin(dead)
        fail(broken, 2)
        assert broken.next(Stop.NO) is None
        kill(folder, 0)
        broken._next_look = 0.0
        # the last look was long ago
        os.utime(folder.looks, (0, 0))
        assert broken.next(Stop.NO) is None
        assert begin(broken).number == 0

    def test_is_not_for_nothing(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=3)
        begin(worker(folder, 0))
        broken = worker(folder, 1)
        fail(broken, 2)
        assert leave(broken).reason == "no trial is left to start"

    def test_takes_no_longer_than_it_may(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=9)
        begin(worker(folder, 0))
        broken = worker(folder, 1)
        fail(broken, 2)
        for _ in range(2):
            assert broken.next(Stop.NO) is None
            broken._waits_until = 0.0
            fail(broken)

    def test_is_no_time_for_a_trial(self, tmp_path: Path) -> None:
        """One that begins late in the time limit had not all of it."""
        folder = make(tmp_path, trials=9, max_retries=0)
        silent = worker(folder, 0)
        begin(silent)
        fail(worker(folder, 1), 2)
        broken = worker(folder, 1, attempt=2)
        assert broken.next(Stop.NO) is None
        silent.judge(1, {"score": 0.5})
        begin(broken)
        broken.give_back(is_late=True, has_saved=False)
        assert states(folder)[3] == "WAITING"


class TestABrokenNode:
    def test_its_worker_leaves_the_rest_to_those_who_do_well(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=20, workers=4)
        well = [worker(folder, number) for number in range(3)]
        broken = worker(folder, 3)
        do_well(*well)
        fail(broken)
        do_well(*well)
        fail(broken, 2)
        begin(broken)
        with pytest.raises(BrokenWorker, match="last 4 trials failed alike here, and 3 of 3 did well elsewhere meanw"):
            broken.fail("OSError: no GPU")
        do_well(well[0])
        assert studies.OVER not in studies.notes(study_of(folder))

    def test_what_failed_on_other_nodes_does_not_count(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=20, workers=4)
        well, broken = [worker(folder, number) for number in range(3)], worker(folder, 3)
        do_well(*well)
        fail(broken)
        do_well(*well)
        fail(broken, 2)
        records.record_event(folder.of_task(3), "started", attempt=2, job_id="3", nodes=["there"])
        moved = worker(folder, 3, attempt=2)
        fail(moved)
        do_well(moved)

    def test_nobody_leaves_where_all_fail_alike_from_some_place_on(self, tmp_path: Path) -> None:
        """As the last part of a grid, or while a disk is away."""
        folder = make(tmp_path, trials=60)
        parts = [worker(folder, number) for number in range(2)]
        for _ in range(10):
            do_well(*parts)
        for _ in range(15):
            for part in parts:
                fail(part)

    def test_nobody_leaves_where_no_other_is_there(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=30)
        alone, other = worker(folder, 0), worker(folder, 1)
        do_well(alone, other)
        fail(alone)
        do_well(*[other] * 5)
        records.update_state(folder.of_task(1), state="TIMEOUT")
        fail(alone, 12)
        do_well(alone)

    def test_parameters_that_fail_now_and_then_are_no_broken_node(self, tmp_path: Path) -> None:
        """One trial in three fails everywhere, and here five in a row."""
        folder = make(tmp_path, trials=90)
        other, unlucky = parts = [worker(folder, number) for number in range(2)]
        for _ in range(5):
            for part in parts:
                do_well(part, part)
                fail(part)
        for _ in range(5):
            fail(unlucky)
            do_well(other, other)
            fail(other)
        do_well(unlucky)

    def test_a_trial_that_was_only_lost_ends_no_sweep(self, tmp_path: Path) -> None:
        """Also where the two before it failed alike, and one that may do well was given back."""
        folder = make(tmp_path, trials=9)
        preempted, part = worker(folder, 0), worker(folder, 1)
        begin(preempted)
        fail(part, 2)
        preempted.give_back(is_late=False, has_saved=False)
        records.update_state(folder.of_task(0), state="PENDING")
        begin(part)
        part.lose("its command was ended by SIGKILL")
        do_well(part)
        assert states(folder) == ["COMPLETE", "FAIL", "FAIL"]


class TestGivingUp:
    def test_one_that_is_at_its_end_is_not_given_up_any_more(self, tmp_path: Path) -> None:
        folder = make(tmp_path, pruner={"name": "median", "startup_trials": 1, "max_resource": 3})
        part = worker(folder, 0)
        begin(part)
        for progress in (1, 2, 3):
            assert part.judge(progress, {"score": 0.9}) is None
        finish(part, 0.9)
        begin(part)
        assert part.judge(2, {"score": 0.1}) == HOPELESS
        assert part.judge(3, {"score": 0.1}) is None

    def test_a_sweep_of_which_nothing_came_has_failed(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=1, workers=1)
        part = worker(folder, 0)
        begin(part)
        part.prune("score is nan", 1)
        leave(part)
        told, workers = sweeps.summary_of(folder), [{"state": "COMPLETED"}]
        assert sweeps.overall(workers, told) == "FAILED"
        assert sweeps.reason(workers, told, "FAILED") == "1 of 1 trial, and all of them were given up: score is nan"


class TestSpacesByAFunction:
    def chosen(self, tmp_path: Path, body: str) -> RunFolder:
        folder = make(tmp_path, space="choices.py:choose")
        folder.code.mkdir()
        (folder.code / "choices.py").write_text(f"import optuna\n\ndef choose(trial):\n    {body}\n")
        return folder

    def test_one_that_fails_alike_for_the_first_trials_ends_the_sweep_with_its_error(self, tmp_path: Path) -> None:
        folder = self.chosen(tmp_path, "return [1]")
        said = (
            r"all of the first 2 trials failed alike: space: UserError: choices.py:choose has returned \[1\]: expected"
        )
        with pytest.raises(SweepFailed, match=said):
            begin(worker(folder, 0))
        assert states(folder) == ["FAIL", "FAIL"]

    def test_one_that_fails_for_a_trial_costs_that_trial_alone(self, tmp_path: Path) -> None:
        folder = self.chosen(tmp_path, "return {'x': 1 // trial.number}")
        assert begin(worker(folder, 0)).number == 1
        assert states(folder) == ["FAIL", "RUNNING"]
        assert paths.read_json(folder.of_trial(0).failure)["message"].startswith("space: ZeroDivisionError: ")

    def test_a_combination_that_it_will_have_none_of_is_pruned(self, tmp_path: Path) -> None:
        folder = self.chosen(tmp_path, "if not trial.number: raise optuna.TrialPruned\n    return {'x': 1}")
        assert begin(worker(folder, 0)).values == {"x": 1}
        assert states(folder) == ["PRUNED", "RUNNING"]
