"""Trials of dead workers: who is asked, what becomes of them, and that it happens once."""

from __future__ import annotations

import multiprocessing
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mgpu_slurm.core import files
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.study import claims as claiming
from mgpu_slurm.sweeps.study import recovery
from tests.sweeps.sweeps import begin, kill, make, states, study_of, sweep_of, worker

FORK = multiprocessing.get_context("fork")


def recover(folder: RunFolder, max_retries: int = 2) -> list[int]:
    return recovery.recover(study_of(folder), folder, replace(sweep_of(folder), max_retries=max_retries))


def recovered_by_another(folder: RunFolder) -> list[int]:
    return recover(folder)


def lost(folder: RunFolder, number: int) -> list[str]:
    return [event.reason for event in records.events(folder.of_trial(number)) if event.event == "lost"]


def losses(folder: RunFolder, number: int) -> int:
    return len(study_of(folder).trials[number].system_attrs.get(claiming.LOSSES, []))


def test_live_worker_keeps_its_trial(tmp_path: Path) -> None:
    folder = make(tmp_path)
    begin(worker(folder, 0))
    assert recover(folder) == []
    # what is read of a worker may be older than what it has done since
    records.update_state(folder.of_task(0), attempts=0)
    assert recover(folder) == []
    assert states(folder)[0] == "RUNNING"


def test_trial_of_a_vanished_worker_waits_again(tmp_path: Path) -> None:
    folder = make(tmp_path)
    begin(worker(folder, 0))
    kill(folder, 0)
    assert recover(folder) == [0]
    assert recover(folder) == []
    (reason,) = lost(folder, 0)
    assert reason.startswith("worker 0 is FAILED: lost: its supervisor process is gone")
    assert reason.endswith(" (1 of 3 times)")
    assert (states(folder)[0], losses(folder, 0)) == ("WAITING", 1)
    assert claiming.claims(study_of(folder).trials[0]) == {}


def test_restarted_worker_does_not_keep_the_trial_of_its_previous_attempt(tmp_path: Path) -> None:
    folder = make(tmp_path)
    begin(worker(folder, 0))
    records.record_event(folder.of_task(0), "ended", attempt=1, trial=None, message="rank 1 was killed by SIGKILL")
    worker(folder, 0, attempt=2)
    assert recover(folder) == [0]
    assert lost(folder, 0) == ["its attempt ended: rank 1 was killed by SIGKILL (1 of 3 times)"]


def test_trial_that_failed_with_its_own_error_is_not_retried(tmp_path: Path) -> None:
    folder = make(tmp_path)
    begin(worker(folder, 0))
    facts = {"trial": 0, "error": "ValueError", "message": "boom\nand more"}
    records.record_event(folder.of_task(0), "ended", attempt=1, **facts)
    records.update_state(folder.of_task(0), state="FAILED")
    assert recover(folder) == [0]
    assert (states(folder)[0], lost(folder, 0)) == ("FAIL", [])
    assert files.read_json(folder.of_trial(0).failure)["message"] == "ValueError: boom"


def test_trial_that_kills_too_many_workers_fails(tmp_path: Path) -> None:
    folder = make(tmp_path, trials=1)
    for attempt in (1, 2):
        begin(worker(folder, 0, attempt))
        kill(folder, 0)
        assert recover(folder, max_retries=1) == [0]
    assert states(folder) == ["FAIL"]
    assert files.read_json(folder.of_trial(0).failure)["message"].endswith("(2 of 2 times)")
    # in the study without the count, so that trials which fail alike have one reason
    assert "of 2 times" not in study_of(folder).trials[0].system_attrs[claiming.REASON]


@pytest.mark.parametrize("max_retries", [0, 1])
def test_trial_of_a_dead_worker_is_recovered_without_a_folder(tmp_path: Path, max_retries: int) -> None:
    folder = make(tmp_path, trials=1)
    begin(worker(folder, 0))
    kill(folder, 0)
    # all trials' folders, as the first worker may die before there is any
    shutil.rmtree(folder.trials)
    assert recover(folder, max_retries=max_retries) == [0]
    assert states(folder) == ["WAITING" if max_retries else "FAIL"]
    assert folder.of_trial(0).failure.exists() is not bool(max_retries)
    assert len(lost(folder, 0)) == max_retries


@pytest.mark.parametrize("state", ["PENDING", "REQUEUED", "PREEMPTED", "TIMEOUT", "CANCELLED", "COMPLETED"])
def test_trial_of_a_worker_that_is_not_running_is_recovered(tmp_path: Path, state: str) -> None:
    folder = make(tmp_path)
    begin(worker(folder, 0))
    records.update_state(folder.of_task(0), state=state)
    assert recover(folder) == [0]


def test_running_trial_without_a_worker_counts_as_given_back(tmp_path: Path) -> None:
    """Its worker died while giving it back."""
    folder = make(tmp_path)
    begin(worker(folder, 0))
    study = study_of(folder)
    study._storage.set_trial_system_attr(study.trials[0]._trial_id, claiming.Worker(0, 1).claim, None)
    assert recover(folder) == [0]
    assert (states(folder)[0], losses(folder, 0), lost(folder, 0)) == ("WAITING", 0, [])


def test_interrupted_recovery_counts_the_loss_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path)
    begin(worker(folder, 0))
    kill(folder, 0)
    with monkeypatch.context() as patch:
        patch.setattr(claiming, "give_back", die)
        with pytest.raises(KeyboardInterrupt):
            recover(folder)
    assert (states(folder)[0], losses(folder, 0)) == ("RUNNING", 1)
    assert recover(folder) == [0]
    assert (states(folder)[0], losses(folder, 0)) == ("WAITING", 1)


def die(*_: object) -> None:
    raise KeyboardInterrupt


def test_concurrent_recoveries_release_the_trial_once(tmp_path: Path) -> None:
    folder = make(tmp_path, trials=3)
    first = worker(folder, 0)
    begin(first)
    kill(folder, 0)
    with FORK.Pool(4) as pool:
        found = pool.map(recovered_by_another, [folder] * 8, chunksize=1)
    assert sorted(number for numbers in found for number in numbers) == [0]
    assert (losses(folder, 0), len(lost(folder, 0))) == (1, 1)


def test_error_of_one_trial_is_not_blamed_on_another(tmp_path: Path) -> None:
    own = make(tmp_path).of_task(0)
    own.create_task()
    records.record_event(own, "ended", attempt=1, error="RuntimeError", message="CUDA error", trial=7)
    assert recovery.of_attempt(own, 1, 7) == recovery.Death("RuntimeError: CUDA error", is_trials_fault=True)
    other = recovery.of_attempt(own, 1, 8)
    assert other is not None
    assert not other.is_trials_fault
