"""What `status` reads of a sweep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from optuna.trial import TrialState, create_trial

from mgpu_slurm.core import files
from mgpu_slurm.sweeps.study import claims as claiming
from mgpu_slurm.sweeps.study import summary
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.snapshots import ORIGIN, SECONDS
from tests.sweeps.sweeps import begin, finish, leave, make, study_of, sweep_of, worker


@pytest.mark.parametrize(("direction", "best"), [("maximize", 1), ("minimize", 3)])
def test_best_trial_is_the_first_with_the_best_value(tmp_path: Path, direction: str, best: int) -> None:
    sweep = sweep_of(make(tmp_path, direction=direction))
    trials = [create_trial(value=value) for value in (0.5, 0.9, 0.9, 0.1, 0.1)]
    trials.append(create_trial(state=TrialState.PRUNED, value=7.0))
    for number, trial in enumerate(trials):
        trial.number = number
    found = summary.best_of(trials, sweep)
    assert found is not None
    assert found.number == best
    assert summary.best_of(trials[-1:], sweep) is None


def test_trials_are_shown_with_the_parameters_the_job_received(tmp_path: Path) -> None:
    sizes = [[8], [8, 8]]
    folder = make(tmp_path, sampler="grid", trials=2, space={"sizes": {"choice": sizes}, "whole": {"choice": [2**60]}})
    part = worker(folder, 0)
    for score in (0.5, float("nan")):
        begin(part)
        part.report(1, {"score": 0.25})
        finish(part, score)
    leave(part)
    told = files.read_json(folder.summary)
    assert [trial["params"] for trial in told["recent"]] == [{"sizes": each, "whole": 2**60} for each in sizes]
    assert [(trial["state"], trial["value"], trial["reason"]) for trial in told["recent"]] == [
        ("COMPLETE", 0.5, ""),
        ("PRUNED", 0.25, "score is nan"),
    ]
    assert (told["best"]["number"], told["over"]) == (0, None)
    assert told["trials"] == {"RUNNING": 0, "COMPLETE": 1, "PRUNED": 1, "FAIL": 0, "WAITING": 0, "PAUSED": 0}


def test_infinite_value_is_null_in_json(tmp_path: Path) -> None:
    folder = make(tmp_path, trials=1)
    study = study_of(folder)
    trial = studies.take(study, sweep_of(folder), claiming.Worker(0, 1), folder.trials_lock)
    assert trial is not None
    # as a program of Optuna's own may do
    trial.report(float("inf"), 1)
    study.tell(trial, state=TrialState.PRUNED)
    text = json.dumps(summary.summarize(study_of(folder), sweep_of(folder)).to_json(), allow_nan=False)
    assert '"value": null' in text


def test_recent_trials_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    folder = make(tmp_path, trials=summary.RECENT + 3)
    part = worker(folder, 0)
    for number in range(summary.RECENT + 3):
        begin(part)
        finish(part, number)
    told = summary.summarize(study_of(folder), sweep_of(folder))
    assert [trial.number for trial in told.recent] == list(range(3, summary.RECENT + 3))
    assert told.trials["COMPLETE"] == told.seconds["complete"][0] == summary.RECENT + 3


@pytest.mark.parametrize(("trials", "waiting"), [(2, 1), (9, 8), (1, 1), (None, 1)])
def test_waiting_counts_unstarted_and_given_back_trials(tmp_path: Path, trials: int | None, waiting: int) -> None:
    folder = make(tmp_path, trials=2)
    parts = [worker(folder, number) for number in range(2)]
    for part in parts:
        begin(part)
    parts[0].give_back(is_late=True, has_saved=True)
    told = summary.counts(study_of(folder).trials, replace(sweep_of(folder), trials=trials))
    assert told == {"RUNNING": 1, "COMPLETE": 0, "PRUNED": 0, "FAIL": 0, "WAITING": waiting, "PAUSED": 0}


def test_trials_of_another_study_are_not_counted(tmp_path: Path) -> None:
    folder = make(tmp_path, trials=1)
    study = study_of(folder)
    study.add_trial(create_trial(value=9.0, system_attrs={ORIGIN: "before"}))
    told = summary.summarize(study, sweep_of(folder))
    assert (told.trials["COMPLETE"], told.trials["WAITING"], told.best) == (0, 1, None)


def test_trial_duration_includes_all_of_its_workers(tmp_path: Path) -> None:
    folder = make(tmp_path, trials=1)
    first, other = worker(folder, 0), worker(folder, 1)
    begin(first)
    first.give_back(is_late=True, has_saved=True)
    before = study_of(folder).trials[0].system_attrs[SECONDS]
    assert before > 0
    begin(other)
    finish(other, 1.0)
    (trial,) = study_of(folder).trials
    assert trial.duration is not None
    (told,) = summary.summarize(study_of(folder), sweep_of(folder)).recent
    assert told.seconds == pytest.approx(before + trial.duration.total_seconds())
