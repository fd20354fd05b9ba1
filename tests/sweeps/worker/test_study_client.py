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
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.registry import sweep_state
from mgpu_slurm.request.spec import REQUEUE_EXIT_CODE, TERMINATED_EXIT_CODE
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.sweeps.study import recovery, summary
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.worker.messages import Leave, Superseded
from mgpu_slurm.sweeps.worker.trial import WORSE
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


def test_eight_workers_at_once_do_each_trial_once_and_no_more_than_there_are(tmp_path: Path) -> None:
    folder = make(tmp_path, trials=21, workers=8)
    with FORK.Pool(8) as pool:
        done = pool.starmap(run_worker, [(folder, number) for number in range(8)], chunksize=1)
    assert sorted(number for each in done for number in each) == list(range(21))
    assert states(folder) == ["COMPLETE"] * 21
    told = files.read_json(folder.summary)
    assert told["trials"] == summary.counts(study_of(folder).trials, sweep_of(folder))
    for trial in study_of(folder).trials:
        assert files.read_json(folder.of_trial(trial.number).result)["value"] == trial.value


def test_more_trials_are_seen_before_the_next_one(tmp_path: Path) -> None:
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


def test_what_status_reads_is_never_older_than_the_last_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two workers that end together, one may have looked before the other's trial had ended."""
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


def test_what_was_left_out_of_a_summary_is_told_with_the_next_report(tmp_path: Path) -> None:
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


