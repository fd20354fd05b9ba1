"""A worker's dealings with its study, on a real journal: what becomes of its trials, and when it leaves."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core import files
from mgpu_slurm.core.files import locked
from mgpu_slurm.core.retry import quiet
from mgpu_slurm.metrics.report_socket import CONTINUE, Verdict
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.registry import sweep_state
from mgpu_slurm.request.spec import REQUEUE_EXIT_CODE, TERMINATED_EXIT_CODE
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.sweeps.client.messages import Leave, Superseded
from mgpu_slurm.sweeps.client.paused_trials import WORSE
from mgpu_slurm.sweeps.study import claims as claiming
from mgpu_slurm.sweeps.study import recovery, summary
from tests.support import wait_until
from tests.sweeps.sweeps import begin, finish, kill, leave, make, states, study_of, sweep_of, worker

FORK = multiprocessing.get_context("fork")


def run_worker(folder: RunFolder, number: int) -> list[int]:
    """All that a worker gets to do, ended at once."""
    part = worker(folder, number)
    done = []
    while not isinstance(order := part.next(Stop.NO), Leave):
        part.report(1, {"score": order.values["x"]})
        finish(part, order.values["x"])
        done.append(order.number)
    return done


def test_concurrent_workers_run_each_trial_exactly_once(tmp_path: Path) -> None:
    folder = make(tmp_path, trials=21, workers=8)
    with FORK.Pool(8) as pool:
        done = pool.starmap(run_worker, [(folder, number) for number in range(8)], chunksize=1)
    assert sorted(number for each in done for number in each) == list(range(21))
    assert states(folder) == ["COMPLETE"] * 21
    told = files.read_json(folder.summary)
    assert told["trials"] == summary.counts(study_of(folder).trials, sweep_of(folder))
    for trial in study_of(folder).trials:
        assert files.read_json(folder.of_trial(trial.number).result)["value"] == trial.value


def test_raised_trial_count_is_seen_before_the_next_trial(tmp_path: Path) -> None:
    folder = make(tmp_path, trials=2)
    part = worker(folder, 0)
    for _ in range(2):
        begin(part)
        finish(part, 0.5)
    leave(part)
    files.write_whole(folder.sweep, folder.sweep.read_text().replace("trials: 2", "trials: 3"))
    assert begin(part).number == 2
    finish(part, 0.5)
    leave(part)
    assert states(folder) == ["COMPLETE"] * 3


def test_summary_is_not_overwritten_by_an_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If two workers end together, one may have read the study before the other's trial ended."""
    folder = make(tmp_path, trials=2)
    ended = FORK.Event()
    slow, fast = worker(folder, 0), worker(folder, 1)
    begin(slow)
    begin(fast)
    finish(slow, 0.1)
    real = summary.summarize

    def looked_a_while_ago(*given: Any) -> Any:
        found = real(*given)
        other = FORK.Process(target=end_the_other)
        other.start()
        # it may have to wait until this one is written
        wait_until(lambda: ended.is_set() or _waits_for_a_lock(other.pid))
        others.append(other)
        return found

    def end_the_other() -> None:
        monkeypatch.undo()
        finish(fast, 0.2)
        leave(fast)
        ended.set()

    others: list[Any] = []
    monkeypatch.setattr(summary, "summarize", looked_a_while_ago)
    leave(slow)
    others[0].join()
    assert others[0].exitcode == 0
    assert files.read_json(folder.summary)["trials"]["COMPLETE"] == 2


def _waits_for_a_lock(pid: int | None) -> bool:
    return any("->" in line and f" {pid} " in line for line in Path("/proc/locks").read_text().splitlines())


def test_skipped_summary_is_written_with_the_next_report(tmp_path: Path) -> None:
    folder = make(tmp_path)
    part = worker(folder, 0)
    begin(part)
    finish(part, 0.5)
    # as if it had taken long
    part._shared._summary_took = 3600.0
    begin(part)
    assert files.read_json(folder.summary)["trials"]["COMPLETE"] == 0
    part._shared._summary_took = 0.0
    part.report(1, {"score": 0.5})
    assert files.read_json(folder.summary)["trials"]["COMPLETE"] == 1


