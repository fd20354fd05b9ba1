"""What runs there are and how they stand, as far as a SLURM that answers can be played by two scripts."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from mgpu_slurm.core import processes
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.registry import current_state, index, lookup
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from tests.support import UNKNOWN_JOB


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MGPU_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    (tmp_path / "runs").mkdir()
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f"#!/bin/sh\n{UNKNOWN_JOB}\n")
    scontrol.chmod(0o755)
    return tmp_path / "runs"


@pytest.fixture
def make_run(runs: Path) -> Callable[..., RunFolder]:
    def make(name: str, job_id: str | None = None, state: str = "RUNNING") -> RunFolder:
        folder = RunFolder(runs / name)
        folder.create()
        records.update_state(folder, executor="slurm", job_id=job_id, state=state, submitted=records.now())
        return folder

    return make


@pytest.fixture
def answers(runs: Path) -> Callable[[str, str], None]:
    """Makes a SLURM command print a text."""

    def make(command: str, text: str) -> None:
        script = runs.parent / "bin" / command
        script.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
        script.chmod(0o755)

    return make


def test_state_comes_from_squeue_or_else_from_accounting(
    make_run: Callable[..., RunFolder], answers: Callable[[str, str], None]
) -> None:
    running, ended = make_run("running", "42"), make_run("ended", "41")
    answers("squeue", "42|PENDING|N/A|0|N/A|N/A||Priority|\n")
    answers("sacct", "41|TIMEOUT|2024-05-01T12:00:00|2024-05-01T12:05:00|2024-05-01T13:00:00|\n")
    states = {folder.run: state for folder, state in current_state.current([running, ended])}
    assert (states["running"].state, states["running"].reason) == ("PENDING", "Priority")
    assert states["ended"].state == "TIMEOUT"
    # SLURM forgets, the run does not
    answers("sacct", "")
    assert current_state.state(ended).state == "TIMEOUT"


def test_end_time_of_a_job_is_the_one_of_slurm(
    make_run: Callable[..., RunFolder], answers: Callable[[str, str], None]
) -> None:
    folder = make_run("cancelled", "42")
    answers("squeue", "42|CANCELLED|N/A|0|2024-05-01T12:00:00|2024-05-01T12:05:00||BeginTime|\n")
    state = current_state.state(folder)
    assert state.ended.startswith("2024-05-01T12:05:00")
    # BeginTime is why it had pended
    assert (state.state, state.reason) == ("CANCELLED", "cancelled")


def test_submission_without_a_reply_is_looked_up_by_its_token(
    make_run: Callable[..., RunFolder], answers: Callable[[str, str], None]
) -> None:
    there, not_there = make_run("there", None, "PENDING"), make_run("not-there", None, "PENDING")
    records.record_event(there, "submitting", token="mgpu-1", time="2024-05-01T12:00:00+00:00")
    records.record_event(not_there, "submitting", token="mgpu-2", time="2024-05-01T12:00:00+00:00")
    answers("sacct", "")
    answers("squeue", "42|mgpu-1\n42|PENDING|N/A|0|N/A|N/A||Priority|\n")
    states = {folder.run: state for folder, state in current_state.current([there, not_there])}
    assert (states["there"].state, states["there"].job_id) == ("PENDING", "42")
    assert states["not-there"].state == "FAILED"
    assert states["not-there"].reason.startswith("was never queued")
    assert [submission.job_id for submission in records.submissions(there)] == ["42"]


def test_run_that_is_being_submitted_is_pending(
    make_run: Callable[..., RunFolder], answers: Callable[[str, str], None]
) -> None:
    answers("squeue", "")
    folder = make_run("new", None, "PENDING")
    records.record_event(folder, "submitting", token="mgpu-1")
    assert current_state.state(folder).state == "PENDING"


def test_job_unknown_to_slurm_is_lost(make_run: Callable[..., RunFolder], answers: Callable[[str, str], None]) -> None:
    folder = make_run("gone", "40")
    answers("squeue", "")
    answers("sacct", "")
    state = current_state.state(folder)
    assert (state.state, state.reason.partition(":")[0]) == ("FAILED", "lost")


def test_job_is_not_lost_if_the_controller_does_not_answer(make_run: Callable[..., RunFolder], runs: Path) -> None:
    folder = make_run("waiting", "40")
    squeue = runs.parent / "bin" / "squeue"
    squeue.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1\n")
    squeue.chmod(0o755)
    assert current_state.state(folder).state == "RUNNING"


def test_queued_run_has_its_job_id_and_expected_start(
    make_run: Callable[..., RunFolder], answers: Callable[[str, str], None]
) -> None:
    folder = make_run("queued", None, "PENDING")
    records.record_event(folder, "submitting", token="mgpu-1")
    records.record_event(folder, "submitted", job_id="77", token="mgpu-1")
    start = (datetime.now() + timedelta(days=1)).isoformat(timespec="seconds")
    answers("squeue", f"77|PENDING|N/A|0|{start}|N/A||Resources|\n")
    assert current_state.state(folder).reason == f"Resources, expected to start at {start.replace('T', ' ')}"
    # a limit of a year is none
    answers("squeue", "77|PENDING|N/A|0|2999-05-01T12:00:00|N/A||Resources|\n")
    assert current_state.state(folder).reason == "Resources, after jobs that have no time limit"
    assert lookup.find("77").run == "queued"


def test_runs_are_found_by_name_prefix_and_in_earlier_runs_folders(
    make_run: Callable[..., RunFolder], runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_run("digits-1")
    make_run("digits-2")
    index.remember_root(runs)
    index.remember_root(runs)
    assert len((tmp_path / "state" / "mgpu_slurm" / "runs-folders.jsonl").read_text().splitlines()) == 1
    monkeypatch.setenv("MGPU_RUNS", str(tmp_path / "elsewhere"))
    assert lookup.find("digits-2").run == "digits-2"
    with pytest.raises(UserError, match=r"matches several runs \(digits-1, digits-2\)"):
        lookup.find("digits")
    make_run("dig-20261121-150000-ab12")
    assert lookup.find("dig").run == "dig-20261121-150000-ab12"
    with pytest.raises(UserError, match=r"no run 'digit-1' \(did you mean 'digits-1'\?\)"):
        lookup.find("digit-1")


def test_unreadable_state_does_not_hide_other_runs(make_run: Callable[..., RunFolder]) -> None:
    make_run("good", state="COMPLETED")
    bad = make_run("bad", state="COMPLETED")
    bad.state.write_text("{")
    states = {folder.run: state.state for folder, state in lookup.all_states()}
    assert states == {"good": "COMPLETED", "bad": "UNKNOWN"}


HERE = os.uname().nodename
GONE = [os.getpid(), 1]
"""A supervisor whose process id belongs to another process by now."""


@pytest.mark.parametrize(
    ("job", "state", "reason"),
    [
        ("TIMEOUT", "TIMEOUT", "its allocation 42 reached its time limit; continue with `resume` inside a new one"),
        ("COMPLETED", "CANCELLED", "its allocation 42 was released; continue with `resume` inside a new one"),
        ("COMPLETING", "RUNNING", ""),
        ("RUNNING", "RUNNING", ""),
    ],
)
def test_run_inside_an_allocation_ends_with_it(
    make_run: Callable[..., RunFolder], answers: Callable[[str, str], None], job: str, state: str, reason: str
) -> None:
    folder = make_run("held", "42")
    records.update_state(folder, executor="allocation", host="elsewhere", supervisor=[1, 1])
    answers("squeue", f"42|{job}|N/A|0|2024-05-01T12:00:00|2024-05-01T12:05:00||None|\n")
    found = current_state.state(folder)
    assert (found.state, found.reason) == (state, reason)
    assert records.read_state(folder).state == state
    if state != "RUNNING":
        assert found.ended.startswith("2024-05-01T12:05:00")


def test_run_whose_allocation_is_unknown_to_slurm_is_cancelled(
    make_run: Callable[..., RunFolder], answers: Callable[[str, str], None]
) -> None:
    folder = make_run("held", "42")
    records.update_state(folder, executor="allocation", host="elsewhere", supervisor=[1, 1])
    answers("squeue", "")
    answers("sacct", "")
    assert current_state.state(folder).state == "CANCELLED"


@pytest.mark.parametrize("moment", ["mgpu_slurm.run_folder.records.last_sign_of_life", "os.fsync"])
def test_end_of_an_attempt_does_not_replace_the_state_of_the_next_one(
    make_run: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The run starts again after somebody found its supervisor gone, and before that is written."""
    folder = make_run("restarted", "42")
    records.update_state(folder, executor="local", attempts=1, host=HERE, supervisor=GONE)
    alive = [os.getpid(), processes.started_at(os.getpid())]

    def start(*_: object) -> str:
        records.update_state(folder, sync=False, attempts=2, supervisor=alive)
        return records.now()

    monkeypatch.setattr(moment, start)
    found = current_state.state(folder)
    assert found == records.read_state(folder)
    assert (found.state, found.attempts, found.ended) == ("RUNNING", 2, None)


