"""When a sweep is over: by what its trials have found, and by what its workers have used."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial

from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.client import sweep_end
from tests.sweeps.sweeps import make, sweep_of

COMPLETE, PRUNED, FAIL, RUNNING = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING


def trials(*ends: tuple[TrialState, float | None]) -> list[FrozenTrial]:
    """One after the other."""
    found = []
    for number, (state, value) in enumerate(ends):
        trial = create_trial(state=state, value=value)
        trial.number = number
        if state.is_finished():
            trial.datetime_complete = datetime(2026, 1, 1) + timedelta(seconds=number)
        found.append(trial)
    return found


def why(folder: RunFolder, found: list[FrozenTrial], gpus: int = 0) -> str | None:
    sweep = sweep_of(folder)
    return sweep_end.spent(found, sweep) or sweep_end.spent_time(sweep, folder, gpus)


def worked(folder: RunFolder, worker: int, *spans: tuple[float, float | None]) -> None:
    """A worker's attempts, in hours before now."""
    own = folder.of_task(worker)
    own.create_task()
    now = datetime.now(timezone.utc)
    with own.attempts.open("a") as file:
        for begun, ended in spans:
            for event, ago in (("started", begun), ("ended", ended)):
                if ago is not None:
                    time = (now - timedelta(hours=ago)).isoformat()
                    file.write(json.dumps({"event": event, "time": time, "attempt": 1}) + "\n")


@pytest.mark.parametrize(
    ("direction", "values", "reached"),
    [
        ("maximize", [0.5, 0.8999], False),
        ("maximize", [0.9, 0.1], True),
        ("minimize", [1.5, 0.91], False),
        ("minimize", [1.5, 0.9], True),
    ],
)
def test_sweep_ends_when_a_trial_reaches_the_target(
    tmp_path: Path, direction: str, values: list[float], reached: bool
) -> None:
    folder = make(tmp_path, direction=direction, budget={"target": 0.9})
    found = why(folder, trials(*((COMPLETE, value) for value in values)))
    assert found == ("a trial has reached score 0.9" if reached else None)


def test_only_a_completed_trial_can_reach_the_target(tmp_path: Path) -> None:
    folder = make(tmp_path, budget={"target": 0.9})
    assert why(folder, trials((PRUNED, 0.95), (RUNNING, None), (FAIL, None))) is None


@pytest.mark.parametrize(
    ("ends", "since"),
    [
        ([], 0),
        ([(COMPLETE, 0.5)], 0),
        ([(COMPLETE, 0.5), (COMPLETE, 0.5)], 1),
        ([(COMPLETE, 0.5), (PRUNED, 0.9), (FAIL, None), (RUNNING, None), (COMPLETE, 0.4)], 2),
        ([(COMPLETE, 0.5), (COMPLETE, 0.4), (COMPLETE, 0.6)], 0),
        ([(PRUNED, 0.1), (PRUNED, 0.1)], 2),
    ],
)
def test_patience_counts_trials_ended_since_the_best(
    tmp_path: Path, ends: list[tuple[TrialState, float | None]], since: int
) -> None:
    folder = make(tmp_path, budget={"patience": 2})
    found = trials(*ends)
    assert sweep_end.since_best(found, sweep_of(folder)) == since
    words = "none of 2 trials was better than the best before"
    assert why(folder, found) == (words if since >= 2 else None)


def test_hours_count_from_the_first_start_and_gpu_hours_over_all_workers(tmp_path: Path) -> None:
    folder = make(tmp_path, budget={"hours": 3, "gpu_hours": 7})
    assert why(folder, [], gpus=2) is None
    worked(folder, 0, (2.0, 1.0), (0.5, None))
    worked(folder, 1, (1.5, 0.5))
    assert sweep_end.hours_since_start(folder) == pytest.approx(2.0, abs=0.01)
    assert sweep_end.worker_hours(folder) == pytest.approx(2.5, abs=0.01)
    assert why(folder, [], gpus=2) is None
    assert why(folder, [], gpus=3) == "7.50 of 7 GPU-hours are used"
    worked(folder, 1, (3.25, 3.2))
    assert why(folder, [], gpus=2) == "3.25 of 3 hours are over"


def test_worker_without_an_ended_event_counts_until_its_recorded_end(tmp_path: Path) -> None:
    folder = make(tmp_path, budget={"gpu_hours": 1})
    worked(folder, 0, (5.0, None))
    ended = (datetime.now(timezone.utc) - timedelta(hours=4)).isoformat()
    records.update_state(folder.of_task(0), state="FAILED", ended=ended)
    assert sweep_end.worker_hours(folder) == pytest.approx(1.0, abs=0.01)


def test_absent_budget_is_never_spent(tmp_path: Path) -> None:
    values: dict[str, Any] = {"trials": 3}
    assert why(make(tmp_path, **values), trials((COMPLETE, 1e9))) is None


def with_lengths(*hours: float) -> list[FrozenTrial]:
    found = trials(*[(COMPLETE, 0.5)] * len(hours))
    for trial, length in zip(found, hours, strict=True):
        trial.datetime_start = datetime(2026, 1, 1)
        trial.datetime_complete = trial.datetime_start + timedelta(hours=length)
    return found


@pytest.mark.parametrize(
    ("budget", "gpus", "seeds", "told"),
    [
        # two trials at a time, two seeds of an hour each: another two hours
        ({"hours": 4.1}, 0, 2, None),
        ({"hours": 3.9}, 0, 2, "2.00 of 3.9 hours are over, and the rest is for the confirmation"),
        ({"gpu_hours": 17}, 2, 2, None),
        ({"gpu_hours": 15.9}, 2, 2, "8.00 of 15.9 GPU-hours are used, and the rest is for the confirmation"),
        # at least half of it is for the search
        ({"hours": 4.1}, 0, 50, None),
    ],
)
def test_rest_of_the_budget_is_for_the_confirmation(
    budget: dict[str, float], gpus: int, seeds: int, told: str | None, tmp_path: Path
) -> None:
    folder = make(tmp_path, budget=budget, confirm={"top": 2, "seeds": seeds})
    for number in (0, 1):
        worked(folder, number, (2, 0))
    found = with_lengths(0.5, 1.5)
    assert sweep_end.spent_time(sweep_of(folder), folder, gpus, found) == told
    assert sweep_end.spent_time(sweep_of(folder), folder, gpus, []) is None
