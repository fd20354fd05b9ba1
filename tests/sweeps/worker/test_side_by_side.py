"""What each process of a worker that trains several trials at the same time has of its node, and what it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.run_folder import records
from mgpu_slurm.sweeps.client import left_trials
from mgpu_slurm.sweeps.study import claims as claiming
from mgpu_slurm.sweeps.study.recovery import Death
from mgpu_slurm.sweeps.worker.side_by_side import share_of_cores, variables
from tests.sweeps.sweeps import begin, finish, leave, make, study_of, worker


@pytest.mark.parametrize(
    ("count", "shares"),
    [
        (2, [[3, 4, 5, 6], [8, 9, 10, 11]]),
        (3, [[3, 4], [5, 6, 8], [9, 10, 11]]),
        (8, [[3], [4], [5], [6], [8], [9], [10], [11]]),
        (10, [[3], [4], [5], [6], [8], [9], [10], [11], [3], [4]]),
    ],
)
def test_cores_are_divided(count: int, shares: list[list[int]]) -> None:
    cores = [3, 4, 5, 6, 8, 9, 10, 11]
    assert [share_of_cores(index, count, cores) for index in range(count)] == shares


@pytest.mark.parametrize(
    ("gpus", "visible", "count", "devices", "share"),
    [
        (1, "5", 4, ["5", "5", "5", "5"], "0.25"),
        (2, "GPU-a,GPU-b", 4, ["GPU-a", "GPU-b", "GPU-a", "GPU-b"], "0.5"),
        (4, None, 4, ["0", "1", "2", "3"], "1"),
        (1, "MIG-1", 3, ["MIG-1", "MIG-1", "MIG-1"], "0.3333"),
    ],
)
def test_gpus_and_their_memory_are_divided(
    gpus: int, visible: str | None, count: int, devices: list[str], share: str
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = [variables(number, count, 1, gpus, environ) for number in range(1, count + 1)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == devices
    assert {each["MGPU_GPU_SHARE"] for each in found} == {share}


def test_gpus_of_amd_are_divided_by_their_place_among_the_visible_ones() -> None:
    environ = {"ROCR_VISIBLE_DEVICES": "4,6"}
    found = [variables(number, 2, 1, 2, environ) for number in (1, 2)]
    assert [(each["ROCR_VISIBLE_DEVICES"], each["HIP_VISIBLE_DEVICES"]) for each in found] == [
        ("4,6", "0"),
        ("4,6", "1"),
    ]


def test_process_has_as_many_threads_as_cores() -> None:
    assert variables(1, 2, 4, None, {"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "4"
    # a part of what the worker may use, which may be less than its cores
    assert variables(1, 2, 4, None, {"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "2"
    assert variables(1, 2, 4, None, {})["OMP_NUM_THREADS"] == "4"
    assert variables(1, 2, 4, None, {"OMP_NUM_THREADS": "1"})["OMP_NUM_THREADS"] == "1"
    # by which a rank under SLURM counts them
    assert variables(1, 2, 4, None, {"SLURM_CPUS_PER_TASK": "8"})["SLURM_CPUS_PER_TASK"] == "4"
    # without GPUs none are hidden
    assert "CUDA_VISIBLE_DEVICES" not in variables(1, 2, 4, None, {})


DEATH = Death("its process was killed by SIGKILL")


def test_trial_of_a_dead_process_is_queued_again(tmp_path: Path) -> None:
    folder = make(tmp_path, trials=4)
    number = begin(worker(folder, 0, process=1)).number
    other = worker(folder, 0, process=2)
    kept = begin(other).number
    left_trials.note_death(folder.of_task(0), 1, 1, DEATH)
    again = worker(folder, 0, process=3)
    again.settle()
    # the trial of the other process is not touched
    assert [study_of(folder).trials[each].state.name for each in (number, kept)] == ["WAITING", "RUNNING"]
    order = begin(again)
    assert (order.number, order.attempt) == (number, 2)
    assert other.report(1, {"score": 0.5}).prune_reason is None


def test_idle_process_continues_the_trial_of_one_that_is_not_replaced(tmp_path: Path) -> None:
    folder = make(tmp_path, trials=1)
    number = begin(worker(folder, 0, process=1)).number
    other = worker(folder, 0, process=2)
    assert other.next(Stop.NO) is None
    left_trials.note_death(folder.of_task(0), 1, 1, DEATH)
    order = begin(other)
    assert (order.number, order.attempt) == (number, 2)


def test_trial_in_the_confirmation_is_found_too(tmp_path: Path) -> None:
    folder = make(tmp_path, trials=1, confirm={"top": 1, "seeds": 2})
    part = worker(folder, 0, process=1)
    begin(part)
    finish(part, 0.5)
    assert begin(part).study == "s-confirm"
    left_trials.note_death(folder.of_task(0), 1, 1, DEATH)
    order = begin(worker(folder, 0, process=2))
    assert (order.study, order.number) == ("s-confirm", 0)


def test_trial_that_another_process_has_continued_is_not_taken_away(tmp_path: Path) -> None:
    folder = make(tmp_path, trials=4)
    first = worker(folder, 0, process=1)
    number = begin(first).number
    first.give_back(is_late=False, has_saved=True)
    other = worker(folder, 0, process=2)
    assert begin(other).number == number
    left_trials.note_death(folder.of_task(0), 1, 1, DEATH)
    worker(folder, 0, process=3).settle()
    assert study_of(folder).trials[number].state.name == "RUNNING"


def test_process_that_dies_while_another_takes_its_trial_does_not_disturb_it(tmp_path: Path) -> None:
    folder = make(tmp_path, trials=4)
    other = worker(folder, 0, process=2)
    number = begin(other).number
    study = study_of(folder)
    # it had written its claim, and did not learn any more that the other one was faster
    study._storage.set_trial_system_attr(study.trials[0]._trial_id, claiming.Worker(0, 1, process=1).claim, 1)
    left_trials.note_death(folder.of_task(0), 1, 1, DEATH)
    worker(folder, 0, process=3).settle()
    assert study_of(folder).trials[number].state.name == "RUNNING"
    assert other.report(1, {"score": 0.5}).prune_reason is None


def test_process_that_was_slower_leaves_the_claim_of_the_other(tmp_path: Path) -> None:
    folder = make(tmp_path, trials=4)
    study = study_of(folder)
    begin(worker(folder, 0, process=1))
    assert not claiming.claim(study, claiming.Worker(0, 1, process=2), study.trials[0])
    assert claiming.Worker(0, 1, process=1).has(study.trials[0])
    assert claiming.claims(study.trials[0]) == {0: 1}


def test_processes_draw_different_values(tmp_path: Path) -> None:
    folder = make(tmp_path, trials=4, sampler={"name": "random", "seed": 1})
    drawn = {begin(worker(folder, 0, process=process)).values["x"] for process in (1, 2, 3)}
    assert len(drawn) == 3


def test_process_without_a_trial_waits_for_the_others(tmp_path: Path) -> None:
    folder = make(tmp_path, trials=1)
    first, other = worker(folder, 0, process=1), worker(folder, 0, process=2)
    begin(first)
    assert other.next(Stop.NO) is None
    first.report(1, {"score": 0.5})
    first.complete({"score": 0.5}, {"score": 0.5}, 1, 1)
    for each in (other, first):
        leave(each)
        assert each.ended == 1


def test_state_shows_the_trial_of_each_process(tmp_path: Path) -> None:
    folder = make(tmp_path, trials=4)
    for process in (1, 2):
        part = worker(folder, 0, process=process)
        begin(part)
        part.report(process, {"score": process / 10})
    state = records.read_state(folder.of_task(0))
    shown = [(each.trial, each.progress, each.metrics) for each in state.by_process()]
    assert shown == [(0, 1, {"score": 0.1}), (1, 2, {"score": 0.2})]