class TestTheLastOne:
    def test_who_leaves_says_so_and_sees_what_came_just_before(self, tmp_path: Path) -> None:
        """As it found nothing to do, somebody was adding to the sweep."""
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

    def test_one_that_has_said_so_is_not_counted_on(self, tmp_path: Path) -> None:
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
        ids=["returned", "reported last", "the one number"],
    )
    def test_the_value_is_what_the_job_returns_or_has_reported(
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

    def test_a_trial_without_it_fails_alone(self, tmp_path: Path) -> None:
        folder = make(tmp_path)
        first, other = worker(folder, 0), worker(folder, 1)
        begin(first)
        begin(other)
        assert first.report(1, {"scores": 0.5}) is None
        said = "the job has not reported 'score' (did you mean 'scores'?) yet"
        assert records.read_state(folder.of_task(0)).reason == said
        first.complete({"scores": 0.5}, {"scores": 0.5}, step=1, progress=1)
        assert files.read_json(folder.of_trial(0).failure)["message"].startswith("the job never reported")
        finish(other, 0.5)
        begin(first)
        assert states(folder) == ["FAIL", "COMPLETE", "RUNNING"]

    def test_a_trial_that_reports_it_late_is_not_said_to_lack_it(self, tmp_path: Path) -> None:
        folder = make(tmp_path)
        part = worker(folder, 0)
        begin(part)
        part.report(1, {"loss": 0.5})
        part.report(2, {"loss": 0.5, "score": 0.5})
        assert records.read_state(folder.of_task(0)).reason == ""

    def test_a_report_without_it_is_none_to_the_pruner(self, tmp_path: Path) -> None:
        folder = make(tmp_path, pruner={"name": "median", "startup_trials": 1})
        part = worker(folder, 0)
        for score in (0.5, 0.1):
            begin(part)
            found = [part.report(at, {"score": score} if at % 3 == 0 else {"loss": 1.0}) for at in range(1, 7)]
            assert found == ([None] * 6 if score == 0.5 else [None, None, WORSE, None, None, WORSE])
            part.complete({}, {}, step=1, progress=6)
        assert [trial.intermediate_values for trial in study_of(folder).trials] == [{3: 0.5, 6: 0.5}, {3: 0.1, 6: 0.1}]

    def test_one_that_was_stopped_after_its_last_epoch_has_the_value_that_it_reported(self, tmp_path: Path) -> None:
        """What a loop without epochs computes still has its first value."""
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
    def test_no_number_ends_that_trial_alone(self, tmp_path: Path, value: float) -> None:
        folder = make(tmp_path)
        part = worker(folder, 0)
        begin(part)
        assert part.report(1, {"score": value}) == f"score is {value}"
        part.prune(f"score is {value}", 1)
        begin(part)
        part.complete({"score": value}, {}, step=1, progress=1)
        begin(part)
        finish(part, 1.0)
        begin(part)
        assert states(folder) == ["PRUNED", "PRUNED", "COMPLETE", "RUNNING"]
        told = summary.summarize(study_of(folder), sweep_of(folder)).recent
        assert [trial.reason for trial in told[:2]] == [f"score is {value}"] * 2


def test_the_pruner_hears_each_progress_once_and_its_word_is_the_end(tmp_path: Path) -> None:
    folder = make(tmp_path, pruner={"name": "median", "startup_trials": 1})
    part = worker(folder, 0)
    begin(part)
    assert [part.report(progress, {"score": 1.0}) for progress in (1, 2)] == [None, None]
    finish(part, 1.0)
    begin(part)
    assert part.report(1, {"score": 0.1}) == WORSE
    part.prune(WORSE, 1)
    assert states(folder)[:2] == ["COMPLETE", "PRUNED"]
    assert study_of(folder).trials[1].value == 0.1
    assert files.read_json(folder.of_trial(1).result)["state"] == "PRUNED"


class TestAskedToLeave:
    @pytest.mark.parametrize(
        ("stop", "code"),
        [(Stop.END, TERMINATED_EXIT_CODE), (Stop.REQUEUE, REQUEUE_EXIT_CODE), (Stop.LEAVE, REQUEUE_EXIT_CODE)],
    )
    def test_no_trial_is_begun_then(self, tmp_path: Path, stop: Stop, code: int) -> None:
        folder = make(tmp_path)
        order = worker(folder, 0).next(stop)
        assert isinstance(order, Leave)
        assert order.exit_code == code
        assert states(folder) == []

    def test_it_shows_no_trial_any_more(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=3)
        part, other = worker(folder, 0), worker(folder, 1)
        begin(part)
        finish(part, 0.5)
        part.next(Stop.REQUEUE)
        begin(other)
        other.give_back(is_late=False, has_saved=False)
        assert [records.read_state(folder.of_task(task)).trial for task in (0, 1)] == [None, None]

    def test_the_trial_goes_on_first_with_its_number_values_and_curve(self, tmp_path: Path) -> None:
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
        assert studies.LOSSES not in study_of(folder).trials[0].system_attrs

    def test_one_that_never_fits_into_the_time_fails(self, tmp_path: Path) -> None:
        folder = make(tmp_path, max_retries=1, trials=1)
        for attempt in (1, 2):
            part = worker(folder, 0, attempt)
            begin(part)
            part.give_back(is_late=True, has_saved=False)
        assert states(folder) == ["FAIL"]
        assert "no checkpoint within a worker's whole time" in files.read_json(folder.of_trial(0).failure)["message"]

    @pytest.mark.parametrize(("is_late", "has_saved"), [(False, False), (True, True)])
    def test_one_that_was_cut_short_or_has_come_further_is_not(
        self, tmp_path: Path, is_late: bool, has_saved: bool
    ) -> None:
        folder = make(tmp_path, max_retries=0, trials=1)
        part = worker(folder, 0)
        begin(part)
        part.give_back(is_late=is_late, has_saved=has_saved)
        assert states(folder) == ["WAITING"]

    def test_one_that_had_only_the_rest_of_the_time_is_not(self, tmp_path: Path) -> None:
        folder = make(tmp_path, max_retries=0, trials=2)
        part = worker(folder, 0)
        begin(part)
        finish(part, 0.5)
        begin(part)
        part.give_back(is_late=True, has_saved=False)
        assert states(folder) == ["COMPLETE", "WAITING"]


class TestBudgets:
    def test_a_target_that_is_reached_lets_what_runs_end_and_starts_nothing(self, tmp_path: Path) -> None:
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

    def test_one_that_was_given_back_comes_to_its_end_all_the_same(self, tmp_path: Path) -> None:
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

    def test_one_that_is_raised_meanwhile_is_seen_before_the_next_trial(self, tmp_path: Path) -> None:
        folder = make(tmp_path, budget={"patience": 2})
        part = worker(folder, 0)
        for _ in range(2):
            begin(part)
            finish(part, 0.5)
        make_text = folder.sweep.read_text().replace("patience: 2", "patience: 3")
        files.write_whole(folder.sweep, make_text)
        begin(part)
        assert sweep_of(folder).budget.patience == 3


class TestDeaths:
    def test_a_dead_workers_trial_is_found_where_nothing_else_is_left(self, tmp_path: Path) -> None:
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

    def test_it_is_found_also_where_somebody_has_just_looked_and_nobody_stays(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=2)
        dying, other = worker(folder, 0), worker(folder, 1)
        begin(dying)
        begin(other)
        finish(other, 0.5)
        # a moment before it died
        assert recovery.look(study_of(folder), folder, sweep_of(folder), quiet, every=0.0) == []
        kill(folder, 0)
        assert begin(other).number == 0

    def test_who_was_taken_for_dead_does_not_speak_for_its_trial_any_more(self, tmp_path: Path) -> None:
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

    def test_its_next_attempt_sees_to_the_trial_of_the_one_before(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=2)
        begin(worker(folder, 0))
        records.record_event(
            folder.of_task(0), "ended", attempt=1, trial=0, error="ValueError", message="boom\nand more"
        )
        again = worker(folder, 0, attempt=2)
        again.settle()
        assert states(folder) == ["FAIL"]
        assert study_of(folder).trials[0].system_attrs[studies.REASON] == "ValueError: boom"

    def test_what_it_only_wanted_is_not_its_to_see_to(self, tmp_path: Path) -> None:
        """A worker says that it may have a trial before it takes it; it can die when somebody else was faster."""
        folder = make(tmp_path, trials=2)
        worker(folder, 0)
        other = worker(folder, 1)
        mine = begin(other)
        study = study_of(folder)
        wanted = studies.Worker(0, 1).claim
        study._storage.set_trial_system_attr(study.trials[mine.number]._trial_id, wanted, 1)
        worker(folder, 0, attempt=2).settle()
        assert other.report(1, {"score": 0.5}) is None
        finish(other, 0.5)
        assert study_of(folder).trials[mine.number].state.name == "COMPLETE"


class TestAStudyThatIsRestoredFromAnOlderCopy:
    """It gives numbers again whose folders are there."""

    def test_a_new_trial_does_not_continue_from_anothers_checkpoint(self, tmp_path: Path) -> None:
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

    def test_nor_does_one_that_was_given_back(self, tmp_path: Path) -> None:
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

    def test_one_of_before_that_has_no_record_continues(self, tmp_path: Path) -> None:
        folder = make(tmp_path)
        part = worker(folder, 0)
        before = begin(part)
        part.give_back(is_late=False, has_saved=True)
        folder.of_trial(0).parameters.unlink()
        again = begin(part)
        assert (again.attempt, again.values, folder.set_aside.exists()) == (2, before.values, False)


class TestADiskThatIsFull:
    def test_nothing_is_lost_once_it_has_room_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