class TestLeaving:
    def test_leaving_worker_takes_a_trial_added_just_before(self, tmp_path: Path) -> None:
        """Somebody adds to the sweep while the worker finds nothing to do."""
        folder = make(tmp_path, trials=1)
        part = worker(folder, 0)
        begin(part)
        finish(part, 0.5)
        answer, told = FORK.Pipe(duplex=False)
        child = FORK.Process(target=lambda: told.send(part.next(Stop.NO)))
        with locked(folder.sweep_lock):
            child.start()
            wait_until(lambda: _waits_for_a_lock(child.pid))
            files.write_whole(folder.sweep, folder.sweep.read_text().replace("trials: 1", "trials: 2"))
        order = answer.recv()
        child.join()
        assert (order.number, records.read_state(folder.of_task(0)).leaving is not None) == (1, False)

    def test_leaving_worker_records_the_attempt_in_its_state(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=1)
        part = worker(folder, 0, attempt=2)
        begin(part)
        finish(part, 0.5)
        leave(part)
        assert records.read_state(folder.of_task(0)).leaving == 2


class TestMetrics:
    @pytest.mark.parametrize(
        ("result", "last", "value"),
        [({"score": 1.5}, {}, 1.5), ({"other": 1.0}, {"loss": 1.0}, 0.5), ({"value": 3.5}, {"loss": 1.0}, 3.5)],
        ids=["returned", "last reported", "single number"],
    )
    def test_value_is_returned_or_else_the_last_reported(
        self, tmp_path: Path, result: dict[str, float], last: dict[str, float], value: float
    ) -> None:
        folder = make(tmp_path)
        part = worker(folder, 0)
        begin(part)
        part.report(1, {"score": 0.25})
        part.report(2, {"score": 0.5})
        # a report that has something else to tell
        part.report(3, last)
        part.complete(result, last, step=3, progress=2)
        assert study_of(folder).trials[0].value == value

    def test_trial_without_the_metric_fails_alone(self, tmp_path: Path) -> None:
        folder = make(tmp_path)
        first, other = worker(folder, 0), worker(folder, 1)
        begin(first)
        begin(other)
        assert first.report(1, {"scores": 0.5}) == CONTINUE
        said = "the job has not reported 'score' (did you mean 'scores'?) yet"
        assert records.read_state(folder.of_task(0)).reason == said
        first.complete({"scores": 0.5}, {"scores": 0.5}, step=1, progress=1)
        assert files.read_json(folder.of_trial(0).failure)["message"].startswith("the job never reported")
        finish(other, 0.5)
        begin(first)
        assert states(folder) == ["FAIL", "COMPLETE", "RUNNING"]

    def test_metric_reported_late_is_not_shown_as_missing(self, tmp_path: Path) -> None:
        folder = make(tmp_path)
        part = worker(folder, 0)
        begin(part)
        part.report(1, {"loss": 0.5})
        part.report(2, {"loss": 0.5, "score": 0.5})
        assert records.read_state(folder.of_task(0)).reason == ""

    def test_report_without_the_metric_is_ignored_by_the_pruner(self, tmp_path: Path) -> None:
        folder = make(tmp_path, pruner={"name": "median", "startup_trials": 1})
        part = worker(folder, 0)
        for score in (0.5, 0.1):
            begin(part)
            found = [part.report(at, {"score": score} if at % 3 == 0 else {"loss": 1.0}) for at in range(1, 7)]
            assert found == [Verdict(WORSE) if score != 0.5 and at % 3 == 0 else CONTINUE for at in range(1, 7)]
            part.complete({}, {}, step=1, progress=6)
        assert [trial.intermediate_values for trial in study_of(folder).trials] == [{3: 0.5, 6: 0.5}, {3: 0.1, 6: 0.1}]

    def test_trial_stopped_after_its_last_epoch_keeps_the_reported_value(self, tmp_path: Path) -> None:
        """No epoch is left for the loop, so what the job returns still has its initial value."""
        folder = make(tmp_path)
        for result in ({"score": 0.0}, {"value": 0.0}, {}):
            part = worker(folder, 0)
            begin(part)
            part.report(3, {"score": 0.75})
            part.give_back(is_late=False, has_saved=True)
            begin(part)
            part.complete(result, {"score": 0.75}, step=3, progress=3, has_trained=False)
        for trial in study_of(folder).trials[:3]:
            assert trial.value == 0.75
            told = files.read_json(folder.of_trial(trial.number).result)
            assert set(told["result"].values()) <= {told["value"]} == {0.75}

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_nan_or_inf_prunes_only_that_trial(self, tmp_path: Path, value: float) -> None:
        folder = make(tmp_path)
        part = worker(folder, 0)
        begin(part)
        assert part.report(1, {"score": value}) == Verdict(f"score is {value}")
        part.prune(f"score is {value}", 1)
        begin(part)
        part.complete({"score": value}, {}, step=1, progress=1)
        begin(part)
        finish(part, 1.0)
        begin(part)
        assert states(folder) == ["PRUNED", "PRUNED", "COMPLETE", "RUNNING"]
        told = summary.summarize(study_of(folder), sweep_of(folder)).recent
        assert [trial.reason for trial in told[:2]] == [f"score is {value}"] * 2


