"""Trials with several seeds, on a real journal: which seed is trained next, and what counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core.files import append_jsonl, read_json
from mgpu_slurm.metrics.report_socket import CONTINUE, PAUSE, Verdict
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.sweep_records import SweepOver
from mgpu_slurm.sweeps import optuna_adapter
from mgpu_slurm.sweeps.client.messages import Assignment, Leave, Superseded
from mgpu_slurm.sweeps.client.study_client import StudyClient
from mgpu_slurm.sweeps.study import trial_queue
from mgpu_slurm.sweeps.study.snapshots import UNTIL, until_of
from tests.metrics.test_event_writer import points
from tests.sweeps.sweeps import begin, kill, leave, make, states, study_of, worker

ASHA = {"name": "asha", "min_resource": 1, "max_resource": 9, "reduction_factor": 3}
HYPERBAND = {"name": "hyperband", "min_resource": 1, "max_resource": 3}


def make_seeded(base: Path, **values: Any) -> RunFolder:
    return make(base, **{"seeds": 3, "sampler": {"name": "random", "seed": 1}, "trials": 9} | values)


def report(part: StudyClient, folder: RunFolder, order: Assignment, progress: int, score: float) -> Verdict:
    """Report as the run of a seed does, whose metrics are in its folder."""
    assert order.seed is not None
    run = folder.of_trial(order.number).of_seed(order.seed)
    # a job that takes no optimizer step
    append_jsonl(run.metrics, {"progress": progress, "step": 0, "metrics": {"score": score}})
    return part.report(progress, {"score": score})


def train_to(part: StudyClient, folder: RunFolder, progress: int, *scores: float) -> int:
    """Train the seeds that are next to a rung, with these values there, and return the number of their trial."""
    numbers = set()
    for score in scores:
        order = begin(part)
        numbers.add(order.number)
        assert report(part, folder, order, progress, score) == PAUSE
        part.pause(progress)
    (number,) = numbers
    return number


def test_each_seed_is_trained_to_the_rung_and_their_mean_counts(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path, pruner=ASHA, fixed={"seed": 7})
    part = worker(folder, 0)
    orders = []
    for score in (0.1, 0.2, 0.6):
        order = begin(part)
        orders.append(order)
        assert study_of(folder).trials[0].intermediate_values == {}
        assert report(part, folder, order, 1, score) == PAUSE
        part.pause(1)
    assert [(order.number, order.attempt, order.seed, order.values["seed"]) for order in orders] == [
        (0, 1, 7, 7), (0, 1, 8, 8), (0, 1, 9, 9),
    ]  # fmt: skip
    # the next call judges it, and takes another trial
    assert begin(part).number == 1
    trial = study_of(folder).trials[0]
    assert trial.intermediate_values == {1: pytest.approx(0.3)}
    assert trial.state.name == "WAITING"
    (curve,) = [json.loads(line) for line in folder.of_trial(0).metrics.read_text().splitlines()]
    assert (curve["progress"], curve["metrics"]) == (1, {"score": pytest.approx(0.3)})


def test_promoted_trial_continues_each_of_its_seeds(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path, pruner=ASHA)
    part = worker(folder, 0)
    train_to(part, folder, 1, 0.5, 0.5, 0.5)
    train_to(part, folder, 1, 0.1, 0.1, 0.1)
    train_to(part, folder, 1, 0.2, 0.2, 0.2)
    order = begin(part)
    assert (order.number, order.seed, order.attempt) == (0, 0, 2)
    assert report(part, folder, order, 2, 0.6) == CONTINUE
    assert report(part, folder, order, 3, 0.7) == PAUSE
    part.pause(3)
    assert train_to(part, folder, 3, 0.7, 0.7) == 0
    part.next(Stop.NO)
    assert study_of(folder).trials[0].intermediate_values == {1: 0.5, 3: pytest.approx(0.7)}
    assert study_of(folder).trials[0].system_attrs[UNTIL] == 1
    # the means are one curve, though each rung has an event file of its own
    assert points(folder.of_trial(0).tensorboard)["score"] == [(1, 0.5), (3, pytest.approx(0.7))]


def test_first_value_at_the_rung_counts_even_if_the_pause_comes_later(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path, pruner=ASHA, seeds=2)
    part = worker(folder, 0)
    order = begin(part)
    for progress, score in ((1, 0.2), (2, 0.9)):
        # there was no place to pause after the first report
        assert report(part, folder, order, progress, score) == PAUSE
    part.pause(2)
    train_to(part, folder, 1, 0.4)
    begin(part)
    assert study_of(folder).trials[0].intermediate_values == {1: pytest.approx(0.3)}


def test_reports_without_the_metric_do_not_count(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path, pruner=ASHA, seeds=2, constraints={"gib": "<= 9"})
    part = worker(folder, 0)
    for score in (0.2, 0.4):
        order = begin(part)
        assert order.seed is not None
        run = folder.of_trial(0).of_seed(order.seed)
        for progress, metrics in ((1, {"gib": 3.0}), (2, {"score": score})):
            append_jsonl(run.metrics, {"progress": progress, "metrics": metrics})
            assert part.report(progress, metrics) == (PAUSE if progress == 2 else CONTINUE)
        part.pause(2)
    begin(part)
    (trial, _) = study_of(folder).trials
    assert (trial.intermediate_values, trial.constraints) == ({1: pytest.approx(0.3)}, {"gib": -6.0})


def test_runs_that_end_before_the_rung_complete_the_trial(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path, pruner=ASHA | {"min_resource": 3}, seeds=2, trials=1)
    part = worker(folder, 0)
    for score in (0.2, 0.4):
        report(part, folder, begin(part), 1, 0.0)
        part.complete({"score": score}, {}, step=1, progress=1)
    assert isinstance(part.next(Stop.NO), Leave)
    (trial,) = study_of(folder).trials
    assert (trial.state.name, trial.value) == ("COMPLETE", pytest.approx(0.3))


def test_one_run_that_ends_before_the_rung_counts_with_its_result(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path, pruner=ASHA | {"min_resource": 3}, seeds=2, trials=3)
    part = worker(folder, 0)
    report(part, folder, begin(part), 1, 0.0)
    part.complete({"score": 0.2}, {}, step=1, progress=1)
    train_to(part, folder, 3, 0.4)
    assert begin(part).number == 1
    assert study_of(folder).trials[0].intermediate_values == {3: pytest.approx(0.3)}


def test_superseded_worker_does_not_begin_the_next_seed(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path, pruner=ASHA, trials=1)
    first, other = worker(folder, 0), worker(folder, 1)
    train_to(first, folder, 1, 0.1)
    kill(folder, 0)
    assert begin(other).seed == 1
    with pytest.raises(Superseded):
        first.next(Stop.NO)
    assert records.attempts_started(folder.of_trial(0).of_seed(1)) == 1


def test_hedged_trial_has_its_values_at_the_rungs_below(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path, pruner=ASHA | {"max_resource": 27}, trials=99, seeds=2)
    part = worker(folder, 0)
    while (order := begin(part)).number != 7:
        rung = (1, 3, 9, 27)[until_of(study_of(folder).trials[order.number])]
        assert report(part, folder, order, rung, 0.1) == PAUSE
        part.pause(rung)
    for score in (0.2, 0.4):
        for progress in (1, 3, 9):
            verdict = report(part, folder, order, progress, score * progress)
        assert verdict == PAUSE
        part.pause(9)
        order = begin(part)
    assert study_of(folder).trials[7].intermediate_values == {
        progress: pytest.approx(0.3 * progress) for progress in (1, 3, 9)
    }


def test_worker_that_died_before_the_decision_is_followed_by_one_that_decides(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path, pruner=ASHA | {"pause": False}, seeds=2, trials=2)
    part = worker(folder, 0)
    train_to(part, folder, 1, 0.9, 0.9)
    for _ in range(2):
        order = begin(part)
        for progress in (3, 9):
            report(part, folder, order, progress, 0.9)
        part.complete({"score": 0.9}, {}, step=1, progress=9)
    train_to(part, folder, 1, 0.1, 0.1)
    # the mean is stored, and the worker dies
    trial = study_of(folder).trials[1]
    optuna_adapter.report(study_of(folder), trial, 1, 0.1)
    kill(folder, 0)
    assert isinstance(worker(folder, 1).next(Stop.NO), Leave)
    assert states(folder) == ["COMPLETE", "PRUNED"]


def test_worker_at_its_time_limit_has_saved_what_a_seed_has_reached(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path, max_retries=0)
    part = worker(folder, 0)
    begin(part)
    part.complete({"score": 0.5}, {}, step=1, progress=1)
    begin(part)
    part.give_back(is_late=True, has_saved=False)
    assert states(folder) == ["WAITING"]


def test_curve_of_means_has_all_points(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = make_seeded(tmp_path, pruner=HYPERBAND | {"max_resource": 9}, seeds=2, trials=1)
    part = worker(folder, 0)
    for progress in (1, 3):
        train_to(part, folder, progress, 0.5, 0.5)
    begin(part)
    events = EventAccumulator(str(folder.of_trial(0).tensorboard))
    events.Reload()
    assert [event.step for event in events.Scalars("score")] == [1, 3]


def test_complete_trial_has_the_means_of_what_its_seeds_return(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path, trials=1)
    part = worker(folder, 0)
    for seed, score in enumerate((0.3, 0.6, 0.9)):
        order = begin(part)
        assert (order.number, order.seed) == (0, seed)
        assert report(part, folder, order, 1, 0.0) == CONTINUE
        part.complete({"score": score}, {}, step=1, progress=1)
    assert isinstance(part.next(Stop.NO), Leave)
    assert study_of(folder).trials[0].value == pytest.approx(0.6)
    assert read_json(folder.of_trial(0).result)["value"] == pytest.approx(0.6)
    assert read_json(folder.of_trial(0).of_seed(1).result)["value"] == 0.6


def test_hyperband_prunes_by_the_mean(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path, pruner=HYPERBAND, seeds=2)
    part = worker(folder, 0)
    # the first bracket has the trials 0 and 2
    for scores in ((0.5, 0.5), (0.0, 0.0)):
        train_to(part, folder, 1, *scores)
        for score in scores:
            report(part, folder, begin(part), 3, score)
            part.complete({"score": score}, {}, step=1, progress=3)
    train_to(part, folder, 1, 0.1, 0.2)
    assert begin(part).number == 3
    assert states(folder)[:3] == ["COMPLETE", "COMPLETE", "PRUNED"]
    assert study_of(folder).trials[2].intermediate_values == {1: pytest.approx(0.15)}


def test_another_worker_continues_with_the_seeds_that_are_left(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path, pruner=ASHA, trials=1)
    first, other = worker(folder, 0), worker(folder, 1)
    train_to(first, folder, 1, 0.1)
    order = begin(first)
    assert order.seed == 1
    kill(folder, 0)
    order = begin(other)
    assert (order.number, order.seed, order.attempt) == (0, 1, 2)
    report(other, folder, order, 1, 0.2)
    other.pause(1)
    assert train_to(other, folder, 1, 0.6) == 0
    begin(other)
    assert study_of(folder).trials[0].intermediate_values == {1: pytest.approx(0.3)}


def test_worker_that_died_before_the_mean_was_stored_loses_nothing(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path, pruner=ASHA, trials=1)
    train_to(worker(folder, 0), folder, 1, 0.1, 0.2, 0.6)
    kill(folder, 0)
    other = worker(folder, 1)
    # it stores the mean; the trial pauses, and is promoted by the last call
    assert (begin(other).number, study_of(folder).trials[0].system_attrs[UNTIL]) == (0, 1)
    assert study_of(folder).trials[0].intermediate_values == {1: pytest.approx(0.3)}


def test_a_stop_between_two_seeds_gives_the_trial_back(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path, pruner=ASHA)
    part = worker(folder, 0)
    train_to(part, folder, 1, 0.1)
    assert isinstance(part.next(Stop.REQUEUE), Leave)
    assert states(folder) == ["WAITING"]
    order = begin(worker(folder, 1))
    assert (order.number, order.seed) == (0, 1)


@pytest.mark.parametrize("how", ["nan", "fails"])
def test_one_seed_that_fails_ends_the_trial(tmp_path: Path, how: str) -> None:
    folder = make_seeded(tmp_path)
    part = worker(folder, 0)
    begin(part)
    part.complete({"score": 0.5}, {}, step=1, progress=1)
    order = begin(part)
    if how == "nan":
        verdict = report(part, folder, order, 1, float("nan"))
        assert verdict == Verdict("score is nan")
        part.prune(str(verdict.prune_reason), 1)
    else:
        part.fail("ValueError: boom")
    assert states(folder) == ["PRUNED" if how == "nan" else "FAIL"]
    assert begin(part).number == 1


def test_checkpoints_of_all_seeds_are_trimmed_and_deleted(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path, pruner=ASHA, trials=3, seeds=2)
    part = worker(folder, 0)
    for score in (0.1, 0.2):
        for _ in range(2):
            order = begin(part)
            assert order.seed is not None
            run = folder.of_trial(order.number).of_seed(order.seed)
            for step in (1, 2):
                run.checkpoint(step).mkdir(parents=True)
            report(part, folder, order, 1, score)
            part.pause(1)
    begin(part)
    kept = [[path.name for path in run.checkpoints.glob("*")] for run in folder.of_trial(0).with_seeds()]
    # with three trials, one is promoted: the first has become hopeless
    assert kept == [[], [], []]
    assert states(folder) == ["PRUNED", "WAITING", "RUNNING"]
    assert [len(list(run.checkpoints.glob("*"))) for run in folder.of_trial(1).with_seeds()] == [0, 1, 1]


def test_status_tells_the_seed(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path, pruner=ASHA, fixed={"seed": 7})
    part = worker(folder, 0)
    for seed in (7, 8):
        order = begin(part)
        assert records.read_state(folder.of_task(0)).reason == f"seed {seed}"
        report(part, folder, order, 1, 0.5)
        assert records.read_state(folder.of_task(0)).reason == f"seed {seed}"
        part.pause(1)


def test_no_other_seed_is_trained_once_the_sweep_has_failed(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path)
    part = worker(folder, 0)
    order = begin(part)
    report(part, folder, order, 1, 0.5)
    part.complete({"score": 0.5}, {}, 1, 1)
    trial_queue.set_over(study_of(folder), SweepOver(reason="all trials fail", failed=True))
    assert leave(part).exit_code == 1
    assert states(folder) == ["WAITING"]