def test_answer_of_slurm_about_the_last_job_does_not_end_a_run_that_was_resumed_meanwhile(
    make_run: Callable[..., RunFolder], answers: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run("resumed", "42")
    answers("squeue", "42|TIMEOUT|N/A|0|2024-05-01T12:00:00|2024-05-01T12:05:00||None|\n")

    def resume(_: object) -> None:
        records.update_state(folder, sync=False, state="PENDING", job_id=None, submitted="2026-12-01T12:00:00+00:00")

    monkeypatch.setattr("os.fsync", resume)
    assert current_state.state(folder).state == records.read_state(folder).state == "PENDING"


def test_run_without_a_supervisor_is_lost_even_if_its_allocation_runs(
    make_run: Callable[..., RunFolder], answers: Callable[[str, str], None]
) -> None:
    folder = make_run("held", "42")
    records.update_state(folder, executor="allocation", host=HERE, supervisor=GONE)
    answers("squeue", "42|RUNNING|N/A|0|2024-05-01T12:00:00|2024-05-01T12:05:00||None|\n")
    found = current_state.state(folder)
    assert found.state == "FAILED"
    assert found.reason.startswith("lost: its supervisor process is gone")


def test_run_with_a_live_supervisor_is_running_without_asking_slurm(
    make_run: Callable[..., RunFolder], runs: Path
) -> None:
    folder = make_run("held", "42")
    supervisor = [os.getpid(), processes.started_at(os.getpid())]
    records.update_state(folder, executor="allocation", host=HERE, supervisor=supervisor)
    squeue = runs.parent / "bin" / "squeue"
    squeue.write_text(f"#!/bin/sh\ntouch {runs.parent}/asked\n")
    squeue.chmod(0o755)
    assert current_state.state(folder).state == "RUNNING"
    assert not (runs.parent / "asked").exists()


@pytest.fixture
def make_group(make_run: Callable[..., RunFolder]) -> Callable[..., RunFolder]:
    def make(name: str, job_id: str, tasks: int) -> RunFolder:
        folder = make_run(name, state="PENDING")
        records.update_state(folder, tasks=tasks)
        records.record_event(folder, "submitting", token=f"mgpu-{name}", first=0, tasks=f"0-{tasks - 1}")
        records.record_event(folder, "submitted", token=f"mgpu-{name}", job_id=job_id)
        return folder

    return make


def start(task: RunFolder, job_id: str) -> None:
    task.create_task()
    records.update_state(task, state="RUNNING", job_id=job_id)
    records.record_event(task, "started", attempt=1, job_id=job_id, nodes=["n1"])


REST_OF_42 = "42_2|RUNNING|N/A|0|2024-05-01T12:00:00|N/A||None|\n"


def test_unstarted_task_missing_from_its_array_is_cancelled_and_not_lost(
    make_group: Callable[..., RunFolder], answers: Callable[[str, str], None]
) -> None:
    group = make_group("group", "42", 3)
    start(group.of_task(1), "42_1")
    start(group.of_task(2), "42_2")
    answers("squeue", REST_OF_42)
    answers("sacct", "")
    found = [(state.state, state.reason.partition(":")[0]) for _, state in current_state.current([group])]
    # one that has run did not wait
    assert found == [("CANCELLED", "cancelled before it started"), ("FAILED", "lost"), ("RUNNING", "")]


def test_missing_task_is_not_cancelled_if_accounting_does_not_answer(
    make_group: Callable[..., RunFolder], answers: Callable[[str, str], None], runs: Path
) -> None:
    group = make_group("group", "42", 3)
    start(group.of_task(2), "42_2")
    answers("squeue", REST_OF_42)
    sacct = runs.parent / "bin" / "sacct"
    sacct.write_text("#!/bin/sh\necho 'sacct: error: slurm_persist_conn_open: failed' >&2; exit 1\n")
    sacct.chmod(0o755)
    state = current_state.current([group])[0][1]
    assert state.reason.startswith("lost: SLURM no longer lists it, and its accounting")
    assert not group.of_task(0).state.exists()


def test_group_is_listed_together_after_part_of_it_was_resubmitted(
    make_group: Callable[..., RunFolder], make_run: Callable[..., RunFolder], answers: Callable[[str, str], None]
) -> None:
    answers("squeue", "")
    answers("sacct", "")
    group = make_group("group", "42", 3)
    make_run("other", "43")
    start(group.of_task(1), "44_1")
    records.update_state(group.of_task(1), submitted="2999-01-01T00:00:00+00:00")
    names = [state.run for _, state in lookup.all_states()]
    assert names == ["group/0", "group/1", "group/2", "other"]


def test_resubmitted_run_of_a_group_is_found_by_its_new_job_id(
    make_group: Callable[..., RunFolder], answers: Callable[[str, str], None]
) -> None:
    group = make_group("group", "42", 3)
    start(group.of_task(1), "57_1")
    assert lookup.find("57_1").run == "group/1"
    assert lookup.find("42_2").run == "group/2"
    assert lookup.find("42").run == "group"