def test_trial_worse_than_the_median_is_pruned_with_its_value(tmp_path: Path) -> None:
    folder = make(tmp_path, pruner={"name": "median", "startup_trials": 1})
    part = worker(folder, 0)
    begin(part)
    assert [part.report(progress, {"score": 1.0}) for progress in (1, 2)] == [CONTINUE, CONTINUE]
    finish(part, 1.0)
    begin(part)
    assert part.report(1, {"score": 0.1}) == Verdict(WORSE)
    part.prune(WORSE, 1)
    assert states(folder)[:2] == ["COMPLETE", "PRUNED"]
    assert study_of(folder).trials[1].value == 0.1
    assert files.read_json(folder.of_trial(1).result)["state"] == "PRUNED"


class TestAskedToStop:
    @pytest.mark.parametrize(
        ("stop", "code"),
        [(Stop.END, TERMINATED_EXIT_CODE), (Stop.REQUEUE, REQUEUE_EXIT_CODE), (Stop.LEAVE, REQUEUE_EXIT_CODE)],
    )
    def test_no_trial_is_started(self, tmp_path: Path, stop: Stop, code: int) -> None:
        folder = make(tmp_path)
        order = worker(folder, 0).next(stop)
        assert isinstance(order, Leave)
        assert order.exit_code == code
        assert states(folder) == []

    def test_worker_state_names_no_trial(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=3)
        part, other = worker(folder, 0), worker(folder, 1)
        begin(part)
        finish(part, 0.5)
        part.next(Stop.REQUEUE)
        begin(other)
        other.give_back(is_late=False, has_saved=False)
        assert [records.read_state(folder.of_task(task)).trial for task in (0, 1)] == [None, None]

    def test_given_back_trial_is_next_with_its_number_values_and_curve(self, tmp_path: Path) -> None:
        folder = make(tmp_path)
        first = worker(folder, 0)
        before = begin(first)
        first.report(1, {"score": 0.5})
        first.give_back(is_late=True, has_saved=True)
        other = worker(folder, 1)
        again = begin(other)
        assert (again.number, again.values, again.attempt) == (before.number, before.values, 2)
        # what came after the checkpoint comes again
        other.report(1, {"score": 0.6})
        other.report(2, {"score": 0.7})
        finish(other, 0.7)
        assert study_of(folder).trials[0].intermediate_values == {1: 0.5, 2: 0.7}
        assert claiming.LOSSES not in study_of(folder).trials[0].system_attrs

    def test_trial_that_never_fits_into_the_time_limit_fails(self, tmp_path: Path) -> None:
        folder = make(tmp_path, max_retries=1, trials=1)
        for attempt in (1, 2):
            part = worker(folder, 0, attempt)
            begin(part)
            part.give_back(is_late=True, has_saved=False)
        assert states(folder) == ["FAIL"]
        assert "no checkpoint within a worker's whole time" in files.read_json(folder.of_trial(0).failure)["message"]

    @pytest.mark.parametrize(("is_late", "has_saved"), [(False, False), (True, True)])
    def test_trial_cut_short_or_with_a_new_checkpoint_is_retried(
        self, tmp_path: Path, is_late: bool, has_saved: bool
    ) -> None:
        folder = make(tmp_path, max_retries=0, trials=1)
        part = worker(folder, 0)
        begin(part)
        part.give_back(is_late=is_late, has_saved=has_saved)
        assert states(folder) == ["WAITING"]

    def test_trial_that_had_only_part_of_the_time_limit_is_retried(self, tmp_path: Path) -> None:
        folder = make(tmp_path, max_retries=0, trials=2)
        part = worker(folder, 0)
        begin(part)
        finish(part, 0.5)
        begin(part)
        part.give_back(is_late=True, has_saved=False)
        assert states(folder) == ["COMPLETE", "WAITING"]


