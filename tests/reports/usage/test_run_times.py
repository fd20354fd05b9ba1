"""The times of runs, from what they leave in their folders."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_slurm.core.files import append_jsonl
from mgpu_slurm.reports.usage import ledger, run_times
from mgpu_slurm.reports.usage.ledger import Ledger, Save
from mgpu_slurm.reports.usage.run_times import AttemptTimes
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState

START = datetime(2026, 1, 1, tzinfo=timezone.utc)


def at(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def milliseconds(seconds: float) -> int:
    return run_times.milliseconds(at(seconds))


def write(folder: RunFolder, events: Sequence[dict[str, Any]], reports: Sequence[dict[str, Any]] = ()) -> RunFolder:
    folder.create()
    folder.state.write_text("{}")
    for path, lines in ((folder.attempts, events), (folder.metrics, reports)):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


TIMES = st.integers(0, 10**7).map(lambda number: at(number / 1000))
ATTEMPTS = st.integers(1, 5)
EVENTS = st.one_of(
    st.fixed_dictionaries(
        {"event": st.just("started"), "time": TIMES, "attempt": ATTEMPTS},
        optional={"job_id": st.just("7"), "nodes": st.lists(st.just("n1"))},
    ),
    st.fixed_dictionaries(
        {"event": st.just("ended"), "time": TIMES, "attempt": ATTEMPTS},
        optional={"exit_code": st.sampled_from([0, 1, 75, 137, 143, None]), "how": st.just("paused")},
    ),
    st.fixed_dictionaries({"event": st.sampled_from(["submitted", "requeued", "retried", "resumed"]), "time": TIMES}),
)
REPORTS = st.fixed_dictionaries(
    {"time": TIMES, "progress": st.integers(0, 30), "step": st.just(1)}, optional={"attempt": ATTEMPTS}
)
SAVES = st.fixed_dictionaries(
    {"step": st.integers(0, 99), "begun": TIMES, "time": TIMES, "stood": st.floats(0, 1e4)},
    optional={"attempt": ATTEMPTS},
)
STATES = st.sampled_from(["RUNNING", "COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "REQUEUED"])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(EVENTS, max_size=12),
    st.lists(REPORTS, max_size=8),
    st.lists(SAVES, max_size=5),
    STATES,
    st.none() | TIMES,
)
def test_ledger_of_any_history_adds_up_to_the_time_of_its_attempts(
    events: list[dict[str, Any]],
    reports: list[dict[str, Any]],
    saves: list[dict[str, Any]],
    state: str,
    ended: str | None,
) -> None:
    with tempfile.TemporaryDirectory() as base:
        folder = write(RunFolder(Path(base) / "run"), events, reports)
        folder.saves.write_text("".join(json.dumps(line) + "\n" for line in saves))
        current = RunState(run="run", state=state, ended=ended)
        attempts = run_times.attempts_of(folder, current)
        found = ledger.of_run(
            run_times.stretches_of(folder, attempts, run_times.reported), failed=run_times.has_failed(current)
        )
    assert len(attempts) == len([event for event in events if event["event"] == "started"])
    assert all(each.begin <= each.end for each in attempts)
    expected = [Fraction(each.end - each.begin, 1000) for each in attempts]
    assert [each.total for each in found] == expected
    assert sum(found, Ledger()).total == sum(expected)


def attempt(number: int, begin: float, end: float, outcome: str) -> AttemptTimes:
    job, nodes = "7", ("n1", "n2")
    return AttemptTimes(number, job, nodes, milliseconds(begin), milliseconds(end), outcome)  # type: ignore[arg-type]


def started(number: int, time: float) -> dict[str, Any]:
    return {"event": "started", "time": at(time), "attempt": number, "job_id": "7", "nodes": ["n1", "n2"]}


def ended(number: int, time: float, **facts: Any) -> dict[str, Any]:
    return {"event": "ended", "time": at(time), "attempt": number} | facts


def test_attempts_end_as_their_events_say(tmp_path: Path) -> None:
    events = [
        started(1, 0),
        ended(1, 10, exit_code=75),
        {"event": "requeued", "time": at(10)},
        # its node was lost
        started(2, 20),
        started(3, 40),
        ended(3, 50, exit_code=1),
        {"event": "retried", "time": at(50)},
        # what was found later
        started(4, 60),
        ended(4, 65),
        started(5, 70),
        ended(5, 80, exit_code=0),
    ]
    folder = write(RunFolder(tmp_path / "run"), events)
    assert run_times.attempts_of(folder, RunState(run="run", state="COMPLETED", ended=at(81))) == [
        attempt(1, 0, 10, "stopped"),
        attempt(2, 20, 40, "lost"),
        attempt(3, 40, 50, "failed"),
        attempt(4, 60, 65, "lost"),
        attempt(5, 70, 80, "completed"),
    ]


def test_last_attempt_continues_while_the_run_lives(tmp_path: Path) -> None:
    folder = write(RunFolder(tmp_path / "run"), [started(1, 0)])
    (found,) = run_times.attempts_of(folder, RunState(run="run", state="RUNNING"))
    assert found.outcome == "running"
    now = run_times.milliseconds(datetime.now(timezone.utc).isoformat())
    assert now - 60_000 < found.end <= now
    assert run_times.attempts_of(folder, RunState(run="run", state="FAILED", ended=at(30))) == [
        attempt(1, 0, 30, "lost")
    ]


def test_reports_of_version_0_1_belong_to_the_attempt_of_their_time(tmp_path: Path) -> None:
    reports = [{"time": at(time), "progress": progress, "step": 1} for time, progress in ((5, 1), (25, 1), (35, 2))]
    folder = write(RunFolder(tmp_path / "run"), [], reports)
    attempts = [attempt(1, 0, 10, "lost"), attempt(2, 20, 40, "completed")]
    first, second = run_times.stretches_of(folder, attempts, run_times.reported)
    assert [each.progress for each in first.reports] == [1]
    assert [each.progress for each in second.reports] == [1, 2]


def test_checkpoint_without_a_record_has_the_time_of_its_folder(tmp_path: Path) -> None:
    folder = write(RunFolder(tmp_path / "run"), [])
    for step in (1, 2):
        folder.checkpoint(step).mkdir(parents=True)
        os.utime(folder.checkpoint(step), times=(START.timestamp() + step,) * 2)
    append_jsonl(folder.saves, {"step": 2, "attempt": 1, "begun": at(1.5), "stood": 0.25, "time": at(2)})
    (found,) = run_times.stretches_of(folder, [attempt(1, 0, 10, "completed")], run_times.reported)
    assert sorted(found.saves, key=lambda save: save.begun) == [
        Save(milliseconds(1), milliseconds(1), milliseconds(1)),
        Save(milliseconds(1.5), milliseconds(1.75), milliseconds(2)),
    ]


# -- sweeps


def write_trial(folder: RunFolder, *events: dict[str, Any], result: bool = False, failure: bool = False) -> None:
    write(folder, events)
    if result:
        folder.result.write_text("{}")
    if failure:
        folder.failure.write_text("{}")


def of_worker(worker: int, number: int, time: float) -> dict[str, Any]:
    return started(number, time) | {"worker": worker}


def test_trials_have_the_workers_of_their_attempts(tmp_path: Path) -> None:
    sweep = RunFolder(tmp_path / "study")
    how = {"how": "given back: another worker continues it"}
    write_trial(
        sweep.of_trial(0),
        of_worker(0, 1, 0),
        ended(1, 5, **how),
        of_worker(1, 2, 6),
        ended(2, 9, how="loss 1"),
        result=True,
    )
    write_trial(sweep.of_trial(1), of_worker(1, 1, 10), ended(1, 12, how="failed: ValueError"), failure=True)
    write_trial(sweep.of_trial(2), of_worker(0, 1, 13))
    found = sorted(run_times.trial_runs(sweep, run_times.reported), key=lambda trial: trial.stretches[0].begin)
    assert [(trial.workers, trial.failed) for trial in found] == [([0, 1], False), ([1], True), ([0], False)]
    assert [[stretch.outcome for stretch in trial.stretches] for trial in found] == [
        ["stopped", "completed"],
        ["stopped"],
        ["lost"],
    ]
    assert found[2].stretches[0].end == ledger.OPEN


def test_seeds_of_a_trial_end_when_the_next_one_begins_or_the_trial_ends(tmp_path: Path) -> None:
    trial = RunFolder(tmp_path / "study").of_trial(0)
    write_trial(trial, of_worker(0, 1, 0), ended(1, 9, how="loss 1"), result=True)
    for seed, time in ((0, 1), (1, 5)):
        write_trial(trial.of_seed(seed), of_worker(0, 1, time))
    found = sorted(run_times.trial_runs(trial.group, run_times.reported), key=lambda run: run.stretches[0].begin)
    times = [(run.stretches[0].begin, run.stretches[0].end) for run in found]
    assert times == [(milliseconds(1), milliseconds(5)), (milliseconds(5), milliseconds(9))]


@pytest.mark.parametrize(
    ("state", "failed"), [("FAILED", True), ("OUT_OF_MEMORY", True), ("COMPLETED", False), ("CANCELLED", False)]
)
def test_run_that_somebody_ended_has_not_failed(state: str, failed: bool) -> None:
    assert run_times.has_failed(RunState(run="run", state=state)) is failed
