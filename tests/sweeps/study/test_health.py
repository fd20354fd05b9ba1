"""Trials that fail: which failures end a sweep, and which a worker, whose node may be broken."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core import files
from mgpu_slurm.metrics.report_socket import CONTINUE, Verdict
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.registry import sweep_state
from mgpu_slurm.request.spec import TERMINATED_EXIT_CODE
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.sweeps.client import study_client
from mgpu_slurm.sweeps.client.messages import Assignment, BrokenWorker, Leave, SweepFailed
from mgpu_slurm.sweeps.client.paused_trials import WORSE
from mgpu_slurm.sweeps.client.study_client import StudyClient
from mgpu_slurm.sweeps.scheduling import samplers
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.health import FIRST_FAILURES
from tests.sweeps.sweeps import begin, finish, kill, leave, make, states, study_of, worker


class TestCommonFailures:
    def test_same_error_in_the_first_five_trials_ends_the_sweep(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=9)
        parts = [worker(folder, number) for number in range(2)]
        for part in parts * 2:
            # a message may name the trial's values
            fail(part, reason="ValueError: no data at 0.25")
        begin(parts[0])
        said = "the first 5 trials all failed with the same error: ValueError: no data at 1e-05"
        with pytest.raises(SweepFailed, match=said):
            parts[0].fail("ValueError: no data at 1e-05")
        # the other one hears of it
        order = leave(parts[1])
        assert (order.exit_code, order.reason) == (1, said)

    def test_metric_missing_in_the_first_five_trials_ends_the_sweep(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=9, pruner={"name": "median"})
        part = worker(folder, 0)
        for number in range(5):
            begin(part)
            assert part.report(1, {"scores": 0.5}) == CONTINUE
            said = "the job never reported or returned the metric 'score' (did you mean 'scores'?)"
            with pytest.raises(SweepFailed) if number == 4 else nullcontext() as ended:
                part.complete({"scores": 0.5}, {"scores": 0.5}, step=1, progress=1)
            assert states(folder)[number:] == ["FAIL"]
            assert files.read_json(folder.of_trial(number).failure)["message"] == said
        assert str(ended.value) == f"the first 5 trials all failed with the same error: {said}"  # type: ignore[union-attr]

    def test_different_errors_or_one_success_do_not_end_the_sweep(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=9)
        part = worker(folder, 0)
        for reason in ["ValueError: a"] + (FIRST_FAILURES - 1) * ["ValueError: b"]:
            begin(part)
            part.fail(reason)
        folder = make(tmp_path / "other", trials=9)
        part = worker(folder, 0)
        begin(part)
        finish(part, 1.0)
        for _ in range(FIRST_FAILURES):
            begin(part)
            part.fail("ValueError: 1")
        assert states(folder) == ["COMPLETE"] + FIRST_FAILURES * ["FAIL"]

    def test_copy_that_does_not_fit_ends_the_sweep_once(self, tmp_path: Path) -> None:
        """The copies that come would fail too, but those after a change of the file would not."""
        folder = make(tmp_path, trials=9)
        part = worker(folder, 0)
        begin(part)
        finish(part, 1.0)
        begin(part)
        with pytest.raises(SweepFailed, match=r"^SweepError: this trial"):
            part.fail("SweepError: this trial is a copy of another one")
        studies.set_over(study_of(folder), None)
        part = worker(folder, 0, attempt=2)
        fail(part, reason="ValueError: no data")
        assert states(folder) == ["COMPLETE", "FAIL", "FAIL"]

    def test_trials_that_all_fail_after_a_report_end_the_sweep(self, tmp_path: Path) -> None:
        """A running trial that has come no further than those that failed is no sign that they fail for the node."""
        folder = make(tmp_path, trials=12)
        one, other = worker(folder, 0), worker(folder, 1)
        begin(one), begin(other)
        for _ in range(2):
            for part in (one, other):
                part.report(1, {"score": 0.5})
            for part in (one, other):
                part.fail("ValueError: it cannot be saved")
                begin(part)
        for part in (one, other):
            part.report(1, {"score": 0.5})
        with pytest.raises(SweepFailed, match="the first 5 trials all failed with the same error"):
            one.fail("ValueError: it cannot be saved")

    def test_trial_that_has_come_no_further_than_those_that_failed_is_waited_for(self, tmp_path: Path) -> None:
        """It may come further, and the node of the others may be broken."""
        folder = make(tmp_path, trials=12)
        slow, broken = worker(folder, 0), worker(folder, 1)
        begin(slow)
        slow.report(1, {"score": 0.5})
        for _ in range(FIRST_FAILURES + 1):
            broken._health._may_be_broken = False
            begin(broken)
            broken.report(1, {"score": 0.5})
            broken.fail("OSError: the disk is full")
        slow.report(2, {"score": 0.5})
        broken._health._may_be_broken = False
        begin(broken)
        broken.fail("OSError: the disk is full")
        assert states(folder)[-1] == "WAITING"

    def test_third_failure_is_retried_elsewhere_if_another_trial_goes_well(self, tmp_path: Path) -> None:
        """The node of the failing worker may be broken."""
        folder = make(tmp_path, trials=9)
        well, broken = worker(folder, 0), worker(folder, 1)
        begin(well)
        assert well.report(1, {"score": 0.9}) == CONTINUE
        for _ in range(3):
            begin(broken)
            broken.fail("OSError: no GPU")
        finish(well, 0.9)
        # the last one is to be tried elsewhere
        assert states(folder) == ["COMPLETE", "FAIL", "FAIL", "WAITING"]

    @pytest.mark.usefixtures("no_pause")
    def test_five_failures_do_not_end_the_sweep_while_an_earlier_trial_runs(self, tmp_path: Path) -> None:
        """It may go well, and the others may be on a broken node."""
        folder = make(tmp_path, trials=9)
        silent, broken = worker(folder, 0), worker(folder, 1)
        begin(silent)
        fail(broken, 2)
        for _ in range(3):
            assert broken.next(Stop.NO) is None
            broken._health._waits_until = 0.0
            fail(broken)
        with pytest.raises(SweepFailed, match="the first 6 trials all failed with the same error: OSError: no GPU"):
            silent.fail("OSError: no GPU")

    @pytest.mark.parametrize("max_retries", [0, 1])
    def test_first_trials_all_lost_too_often_end_the_sweep(self, tmp_path: Path, max_retries: int) -> None:
        folder = make(tmp_path, trials=2, max_retries=max_retries)
        part = worker(folder, 0)
        ended = []
        for _ in range(2 * max_retries + 1):
            begin(part)
            part.lose("its command was ended by SIGKILL")
            ended.append(part.ended)
        # one that is tried again has not ended
        assert ended == [[1], [0, 1, 1]][max_retries]
        begin(part)
        with pytest.raises(
            SweepFailed, match=r"the first 2 trials all failed with the same error: its command was ended by SIG"
        ):
            part.lose("its command was ended by SIGKILL")
        assert (states(folder), part.ended) == (["FAIL", "FAIL"], 2)

    @pytest.mark.parametrize("max_retries", [0, 1])
    def test_only_trial_that_kills_every_attempt_ends_the_sweep(self, tmp_path: Path, max_retries: int) -> None:
        folder = make(tmp_path, trials=1, max_retries=max_retries)
        for attempt in range(1, max_retries + 1):
            begin(worker(folder, 0, attempt))
            worker(folder, 0, attempt + 1).settle()
            assert states(folder) == ["WAITING"]
        begin(worker(folder, 0, max_retries + 1))
        with pytest.raises(SweepFailed, match="the only trial failed: its worker died"):
            worker(folder, 0, max_retries + 2).settle()

    def test_failure_of_the_only_trial_ends_the_sweep(self, tmp_path: Path) -> None:
        part = worker(make(tmp_path, trials=1, workers=1), 0)
        begin(part)
        with pytest.raises(SweepFailed, match="the only trial failed: KeyError: 'a'"):
            part.fail("KeyError: 'a'")


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_client, "PAUSE", 0.0)


def fail(part: StudyClient, count: int = 1, reason: str = "OSError: no GPU") -> None:
    for _ in range(count):
        begin(part)
        part.fail(reason)


def come_into_doubt(*parts: StudyClient) -> None:
    """Let the third trial of each fail while those of the others run."""
    for part in parts * 2:
        fail(part)
    for part in parts:
        begin(part)
    for part in parts:
        part.fail("OSError: no GPU")


def do_well(*parts: StudyClient) -> None:
    for part in parts:
        begin(part)
        finish(part, 0.5)


def shown(folder: RunFolder) -> list[str]:
    """States of trials as a sampler that learns from failures has them."""
    study = study_of(folder)
    sampler: Any = samplers.LearningTpe()
    return [trial.state.name for trial in sampler._shown(study).get_trials()]


@pytest.mark.usefixtures("no_pause")
class TestWaitingForOtherWorkers:
    """If all trials of a worker failed with the same error, its node may be broken."""

    def test_worker_waits_for_the_first_trials_of_others(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=9)
        silent, broken = worker(folder, 0), worker(folder, 1)
        begin(silent)
        fail(broken, 2)
        assert [broken.next(Stop.NO) for _ in range(3)] == [None] * 3
        state = records.read_state(folder.of_task(1))
        assert ("waiting for results of other workers" in state.reason, state.trial) == (True, None)
        assert broken.next(Stop.END) == Leave(TERMINATED_EXIT_CODE, "asked to end")
        silent.report(1, {"score": 0.5})
        assert begin(broken).number == 3
        assert records.read_state(folder.of_task(1)).reason == ""

    def test_worker_waits_for_a_worker_that_has_no_trial_yet(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=3)
        broken, starting = worker(folder, 1), worker(folder, 0)
        fail(broken, 2)
        assert broken.next(Stop.NO) is None
        begin(starting)
        with pytest.raises(SweepFailed, match="the first 3 trials all failed with the same error"):
            starting.fail("OSError: no GPU")
        assert leave(broken).exit_code == 1

    def test_worker_waits_for_its_failed_trial_to_be_tried_elsewhere(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=9)
        well, broken = worker(folder, 0), worker(folder, 1)
        do_well(well, broken)
        begin(well)
        fail(broken, 3)
        assert [broken.next(Stop.NO) for _ in range(2)] == [None] * 2
        finish(well, 0.5)
        # it has failed there too
        assert begin(well).number == 5
        well.fail("OSError: no GPU")
        assert begin(broken).number == 6
        assert states(folder)[3:] == ["FAIL", "FAIL", "FAIL", "RUNNING"]

    def test_worker_does_not_wait_for_a_dead_worker(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=4)
        dead, broken = worker(folder, 0), worker(folder, 1)
        begin(dead)
        fail(broken, 2)
        assert broken.next(Stop.NO) is None
        kill(folder, 0)
        broken._shared._next_look = 0.0
        # the last look was long ago
        os.utime(folder.looks, (0, 0))
        assert broken.next(Stop.NO) is None
        assert begin(broken).number == 0

    def test_worker_leaves_instead_of_waiting_if_no_trial_is_left(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=3)
        begin(worker(folder, 0))
        broken = worker(folder, 1)
        fail(broken, 2)
        assert leave(broken).reason == "no trial is left to start"

    def test_waiting_ends_after_its_limit(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=9)
        begin(worker(folder, 0))
        broken = worker(folder, 1)
        fail(broken, 2)
        for _ in range(2):
            assert broken.next(Stop.NO) is None
            broken._health._waits_until = 0.0
            fail(broken)

    def test_trial_begun_after_waiting_is_not_failed_for_lack_of_time(self, tmp_path: Path) -> None:
        """A trial that begins late did not have the whole time limit."""
        folder = make(tmp_path, trials=9, max_retries=0)
        silent = worker(folder, 0)
        begin(silent)
        fail(worker(folder, 1), 2)
        broken = worker(folder, 1, attempt=2)
        assert broken.next(Stop.NO) is None
        silent.report(1, {"score": 0.5})
        begin(broken)
        broken.give_back(is_late=True, has_saved=False)
        assert states(folder)[3] == "WAITING"


@pytest.mark.usefixtures("no_pause")
class TestBrokenNode:
    """A node is known to be broken once the same parameters run well on another."""

    def test_worker_leaves_once_its_failed_trial_runs_well_elsewhere(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=20, workers=4)
        well = [worker(folder, number) for number in range(3)]
        broken = worker(folder, 3)
        do_well(*well)
        fail(broken, reason="ValueError: its own")
        fail(broken, 3)
        # the first of these are done; the last one waits for somebody else
        assert states(folder)[3:] == ["FAIL", "FAIL", "FAIL", "WAITING"]
        values = study_of(folder).trials[6].params
        assert broken.next(Stop.NO) is None
        again = begin(well[0])
        assert (again.number, again.values, again.attempt) == (6, values, 2)
        # that it runs says nothing yet
        assert broken.next(Stop.NO) is None
        well[0].report(1, {"score": 0.5})
        with pytest.raises(BrokenWorker, match="trial 6 failed here, but runs well elsewhere: OSError: no GPU"):
            broken.next(Stop.NO)
        finish(well[0], 0.5)
        notes = studies.notes(study_of(folder))
        assert (studies.OVER in notes, notes[f"{samplers.INNOCENT}3"]) == (False, [4, 5])
        assert study_of(folder).trials[6].state.name == "COMPLETE"

    def test_workers_that_wait_for_each_other_try_the_trials_of_the_other(self, tmp_path: Path) -> None:
        """What they read is gone, for example: no worker is left whose results they could wait for."""
        folder = make(tmp_path, trials=20, workers=2)
        one, other = worker(folder, 0), worker(folder, 1)
        do_well(one, other)
        come_into_doubt(one, other)
        doubted = [number for number, state in enumerate(states(folder)) if state == "WAITING"]
        assert len(doubted) == 2
        assert [begin(one).number, begin(other).number] == doubted[::-1]
        # as soon as both have failed there too, both continue
        one.fail("OSError: no GPU")
        other.fail("OSError: no GPU")
        assert begin(one).number > max(doubted)
        assert begin(other).number > max(doubted)

    def test_workers_in_doubt_leave_their_trials_to_one_without(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=20, workers=3)
        well, one, other = (worker(folder, number) for number in range(3))
        do_well(well)
        begin(well)
        come_into_doubt(one, other)
        assert one.next(Stop.NO) is None
        assert other.next(Stop.NO) is None
        finish(well, 0.5)
        doubted = [number for number, state in enumerate(states(folder)) if state == "WAITING"]
        assert len(doubted) == 2
        assert begin(well).number in doubted

    def test_retry_elsewhere_must_get_past_already_reported_progress(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=20, workers=2)
        well, broken = worker(folder, 0), worker(folder, 1)
        do_well(well)
        fail(broken, 2)
        begin(broken)
        broken.report(1, {"score": 0.5})
        broken.fail("OSError: no GPU")
        begin(well)
        # from its checkpoint, or from the start
        well.report(1, {"score": 0.5})
        assert broken.next(Stop.NO) is None
        well.report(2, {"score": 0.5})
        with pytest.raises(BrokenWorker):
            broken.next(Stop.NO)

    def test_worker_stays_if_its_failed_trial_becomes_nan_elsewhere(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=20, workers=2)
        other, unlucky = worker(folder, 0), worker(folder, 1)
        do_well(other)
        fail(unlucky, 3)
        assert begin(other).number == 3
        other.report(1, {"score": float("nan")})
        other.prune("score is nan", 1)
        assert begin(unlucky).number == 4

    def test_sampler_ignores_its_failures_unless_the_trial_fails_elsewhere(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=20, workers=2, sampler={"name": "tpe"})
        well, broken = worker(folder, 0), worker(folder, 1)
        do_well(well)
        fail(broken, 3)
        begin(well)
        well.report(1, {"score": 0.5})
        with pytest.raises(BrokenWorker):
            broken.next(Stop.NO)
        # TPE learns from failed trials that it sees as pruned
        assert shown(folder) == ["COMPLETE", "FAIL", "FAIL", "RUNNING"]
        well.fail("OSError: no GPU")
        assert shown(folder) == ["COMPLETE", "PRUNED", "PRUNED", "PRUNED"]

    def test_each_failure_elsewhere_doubles_the_failures_needed_to_wait(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=30, workers=2)
        other, unlucky = worker(folder, 0), worker(folder, 1)
        do_well(other)
        for streak in (3, 6):
            fail(unlucky, streak)
            assert unlucky.next(Stop.NO) is None
            fail(other)
            do_well(unlucky)
        # one of each was tried twice, and has failed once
        assert states(folder).count("FAIL") == 9

    def test_failures_on_previous_nodes_do_not_count(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=20, workers=4)
        well, broken = [worker(folder, number) for number in range(3)], worker(folder, 3)
        do_well(*well)
        fail(broken, 2)
        records.record_event(folder.of_task(3), "started", attempt=2, job_id="3", nodes=["there"])
        moved = worker(folder, 3, attempt=2)
        fail(moved)
        do_well(moved)

    def test_no_worker_leaves_for_parameters_that_fail_everywhere(self, tmp_path: Path) -> None:
        """Such as half of a space, or the last part of a grid."""
        folder = make(tmp_path, trials=80, sampler={"name": "random", "seed": 7})
        parts, done = [worker(folder, number) for number in range(2)], 0
        while done < len(parts):
            done = 0
            for part in parts:
                order = part.next(Stop.NO)
                done += isinstance(order, Leave)
                if isinstance(order, Assignment) and (order.values["x"] < 0.5 or order.number > 60):
                    part.fail("OSError: no GPU")
                elif isinstance(order, Assignment):
                    finish(part, 0.5)
        trials = study_of(folder).trials
        assert {trial.state.name for trial in trials} == {"COMPLETE", "FAIL"}
        assert any(samplers.DOUBT in trial.system_attrs for trial in trials)

    def test_only_remaining_worker_neither_leaves_nor_waits(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=30)
        alone, other = worker(folder, 0), worker(folder, 1)
        do_well(alone, other)
        records.update_state(folder.of_task(1), state="TIMEOUT")
        fail(alone, 12)
        do_well(alone)

    def test_failed_trial_is_retried_here_if_the_other_worker_leaves(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=30)
        alone, other = worker(folder, 0), worker(folder, 1)
        do_well(alone, other)
        fail(alone, 3)
        assert alone.next(Stop.NO) is None
        records.update_state(folder.of_task(1), leaving=1)
        assert begin(alone).number == 4
        alone.fail("OSError: no GPU")
        do_well(alone)
        assert states(folder)[2:] == ["FAIL", "FAIL", "FAIL", "COMPLETE"]

    def test_restarted_ranks_also_leave_the_failed_trial_to_others(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=30)
        well, broken = worker(folder, 0), worker(folder, 1)
        do_well(well)
        fail(broken, 2)
        begin(broken)
        facts = {"trial": 3, "error": "OSError", "message": "no GPU"}
        records.record_event(folder.of_task(1), "ended", attempt=1, **facts)
        again = worker(folder, 1, attempt=2)
        again.settle()
        assert states(folder)[3] == "WAITING"
        assert again.next(Stop.NO) is None
        do_well(well)
        with pytest.raises(BrokenWorker, match="trial 3 failed here"):
            again.next(Stop.NO)

    def test_lost_trial_does_not_end_the_sweep(self, tmp_path: Path) -> None:
        """Even if all before it failed with the same error and one that may go well was given back."""
        folder = make(tmp_path, trials=9)
        preempted, part, other = worker(folder, 0), worker(folder, 1), worker(folder, 2)
        begin(preempted)
        fail(other, FIRST_FAILURES - 3)
        fail(part, 2)
        preempted.give_back(is_late=False, has_saved=False)
        records.update_state(folder.of_task(0), state="PENDING")
        begin(part)
        part.lose("its command was ended by SIGKILL")
        do_well(part)
        assert states(folder) == ["COMPLETE"] + (FIRST_FAILURES - 1) * ["FAIL"]


class TestPruning:
    def test_trial_at_max_resource_is_not_pruned(self, tmp_path: Path) -> None:
        folder = make(tmp_path, pruner={"name": "median", "startup_trials": 1, "max_resource": 3})
        part = worker(folder, 0)
        begin(part)
        for progress in (1, 2, 3):
            assert part.report(progress, {"score": 0.9}) == CONTINUE
        finish(part, 0.9)
        begin(part)
        assert part.report(2, {"score": 0.1}) == Verdict(WORSE)
        assert part.report(3, {"score": 0.1}) == CONTINUE

    def test_sweep_with_only_pruned_trials_has_failed(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=1, workers=1)
        part = worker(folder, 0)
        begin(part)
        part.prune("score is nan", 1)
        leave(part)
        told, workers = sweep_state.summary_of(folder), [RunState(state="COMPLETED")]
        assert sweep_state.overall(workers, told) == "FAILED"
        assert sweep_state.reason(workers, told, "FAILED") == "1 of 1 trial, and all of them were pruned: score is nan"


class TestSpaceFunctions:
    def chosen(self, tmp_path: Path, body: str) -> RunFolder:
        folder = make(tmp_path, space="choices.py:choose")
        folder.code.mkdir()
        (folder.code / "choices.py").write_text(f"import optuna\n\ndef choose(trial):\n    {body}\n")
        return folder

    def test_function_that_fails_for_the_first_trials_ends_the_sweep(self, tmp_path: Path) -> None:
        folder = self.chosen(tmp_path, "return [1]")
        said = r"the first 4 trials all failed with the same error: space: UserError: choices.py:choose has returned"
        with pytest.raises(SweepFailed, match=said):
            begin(worker(folder, 0))
        assert states(folder) == ["FAIL"] * 4

    def test_function_that_fails_for_one_trial_fails_only_that_trial(self, tmp_path: Path) -> None:
        folder = self.chosen(tmp_path, "return {'x': 1 // trial.number}")
        assert begin(worker(folder, 0)).number == 1
        assert states(folder) == ["FAIL", "RUNNING"]
        assert files.read_json(folder.of_trial(0).failure)["message"].startswith("space: ZeroDivisionError: ")

    def test_function_can_prune_a_combination(self, tmp_path: Path) -> None:
        folder = self.chosen(tmp_path, "if not trial.number: raise optuna.TrialPruned\n    return {'x': 1}")
        assert begin(worker(folder, 0)).values == {"x": 1}
        assert states(folder) == ["PRUNED", "RUNNING"]