class TestBudgets:
    def test_reached_target_lets_running_trials_end_and_starts_none(self, tmp_path: Path) -> None:
        folder = make(tmp_path, budget={"target": 0.9})
        parts = [worker(folder, number) for number in range(2)]
        for part in parts:
            begin(part)
        finish(parts[0], 0.95)
        assert leave(parts[0]).reason == "a trial has reached score 0.9"
        finish(parts[1], 0.2)
        order = leave(parts[1])
        assert (order.exit_code, order.reason) == (0, "a trial has reached score 0.9")
        assert states(folder) == ["COMPLETE", "COMPLETE"]
        assert files.read_json(folder.summary)["trials"]["WAITING"] == 2

    def test_given_back_trial_finishes_even_after_the_target_is_reached(self, tmp_path: Path) -> None:
        folder = make(tmp_path, budget={"target": 0.9})
        parts = [worker(folder, number) for number in range(2)]
        for part in parts:
            begin(part)
        parts[1].report(1, {"score": 0.99})
        finish(parts[0], 0.95)
        parts[1].give_back(is_late=True, has_saved=True)
        told = sweep_state.summary_of(folder)
        assert (told.given_back, sweep_state.overall([RunState(state="COMPLETED")], told)) == (1, "FAILED")
        late = worker(folder, 1, attempt=2)
        assert begin(late).number == 1
        finish(late, 0.99)
        assert leave(late).reason == "a trial has reached score 0.9"
        assert sweep_state.overall([RunState(state="COMPLETED")], sweep_state.summary_of(folder)) == "COMPLETED"

    def test_raised_patience_is_seen_before_the_next_trial(self, tmp_path: Path) -> None:
        folder = make(tmp_path, budget={"patience": 2})
        part = worker(folder, 0)
        for _ in range(2):
            begin(part)
            finish(part, 0.5)
        make_text = folder.sweep.read_text().replace("patience: 2", "patience: 3")
        files.write_whole(folder.sweep, make_text)
        begin(part)
        assert sweep_of(folder).budget.patience == 3


class TestDeadWorkers:
    def test_trial_of_a_dead_worker_is_retried_if_nothing_else_is_left(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=2)
        dying, other = worker(folder, 0), worker(folder, 1)
        lost = begin(dying)
        begin(other)
        kill(folder, 0)
        finish(other, 0.5)
        again = begin(other)
        assert (again.number, again.values, again.attempt) == (lost.number, lost.values, 2)
        finish(other, 0.7)
        assert leave(other).exit_code == 0
        assert states(folder) == ["COMPLETE", "COMPLETE"]

    def test_trial_of_a_dead_worker_is_found_even_right_after_a_check(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=2)
        dying, other = worker(folder, 0), worker(folder, 1)
        begin(dying)
        begin(other)
        finish(other, 0.5)
        # a moment before it died
        assert recovery.look(study_of(folder), folder, sweep_of(folder), quiet, every=0.0) == []
        kill(folder, 0)
        assert begin(other).number == 0

    def test_superseded_worker_can_no_longer_change_its_trial(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=1)
        alive, other = worker(folder, 0), worker(folder, 1)
        begin(alive)
        kill(folder, 0)
        begin(other)
        for speaks in (
            lambda: alive.report(1, {"score": 0.1}),
            lambda: finish(alive, 0.1),
            lambda: alive.fail("ValueError: late"),
            lambda: alive.give_back(is_late=True, has_saved=True),
            lambda: alive.prune(WORSE, 1),
        ):
            with pytest.raises(Superseded, match="trial 0 has been given to another worker"):
                speaks()
        finish(other, 0.9)
        (trial,) = study_of(folder).trials
        assert (trial.value, trial.intermediate_values) == (0.9, {})

    def test_next_attempt_settles_the_trial_of_the_previous_one(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=2)
        begin(worker(folder, 0))
        records.record_event(
            folder.of_task(0), "ended", attempt=1, trial=0, error="ValueError", message="boom\nand more"
        )
        again = worker(folder, 0, attempt=2)
        again.settle()
        assert states(folder) == ["FAIL"]
        assert study_of(folder).trials[0].system_attrs[claiming.REASON] == "ValueError: boom"

    def test_trial_claimed_but_not_taken_is_left_to_its_owner(self, tmp_path: Path) -> None:
        """A worker claims a trial before it takes it, and may die after another one was faster."""
        folder = make(tmp_path, trials=2)
        worker(folder, 0)
        other = worker(folder, 1)
        mine = begin(other)
        study = study_of(folder)
        wanted = claiming.Worker(0, 1).claim
        study._storage.set_trial_system_attr(study.trials[mine.number]._trial_id, wanted, 1)
        worker(folder, 0, attempt=2).settle()
        assert other.report(1, {"score": 0.5}) == CONTINUE
        finish(other, 0.5)
        assert study_of(folder).trials[mine.number].state.name == "COMPLETE"


