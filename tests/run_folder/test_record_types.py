from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.run_folder.record_types import Event, Failure, RunState, StateChange
from mgpu_slurm.run_folder.sweep_records import SchedulePart, SweepOver, SweepSummary, TrialSummary
from tests.support import REPOSITORY

TRIAL = TrialSummary(
    number=3, state="COMPLETE", value=0.5, progress=10, params={"lr": 0.1, "sizes": [8, 8]}, seconds=1.5, reason=""
)
OVER = SweepOver(reason="2 of 2 hours are over", failed=False)


@pytest.mark.parametrize(
    "summary",
    [
        SweepSummary(),
        SweepSummary(study="s", metric="loss", best=TRIAL, known=(TRIAL,), over=OVER, seconds={"complete": (2, 0.5)}),
        # of a newer version
        SweepSummary(study="s", others={"new": 1}),
    ],
)
def test_summary_round_trips_through_json(summary: SweepSummary) -> None:
    assert SweepSummary.from_json(json.loads(json.dumps(summary.to_json()))) == summary


def test_summary_of_version_0_1_is_read_and_written_whole() -> None:
    record = json.loads((REPOSITORY / "tests/version_0_1/runs/search/summary.json").read_text())
    summary = SweepSummary.from_json(record)
    assert (summary.best, summary.recent[0].number) == (summary.recent[0], 0)
    new = {"paused": {}, "promotable": 0, "furthest": None}
    expected = record | {"trials": record["trials"] | {"PAUSED": 0}} | new
    assert json.loads(json.dumps(summary.to_json())) == expected


def test_schedule_of_the_best_trial_is_read_as_it_was_written() -> None:
    parts = (SchedulePart(trial=2, until=3, params={"lr": 0.1}), SchedulePart(trial=9, until=9, params={"lr": 0.08}))
    best = TrialSummary(number=9, state="COMPLETE", value=0.5, schedule=parts)
    summary = SweepSummary(best=best, furthest=replace(best, state="PAUSED", schedule=()))
    assert SweepSummary.from_json(json.loads(json.dumps(summary.to_json()))) == summary


def recorded(name: str) -> list[Any]:
    """Return the files of this name that version 0.1 has written, as parameters of a test."""
    root = REPOSITORY / "tests" / "version_0_1" / "runs"
    return [pytest.param(path, id=str(path.parent.relative_to(root))) for path in sorted(root.rglob(name))]


def test_fields_of_a_newer_version_are_preserved() -> None:
    record = {"run": "digits", "state": "RUNNING", "attempts": 2, "new": {"a": 1}}
    state = RunState.from_json(record)
    assert (state.attempts, state.reason, state.others) == (2, "", {"new": {"a": 1}})
    assert record.items() <= state.updated(StateChange(reason="slow")).to_json().items()


def test_null_means_the_default_if_the_field_cannot_be_none() -> None:
    state = RunState.from_json({"metrics": None, "reason": None, "job_id": None, "supervisor": []})
    assert (state.metrics, state.reason, state.job_id) == ({}, "", None)
    assert Event.from_json({"newest": None}).newest is None
    assert SweepSummary.from_json({"known": None, "over": {}, "best": {"number": 1, "state": "FAIL"}}).known == ()


def test_optional_values_are_written_only_if_set() -> None:
    assert "supervisor" not in RunState(run="digits").to_json()
    assert RunState(supervisor=[7, 9]).to_json()["supervisor"] == [7, 9]
    assert Failure(message="killed").to_json() == {"message": "killed", "consequence": False}


def test_state_change_replaces_only_the_given_fields() -> None:
    state = RunState(state="RUNNING", reason="slow", job_id="7")
    assert state.updated(StateChange("FAILED")) == RunState(state="FAILED", reason="slow", job_id="7")


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "tests/version_0_1/runs").rglob("state.json")), ids=lambda path: path.parent.name
)
def test_states_of_version_0_1_are_read_and_written_whole(path: Path) -> None:
    record = json.loads(path.read_text())
    kept = {name: value for name, value in record.items() if (name, value) != ("trial", None)}
    assert RunState.from_json(record).to_json() == kept


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "tests/version_0_1/runs").rglob("attempts.jsonl")), ids=lambda path: path.parent.name
)
def test_events_of_version_0_1_are_read(path: Path) -> None:
    for line in path.read_text().splitlines():
        record = json.loads(line)
        event = Event.from_json(record)
        assert (event.event, event.time, event.attempt) == (record["event"], record["time"], record.get("attempt", 0))
