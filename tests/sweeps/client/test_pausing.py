"""Trials that pause at a rung: which worker continues them, whatever happens, and what becomes of the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState, create_trial

from mgpu_slurm.core import files
from mgpu_slurm.metrics.report_socket import CONTINUE, PAUSE, Verdict
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.registry import sweep_state
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.sweep_records import SweepOver
from mgpu_slurm.sweeps.analysis.best_trial import best
from mgpu_slurm.sweeps.client import sweep_end
from mgpu_slurm.sweeps.client.messages import Assignment
from mgpu_slurm.sweeps.client.paused_trials import NO_ROOM, WORSE
from mgpu_slurm.sweeps.client.study_client import StudyClient
from mgpu_slurm.sweeps.study import recovery, summary
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.snapshots import ORIGIN, UNTIL
from mgpu_slurm.sweeps.worker_starts import waiting_trials
from tests.sweeps.sweeps import begin, finish, kill, leave, make, states, study_of, sweep_of, worker

ASHA = {"name": "asha", "min_resource": 1, "max_resource": 9, "reduction_factor": 3}


def make_asha(base: Path, trials: int = 9, **options: Any) -> RunFolder:
    budget = {"hours": 9}
    return make(base, sampler={"name": "random", "seed": 1}, pruner=ASHA | options, trials=trials, budget=budget)


def save(folder: RunFolder, number: int, *steps: int, size: int = 10) -> None:
    """Write checkpoints of a trial, as its job does."""
    for step in steps:
        path = folder.of_trial(number).checkpoint(step)
        path.mkdir(parents=True)
        (path / "rank-00000.tensors").write_bytes(bytes(size))


def saved(folder: RunFolder, number: int) -> list[str]:
    return sorted(path.name for path in folder.of_trial(number).checkpoints.glob("*"))


def pause(part: StudyClient, folder: RunFolder, score: float, size: int = 10) -> int:
    """Begin a trial that pauses at its first report, and return its number."""
    number = begin(part).number
    assert part.report(1, {"score": score}) == PAUSE
    save(folder, number, 1, size=size)
    part.pause(1)
    return number


def counts(folder: RunFolder) -> dict[str, int]:
    found = summary.counts(study_of(folder).trials, sweep_of(folder))
    return {state: count for state, count in found.items() if count}


def test_paused_trial_continues_under_its_number_on_any_worker(tmp_path: Path) -> None:
    folder = make_asha(tmp_path)
    first, other = worker(folder, 0), worker(folder, 1)
    assert [pause(first, folder, score) for score in (0.5, 0.4)] == [0, 1]
    assert counts(folder) == {"PAUSED": 2, "WAITING": 7}
    # the third one makes room for one promotion: of the best, which is paused
    assert pause(first, folder, 0.3) == 2
    order = begin(other)
    assert (order.number, order.attempt) == (0, 2)
    assert study_of(folder).trials[0].system_attrs[UNTIL] == 1
    assert other.report(2, {"score": 0.6}) == CONTINUE
    assert other.report(3, {"score": 0.7}) == PAUSE
    other.pause(3)
    assert counts(folder) == {"PAUSED": 3, "WAITING": 6}
    told = summary.summarize(study_of(folder), sweep_of(folder))
    assert (told.paused, told.best, told.given_back) == ({"1": 2, "3": 1}, None, 0)
    assert told.furthest is not None
    assert (told.furthest.number, told.furthest.progress, told.furthest.state) == (0, 3, "PAUSED")


def test_candidate_continues_in_place_without_a_pause(tmp_path: Path) -> None:
    folder = make_asha(tmp_path)
    part = worker(folder, 0)
    for score in (0.1, 0.2):
        pause(part, folder, score)
    number = begin(part).number
    assert part.report(1, {"score": 0.9}) == CONTINUE
    trial = study_of(folder).trials[number]
    assert (trial.state.name, trial.system_attrs[UNTIL]) == ("RUNNING", 1)


def test_sweep_ends_with_one_complete_trial_and_the_others_paused_or_pruned(tmp_path: Path) -> None:
    folder = make_asha(tmp_path, trials=3)
    part = worker(folder, 0)
    assert pause(part, folder, 0.5) == 0
    number = begin(part).number
    # with three trials one place is left, which the first has
    assert part.report(1, {"score": 0.4}) == Verdict(WORSE)
    part.prune(WORSE, 1)
    begin(part)
    assert part.report(1, {"score": 0.6}) == CONTINUE
    assert part.report(3, {"score": 0.7}) == PAUSE
    save(folder, 2, 3)
    part.pause(3)
    # the first is hopeless now
    assert states(folder) == ["PRUNED", "PRUNED", "WAITING"]
    assert (number, saved(folder, 0), saved(folder, 2)) == (1, [], ["step-000000003"])
    # the last call, as no trial is complete
    assert begin(part).number == 2
    assert part.report(9, {"score": 0.8}) == CONTINUE
    finish(part, 0.9)
    assert leave(part).exit_code == 0
    assert states(folder) == ["PRUNED", "PRUNED", "COMPLETE"]
    assert sweep_state.summary_of(folder).promotable == 0


def test_only_the_newest_checkpoint_of_a_paused_trial_is_kept(tmp_path: Path) -> None:
    folder = make_asha(tmp_path)
    part = worker(folder, 0)
    number = begin(part).number
    part.report(1, {"score": 0.5})
    save(folder, number, 1, 2, 3)
    (folder.of_trial(number).checkpoints / "best").symlink_to("step-000000002")
    part.pause(1)
    assert saved(folder, number) == ["best", "step-000000002", "step-000000003"]


def test_checkpoints_that_take_too_much_room_cost_the_least_promising_trials(tmp_path: Path) -> None:
    folder = make_asha(tmp_path, keep_gb=25e-9)
    part = worker(folder, 0)
    for score in (0.3, 0.1):
        pause(part, folder, score)
    assert states(folder) == ["WAITING", "WAITING"]
    pause(part, folder, 0.2)
    # the first is to be promoted
    assert states(folder) == ["WAITING", "PRUNED", "WAITING"]
    assert json.loads(folder.of_trial(1).result.read_text())["reason"] == NO_ROOM
    assert [saved(folder, number) for number in range(3)] == [["step-000000001"], [], ["step-000000001"]]


def test_running_trials_and_candidates_are_kept_even_if_they_take_too_much_room(tmp_path: Path) -> None:
    folder = make_asha(tmp_path, keep_gb=15e-9)
    part, other = worker(folder, 0), worker(folder, 1)
    running = begin(other).number
    other.report(1, {"score": 0.5})
    save(folder, running, 1)
    for score in (0.9, 0.1):
        pause(part, folder, score)
    assert states(folder) == ["RUNNING", "WAITING", "PRUNED"]
    assert begin(part).number == 1


@pytest.mark.parametrize("how", ["given back", "killed", "killed after its report"])
def test_trial_that_its_worker_loses_at_a_rung_is_paused_there(tmp_path: Path, how: str) -> None:
    """Its reports say where it is, whoever writes that it waits."""
    folder = make_asha(tmp_path)
    part = worker(folder, 0)
    number = begin(part).number
    assert part.report(1, {"score": 0.5}) == PAUSE
    if how == "given back":
        part.give_back(is_late=False, has_saved=True)
    else:
        kill(folder, 0)
        assert recovery.recover(study_of(folder), folder, sweep_of(folder)) == [number]
    assert counts(folder) == {"PAUSED": 1, "WAITING": 8}
    other = worker(folder, 1)
    assert [pause(other, folder, score) for score in (0.4, 0.3)] == [1, 2]
    order = begin(other)
    assert order.number == number
    # a checkpoint may be older than the report, which is repeated and counts once
    assert other.report(1, {"score": 0.1}) == CONTINUE
    assert study_of(folder).trials[number].intermediate_values == {1: 0.5}
    assert other.report(3, {"score": 0.6}) == PAUSE


def test_promoted_trial_whose_worker_dies_is_continued_by_the_next(tmp_path: Path) -> None:
    folder = make_asha(tmp_path)
    first, other = worker(folder, 0), worker(folder, 1)
    for score in (0.5, 0.4, 0.3):
        pause(first, folder, score)
    assert begin(first).number == 0
    kill(folder, 0)
    recovery.recover(study_of(folder), folder, sweep_of(folder))
    told = summary.summarize(study_of(folder), sweep_of(folder))
    assert (told.given_back, told.paused) == (1, {"1": 2})
    assert begin(other).number == 0
    assert study_of(folder).trials[0].system_attrs[UNTIL] == 1


def test_reports_that_skip_a_rung_count_with_the_next_one(tmp_path: Path) -> None:
    folder = make_asha(tmp_path)
    part = worker(folder, 0)
    begin(part)
    assert part.report(2, {"score": 0.5}) == PAUSE


def test_nan_prunes_instead_of_pausing(tmp_path: Path) -> None:
    folder = make_asha(tmp_path)
    part = worker(folder, 0)
    begin(part)
    assert part.report(1, {"score": float("nan")}) == Verdict("score is nan")


def test_hedged_trial_is_first_compared_at_the_third_rung(tmp_path: Path) -> None:
    folder = make_asha(tmp_path, trials=100, max_resource=27)
    part = worker(folder, 0)
    while begin(part).number != 7:
        _train(part, 0.5)
    assert study_of(folder).trials[7].system_attrs[UNTIL] == 2
    assert [part.report(at, {"score": -9.0}) for at in (1, 3, 9)] == [CONTINUE, CONTINUE, PAUSE]


def test_spent_budget_promotes_only_until_one_trial_is_complete(tmp_path: Path) -> None:
    folder = make_asha(tmp_path)
    part = worker(folder, 0)
    for score in (0.5, 0.4, 0.3):
        pause(part, folder, score)
    studies.set_over(study_of(folder), SweepOver(reason="9 of 9 hours are over"))
    # a trial would be promoted and another begin, were the budget not spent
    assert begin(part).number == 0
    assert part.report(3, {"score": 0.6}) == PAUSE
    part.pause(3)
    assert begin(part).number == 0
    part.report(9, {"score": 0.7})
    finish(part, 0.7)
    assert "hours are over" in leave(part).reason
    assert counts(folder) == {"COMPLETE": 1, "PAUSED": 2, "WAITING": 6}
    assert sweep_state.overall([], sweep_state.summary_of(folder)) == "COMPLETED"


def test_ended_sweep_can_go_on_with_its_paused_trials(tmp_path: Path) -> None:
    folder = make_asha(tmp_path, trials=4)
    part = worker(folder, 0)
    ran = _train_all(part)
    assert leave(part)
    assert counts(folder)["COMPLETE"] == 1
    assert waiting_trials(study_of(folder), sweep_of(folder), is_over=False) == 0
    files.write_whole(folder.sweep, folder.sweep.read_text().replace("trials: 4", "trials: 12"))
    assert waiting_trials(study_of(folder), sweep_of(folder), is_over=False) == 8
    again = worker(folder, 0, attempt=2)
    more = _train_all(again)
    assert max(more) == 11
    assert set(ran) <= set(range(4))
    assert "RUNNING" not in counts(folder)


def _train_all(part: StudyClient) -> list[int]:
    """Train all that there is to do; return the trials in their order."""
    ran = []
    while isinstance(order := part.next(Stop.NO), Assignment):
        ran.append(order.number)
        _train(part, float(str(order.values["x"])))
    return ran


def _train(part: StudyClient, score: float) -> None:
    last = part._running().frozen().intermediate_values
    for progress in range(max(last, default=0) + 1, 10):
        verdict = part.report(progress, {"score": score})
        if verdict == PAUSE:
            part.pause(progress)
            return
        if verdict != CONTINUE:
            part.prune(str(verdict.prune_reason), progress)
            return
    part.complete({"score": score}, {}, step=9, progress=9)


def test_best_is_the_furthest_paused_trial_until_one_is_complete(tmp_path: Path) -> None:
    folder = make_asha(tmp_path)
    part = worker(folder, 0)
    pause(part, folder, 0.5)
    part._shared.write_summary()
    found = best(folder)
    assert (found.number, found.value, found.state) == (0, 0.5, "at progress 1 of 9, paused")
    assert found.lines()[0] == "best      score 0.5, trial 0 of study s, at progress 1 of 9, paused"


@pytest.mark.parametrize("workers", [1, 2])
def test_sweep_ends_when_all_points_have_been_tried(tmp_path: Path, workers: int) -> None:
    folder = make(tmp_path, sampler={"name": "tpe", "seed": 1}, trials=20, space={"x": {"int": [1, 6]}})
    parts = [worker(folder, number) for number in range(workers)]
    points = []
    for number in range(6):
        order = begin(parts[number % workers])
        points.append(order.values["x"])
        finish(parts[number % workers], 0.5)
    assert sorted(map(str, points)) == list("123456")
    assert leave(parts[0]).reason == "all points of the space have been tried"
    over = summary.summarize(study_of(folder), sweep_of(folder)).over
    assert over is not None
    assert not over.failed


def test_workers_that_begin_at_once_draw_different_points(tmp_path: Path) -> None:
    folder = make(tmp_path, sampler={"name": "tpe", "seed": 1}, trials=8, space={"x": {"int": [1, 8]}}, workers=8)
    parts = [worker(folder, number) for number in range(8)]
    orders = [begin(part) for part in parts]
    assert sorted(int(str(order.values["x"])) for order in orders) == list(range(1, 9))


def test_raised_budget_continues_with_paused_trials(tmp_path: Path) -> None:
    folder = make_asha(tmp_path)
    part = worker(folder, 0)
    for score in (0.5, 0.4, 0.3):
        pause(part, folder, score)
    study, file = study_of(folder), sweep_of(folder)
    studies.set_over(study, SweepOver(reason="9 of 9 hours are over"))
    # six have not begun, and one would be promoted; while the budget is spent, only by the last call
    assert waiting_trials(study, file, is_over=False) == 7
    assert summary.promotable(study, file, is_over=True) == 1


def test_two_workers_never_promote_the_same_trial(tmp_path: Path) -> None:
    """Another worker looks for a trial at each write of a promotion."""
    folder = make_asha(tmp_path)
    part, other = worker(folder, 0), worker(folder, 1)
    for score in (0.5, 0.4, 0.3):
        pause(part, folder, score)
    study, file = study_of(folder), sweep_of(folder)
    seen: list[bool] = []
    storage: Any = part._shared.study._storage
    for name in ("set_trial_system_attr", "set_trial_state_values"):
        write = getattr(storage, name)

        def watched(*given: Any, write: Any = write) -> Any:
            done = write(*given)
            seen.append(any(studies.was_given_back(trial, file) for trial in study.get_trials(deepcopy=False)))
            return done

        setattr(storage, name, watched)
    assert begin(part).number == 0
    assert seen
    assert not any(seen)
    assert begin(other).number == 3


def test_enqueued_points_come_after_the_trials_of_an_earlier_study(tmp_path: Path) -> None:
    folder = make_asha(tmp_path, trials=9)
    files.write_whole(folder.sweep, folder.sweep.read_text() + "enqueue: [{x: 0.25}]\n")
    folder.journal.unlink()
    known = [create_trial(value=1.0, params={}, system_attrs={ORIGIN: "before"}) for _ in range(3)]
    study = studies.create(sweep_of(folder), folder.journal, known)
    part = worker(folder, 0)
    order = begin(part)
    assert (order.number, order.values) == (3, {"x": 0.25})
    assert studies.own_number(study, study.trials[3]) == 0
    assert part.report(1, {"score": 0.5}) == PAUSE


def test_trial_that_the_last_call_needs_is_not_pruned(tmp_path: Path) -> None:
    """The only place is taken by a trial that fails later."""
    folder = make_asha(tmp_path, trials=3)
    part = worker(folder, 0)
    for score in (0.5, 0.4):
        number = begin(part).number
        verdict = part.report(1, {"score": score})
        part.pause(1) if verdict == PAUSE else part.prune(WORSE, 1)
    assert begin(part).number == 2
    assert part.report(1, {"score": 0.9}) == CONTINUE
    part.fail("ValueError: boom")
    assert number == 1
    # the first one is left, and is trained to the end
    assert begin(part).number == 0
    assert part.report(3, {"score": 0.6}) == PAUSE
    part.pause(3)
    assert begin(part).number == 0
    assert part.report(9, {"score": 0.7}) == CONTINUE
    finish(part, 0.7)
    assert leave(part).exit_code == 0


def test_checkpoint_of_the_only_paused_trial_is_kept_whatever_its_size(tmp_path: Path) -> None:
    folder = make_asha(tmp_path, keep_gb=1e-9)
    pause(worker(folder, 0), folder, 0.5)
    assert (states(folder), saved(folder, 0)) == (["WAITING"], ["step-000000001"])


def test_trial_that_failed_at_its_rung_on_a_doubtful_node_is_tried_elsewhere(tmp_path: Path) -> None:
    folder = make_asha(tmp_path)
    part, other = worker(folder, 0), worker(folder, 1)
    number = begin(part).number
    assert part.report(1, {"score": 0.5}) == PAUSE
    own = part._running()
    own.doubt("OSError: no GPU")
    part._ended()
    assert counts(folder) == {"WAITING": 9}
    assert begin(other).number == number
    assert other.report(2, {"score": 0.6}) == PAUSE
    other.pause(2)
    assert counts(folder)["PAUSED"] == 1


def test_trial_that_has_passed_its_next_rung_already_is_decided_at_its_first_report(tmp_path: Path) -> None:
    """There was no place where it could be saved before."""
    folder = make_asha(tmp_path)
    part = worker(folder, 0)
    begin(part)
    assert [part.report(at, {"score": 0.5}) for at in (1, 2, 3, 4)] == [PAUSE] * 4
    part.pause(4)
    for score in (0.4, 0.3):
        pause(part, folder, score)
    assert begin(part).number == 0
    assert part.report(5, {"score": 0.5}) == PAUSE


def test_patience_counts_complete_trials_only(tmp_path: Path) -> None:
    folder = make_asha(tmp_path, trials=9)
    study, file = study_of(folder), sweep_of(folder)
    for _ in range(5):
        study.add_trial(create_trial(state=TrialState.PRUNED, value=0.1))
    assert sweep_end.since_best(study.trials, file) == 0
    for value in (0.5, 0.4):
        study.add_trial(create_trial(value=value))
    assert sweep_end.since_best(study.trials, file) == 1


def test_nan_keeps_its_checkpoints(tmp_path: Path) -> None:
    folder = make_asha(tmp_path)
    part = worker(folder, 0)
    begin(part)
    save(folder, 0, 1)
    part.report(1, {"score": float("nan")})
    part.prune("score is nan", 1)
    assert saved(folder, 0) == ["step-000000001"]