class TestStudyRestoredFromOlderCopy:
    """It assigns numbers again whose folders exist."""

    def test_new_trial_does_not_resume_from_anothers_checkpoint(self, tmp_path: Path) -> None:
        folder = make(tmp_path)
        part = worker(folder, 0)
        begin(part)
        finish(part, 0.5)
        copy = folder.journal.read_bytes()
        before = begin(part)
        lost = folder.of_trial(1)
        lost.checkpoint(3).mkdir(parents=True)
        finish(part, 0.75)
        folder.journal.write_bytes(copy)
        after = begin(worker(folder, 0, attempt=2))
        assert (after.number, after.attempt, after.values != before.values) == (1, 1, True)
        assert (lost.checkpoint(3).exists(), lost.result.exists()) == (False, False)
        # nothing is deleted
        old = RunFolder(folder.set_aside / "1-1")
        assert (old.checkpoint(3).exists(), files.read_json(old.result)["value"]) == (True, 0.75)
        assert files.read_json(old.parameters) == before.values
        assert files.read_json(lost.parameters) == after.values

    def test_given_back_trial_does_not_resume_from_anothers_checkpoint(self, tmp_path: Path) -> None:
        folder = make(tmp_path)
        empty = folder.journal.read_bytes()
        part = worker(folder, 0)
        first = begin(part)
        part.give_back(is_late=False, has_saved=True)
        given_back = folder.journal.read_bytes()
        folder.journal.write_bytes(empty)
        other = worker(folder, 0, attempt=2)
        begin(other)
        other.give_back(is_late=False, has_saved=True)
        folder.of_trial(0).checkpoint(3).mkdir(parents=True)
        folder.journal.write_bytes(given_back)
        again = begin(worker(folder, 0, attempt=3))
        assert (again.number, again.attempt, again.values) == (0, 1, first.values)
        assert not folder.of_trial(0).checkpoint(3).exists()
        assert sorted(path.name for path in folder.set_aside.iterdir()) == ["0-1", "0-2"]

    def test_trial_without_a_parameters_file_continues(self, tmp_path: Path) -> None:
        folder = make(tmp_path)
        part = worker(folder, 0)
        before = begin(part)
        part.give_back(is_late=False, has_saved=True)
        folder.of_trial(0).parameters.unlink()
        again = begin(part)
        assert (again.attempt, again.values, folder.set_aside.exists()) == (2, before.values, False)


class TestFullDisk:
    def test_files_are_written_once_there_is_room_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = make(tmp_path)
        part = worker(folder, 0)
        begin(part)
        real, refused = os.replace, []

        def full(source: Any, target: Any) -> None:
            if len(refused) < 6:
                refused.append(Path(target).name)
                raise OSError(errno.ENOSPC, "No space left on device")
            real(source, target)

        monkeypatch.setattr("os.replace", full)
        part.report(1, {"score": 0.5})
        finish(part, 0.5)
        assert {"state.json", "result.json"} <= set(refused)
        assert files.read_json(folder.of_trial(0).result)["value"] == 0.5
        assert states(folder) == ["COMPLETE"]
