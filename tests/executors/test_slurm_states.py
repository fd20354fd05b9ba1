"""A job that squeue leaves out, and another one that has its id by now, as far as scripts can play that."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from mgpu_slurm import api
from mgpu_slurm.core.errors import ClusterError, UserError
from mgpu_slurm.executors import slurm_states
from mgpu_slurm.registry import current_state
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import Spec, Target
from mgpu_slurm.run_folder import failures, records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.slurm import job_identity
from mgpu_slurm.slurm.accounting import AccountedStart
from mgpu_slurm.slurm.jobs import QueuedJob
from tests.support import UNKNOWN_JOB, shows

Answers = Callable[[str, str], None]

BEGUN = datetime(2026, 5, 1, 12).astimezone()
"""When the runs here were submitted."""


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: Answers) -> Path:
    """A SLURM that answers, and lists no job."""
    monkeypatch.setenv("MGPU_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for command in ("squeue", "sacct"):
        answers(command, "true")
    answers("scontrol", UNKNOWN_JOB)
    answers("scancel", f'echo "$@" >> {tmp_path}/cancelled')
    return tmp_path / "runs"


@pytest.fixture
def run(runs: Path) -> RunFolder:
    return make_run(runs, "digits")


def make_run(runs: Path, name: str, begun: datetime = BEGUN) -> RunFolder:
    """One that runs as job 42."""
    folder = RunFolder(runs / name)
    folder.create()
    at = begun.isoformat()
    records.record_event(folder, "submitting", token=f"mgpu-{name}", time=at)
    records.record_event(folder, "submitted", token=f"mgpu-{name}", job_id="42", time=at)
    records.record_event(folder, "started", attempt=1, job_id="42", nodes=["n1"], time=at)
    records.update_state(folder, executor="slurm", job_id="42", state="RUNNING", attempts=1, submitted=at, started=at)
    return folder


def job(name: str, after: timedelta = timedelta(0), state: str = "RUNNING", restarts: int = 0) -> str:
    """A line of squeue on job 42.

    Args:
        after: from when the runs here were submitted until this job was.
    """
    submitted = (BEGUN + after).replace(tzinfo=None).isoformat()
    return f"42|{state}|{submitted}|{restarts}|{submitted}|N/A|{name}|None|\n"


def state_of(folder: RunFolder) -> tuple[str, str]:
    state = current_state.state(folder)
    return state.state, state.reason


SILENT = "echo 'scontrol: error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


def test_job_missing_from_squeue_is_looked_up_with_scontrol(run: RunFolder, answers: Answers) -> None:
    """As with a wrapper around squeue that prints nothing and exits with 0."""
    answers("scontrol", shows("JobId=42 JobName=digits JobState=RUNNING Reason=None SubmitTime=2026-05-01T12:00:00\n"))
    assert state_of(run) == ("RUNNING", "")
    with pytest.raises(UserError, match="is RUNNING: only a run that has ended can be resumed"):
        api.Handle(run).resume()
    answers(
        "scontrol", shows("JobId=42 JobName=digits JobState=TIMEOUT Reason=TimeLimit EndTime=2026-05-01T13:00:00\n")
    )
    assert state_of(run) == ("TIMEOUT", "TimeLimit")


def test_job_unknown_to_squeue_and_scontrol_is_lost(run: RunFolder, answers: Answers) -> None:
    assert state_of(run) == ("FAILED", slurm_states.LOST.reason)
    answers("sacct", "echo 'sacct: error: Connection refused' >&2; exit 1")
    assert state_of(run) == ("FAILED", slurm_states.LOST_SO_FAR.reason)
    # nothing of that is for good
    answers("squeue", shows(job("digits")))
    assert state_of(run) == ("RUNNING", "")


def test_job_that_writes_during_the_lookup_counts_as_running(run: RunFolder, answers: Answers) -> None:
    # file times are coarse: without the second it may be one before the question
    answers("scontrol", f"touch -d '+1 second' {run.rank_log(1, 0)}; {UNKNOWN_JOB}")
    assert state_of(run) == ("RUNNING", slurm_states.UNLISTED.reason)
    answers("scontrol", UNKNOWN_JOB)
    os.utime(run.rank_log(1, 0), (0, 0))
    assert state_of(run) == ("FAILED", slurm_states.LOST.reason)


@pytest.mark.parametrize("scontrol", [SILENT, "true"], ids=["silent", "empty"])
def test_unlisted_job_keeps_its_state_until_missing_long_and_often(
    run: RunFolder, answers: Answers, monkeypatch: pytest.MonkeyPatch, scontrol: str
) -> None:
    answers("scontrol", scontrol)
    unlisted = ("RUNNING", slurm_states.UNLISTED.reason)
    assert unlisted[1].startswith("not listed by squeue")
    # often, but not for long
    assert [state_of(run) for _ in range(4)] == [unlisted] * 4
    # for long, but not often
    monkeypatch.setattr(slurm_states, "GONE_AFTER", 0.0)
    run.unlisted.unlink()
    assert [state_of(run) for _ in range(2)] == [unlisted] * 2
    # a job that is listed again, and one that writes, lives
    answers("squeue", shows(job("digits")))
    assert state_of(run) == ("RUNNING", "")
    answers("squeue", "true")
    assert [state_of(run) for _ in range(2)] == [unlisted] * 2
    run.rank_log(1, 0).write_text("step 1\n")
    assert [state_of(run) for _ in range(3)] == [unlisted, unlisted, ("FAILED", slurm_states.LOST.reason)]


def test_slow_controller_is_not_asked_about_every_job(
    runs: Path, answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers("scontrol", f"echo >> {tmp_path}/asked; {UNKNOWN_JOB}")
    job_ids = {make_run(runs, f"digits-{job_id}"): job_id for job_id in ("42", "43", "44")}
    assert list((slurm_states.ask(job_ids, print) or {}).values()) == [slurm_states.LOST] * 3
    monkeypatch.setattr(slurm_states, "LOOKUP_SECONDS", -1.0)
    assert list((slurm_states.ask(job_ids, print) or {}).values()) == [
        slurm_states.LOST,
        slurm_states.UNLISTED,
        slurm_states.UNLISTED,
    ]
    assert len((tmp_path / "asked").read_text().splitlines()) == 3 + 1


@pytest.mark.parametrize(
    ("after", "word", "reason"),
    [
        ("afterok", "CANCELLED", failures.DEPENDENCY.words),
        # a user's doing, or that of a limit of the site
        ("afterok", "CANCELLED by 1000", ""),
        ("afterany", "CANCELLED", ""),
        (None, "CANCELLED", ""),
    ],
)
def test_accounting_tells_a_failed_dependency_from_a_cancel(
    runs: Path, answers: Answers, after: str | None, word: str, reason: str
) -> None:
    folder = RunFolder(runs / "second")
    folder.create()
    waits = (f"{after}:first",) if after else ()
    Spec("second", Target(command=("true",)), "slurm", Resources(), after=waits).write(folder)
    records.update_state(folder, executor="slurm", job_id="42", state="PENDING", submitted=BEGUN.isoformat())
    answers("sacct", shows(f"42|{word}|2026-05-01T12:00:00|None|2026-05-01T12:01:00|second\n"))
    assert state_of(folder) == ("CANCELLED", reason)


def test_accounted_end_before_the_newest_attempt_is_ignored(run: RunFolder, answers: Answers) -> None:
    """Accounting is some seconds late: for a requeued job it still has the previous start."""
    answers("scontrol", SILENT)
    answers("sacct", shows("42|PREEMPTED|2026-05-01T11:58:00|2026-05-01T11:58:01|2026-05-01T11:59:00|digits\n"))
    assert state_of(run) == ("RUNNING", slurm_states.UNLISTED.reason)
    answers("sacct", shows("42|PREEMPTED|2026-05-01T11:58:00|2026-05-01T11:58:01|2026-05-01T12:01:00|digits\n"))
    assert state_of(run)[0] == "PREEMPTED"


def test_accounted_end_of_the_start_before_a_requeue_is_ignored(run: RunFolder, answers: Answers) -> None:
    """As with a preempted job whose requeue is not in accounting yet."""
    requeued = (BEGUN + timedelta(minutes=31)).isoformat()
    records.record_event(run, "requeued", job_id="42", time=requeued)
    records.update_state(run, state="REQUEUED")
    answers("scontrol", SILENT)
    preempted = "42|PREEMPTED|2026-05-01T12:00:00|2026-05-01T12:00:01|2026-05-01T12:31:01|digits"
    answers("sacct", shows(f"{preempted}\n"))
    assert state_of(run) == ("REQUEUED", slurm_states.UNLISTED.reason)
    # cancelled while it waited again
    answers("sacct", shows(f"{preempted}\n42|CANCELLED|2026-05-01T12:31:02|None|2026-05-01T12:40:00|digits\n"))
    assert state_of(run)[0] == "CANCELLED"


def test_job_running_in_accounting_is_not_counted_as_missing(
    run: RunFolder, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_states, "GONE_AFTER", 0.0)
    answers("scontrol", SILENT)
    answers("sacct", shows("42|RUNNING|2026-05-01T12:00:00|2026-05-01T12:00:01|Unknown|digits\n"))
    assert [state_of(run) for _ in range(4)] == [("RUNNING", slurm_states.UNLISTED.reason)] * 4
    # the controller knows better
    answers("scontrol", UNKNOWN_JOB)
    assert state_of(run) == ("FAILED", slurm_states.LOST.reason)


def test_accounted_end_before_a_newer_start_is_ignored(run: RunFolder, answers: Answers) -> None:
    answers("scontrol", SILENT)
    preempted = "42|PREEMPTED|2026-05-01T12:00:00|2026-05-01T12:00:01|2026-05-01T12:30:00|digits"
    answers("sacct", shows(f"{preempted}\n42|RUNNING|2026-05-01T12:30:00|2026-05-01T12:31:00|Unknown|digits\n"))
    assert state_of(run) == ("RUNNING", slurm_states.UNLISTED.reason)


def test_missing_task_that_never_started_becomes_failed(
    runs: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_states, "GONE_AFTER", 0.0)
    answers("scontrol", SILENT)
    group = RunFolder(runs / "group")
    group.create()
    records.update_state(group, executor="slurm", state="PENDING", tasks=1, submitted=BEGUN.isoformat())
    records.record_event(group, "submitting", token="mgpu-1", first=0, tasks="0", time=BEGUN.isoformat())
    records.record_event(group, "submitted", token="mgpu-1", job_id="42", time=BEGUN.isoformat())
    assert [state_of(group.of_task(0))[0] for _ in range(3)] == ["PENDING", "PENDING", "FAILED"]


def test_state_written_during_the_lookup_wins(run: RunFolder, answers: Answers, tmp_path: Path) -> None:
    newer = tmp_path / "newer.json"
    newer.write_text(run.state.read_text().replace('"42"', '"43"'))
    answers("scontrol", f"cp {newer} {run.state}; {UNKNOWN_JOB}")
    assert current_state.state(run).job_id == "43"
    answers("scontrol", UNKNOWN_JOB)
    assert state_of(run)[0] != "RUNNING"


HOUR = timedelta(hours=1)


@pytest.mark.parametrize(
    ("line", "is_own"),
    [
        (job("digits"), True),
        (job("digits", after=HOUR), True),
        (job("renamed by the site"), True),
        (job("renamed by the site", after=HOUR, restarts=1), True),
        (job("of another cluster", after=-HOUR), False),
        (job("after a reset", after=HOUR), False),
        (job("after a reset", after=-HOUR, restarts=1), False),
    ],
)
def test_job_is_identified_by_name_or_submission_time(
    run: RunFolder, answers: Answers, line: str, is_own: bool
) -> None:
    answers("squeue", shows(line))
    assert state_of(run) == (("RUNNING", "") if is_own else ("FAILED", slurm_states.LOST.reason))
    if is_own:
        job_identity.check(run, ["42"])
    else:
        with pytest.raises(ClusterError, match=r"job 42 no longer belongs to run digits: SLURM has reused the id"):
            job_identity.check(run, ["42"])


def test_run_without_submission_record_is_identified_by_job_id(run: RunFolder, answers: Answers) -> None:
    run.attempts.unlink()
    answers("squeue", shows(job("something", after=-HOUR)))
    assert state_of(run) == ("RUNNING", "")


def test_two_runs_with_the_same_job_id_get_their_own_states(runs: Path, run: RunFolder, answers: Answers) -> None:
    new = make_run(runs, "new", BEGUN + HOUR)
    answers("squeue", shows(job("new", after=HOUR)))
    answers("sacct", shows("42|COMPLETED|2026-05-01T12:00:00|2026-05-01T12:00:00|2026-05-01T12:30:00|digits\n"))
    found = {folder.run: state.state for folder, state in current_state.current([run, new])}
    assert found == {"digits": "COMPLETED", "new": "RUNNING"}


def test_accounting_lines_are_matched_by_name_or_submission_time(run: RunFolder) -> None:
    def is_own(name: str, submit: str) -> bool:
        return job_identity.belongs_to(run, AccountedStart("42", "FAILED", None, name, submit))

    assert is_own("digits", "2026-05-01T15:00:00")
    assert is_own("renamed", "2026-05-01T12:00:01")
    assert not is_own("other", "2026-05-01T15:00:00")
    assert not is_own("other", "2025-05-01T12:00:00")


def test_allocation_must_be_older_than_its_run(run: RunFolder) -> None:
    run.attempts.unlink()
    records.update_state(run, executor="allocation")
    before, after = (str((BEGUN + span).replace(tzinfo=None).isoformat()) for span in (-HOUR, HOUR))
    assert job_identity.belongs_to(run, QueuedJob("42", "RUNNING", "", None, None, "bash", before))
    assert not job_identity.belongs_to(run, QueuedJob("42", "RUNNING", "", None, None, "bash", after))


def test_cancel_leaves_another_job_with_a_reused_id_alone(run: RunFolder, answers: Answers, tmp_path: Path) -> None:
    answers("squeue", shows(job("somebody's", after=HOUR)))
    assert not api.Handle(run).cancel()
    # the two looks of a cancel may differ
    answers(
        "squeue",
        f"if mkdir {tmp_path}/first 2> /dev/null; then {shows(job('digits'))}\nelse {shows(job('x', HOUR))}\nfi",
    )
    with pytest.raises(ClusterError, match="it was left alone"):
        api.Handle(run).cancel()
    assert not (tmp_path / "cancelled").exists()
    assert not run.cancel_request.exists()
    answers("squeue", shows(job("digits")))
    assert api.Handle(run).cancel()
    assert (tmp_path / "cancelled").read_text() == "42\n"


def test_unconfirmed_submission_is_pending_until_missing_for_long(
    runs: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(runs / "sent")
    folder.create()
    records.update_state(folder, executor="slurm", state="PENDING", submitted=BEGUN.isoformat())
    records.record_event(folder, "submitting", token="mgpu-1", time=BEGUN.isoformat())
    answers("sacct", shows("42|PENDING|2026-05-01T12:00:00|Unknown|Unknown|sent\n"))
    assert state_of(folder)[0] == "PENDING"
    answers("sacct", "exit 1")
    assert state_of(folder)[0] == "PENDING"
    monkeypatch.setattr(slurm_states, "GONE_AFTER", 0.0)
    assert [state_of(folder)[0] for _ in range(2)] == ["PENDING", "FAILED"]
    answers("sacct", "true")
    assert state_of(folder) == ("FAILED", "was never queued; `resume` submits it again")
