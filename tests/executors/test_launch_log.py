"""What SLURM leaves in a launch log, word for word, and what is read from it."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from mgpu_slurm.executors import slurm_states
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder

START = "2024-05-01T12:00:00"
STEP = "slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2024-05-01T12:30:00 ***\n"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    started = (datetime.fromisoformat(START) + timedelta(milliseconds=700)).astimezone()
    records.record_event(folder, "started", attempt=1, job_id="7", time=started.isoformat())
    return folder


def notice(why: str, at: str = "2024-05-01T12:30:00") -> str:
    return f"slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT {at}{why} ***\n"


@pytest.mark.parametrize(
    ("why", "expected"),
    [
        ("", ("CANCELLED", "cancelled")),
        # since SLURM 25.05
        (" DUE to SIGNAL Terminated", ("CANCELLED", "cancelled")),
        (" DUE TO TASK FAILURE", ("FAILED", "task failure")),
        (" DUE TO TIME LIMIT", ("TIMEOUT", "time limit")),
        (" DUE TO PREEMPTION", ("PREEMPTED", "preemption")),
        (
            " DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS",
            ("NODE_FAIL", "node failure, see slurmctld log for details"),
        ),
    ],
)
def test_reason_is_read_from_slurm_cancellation_notice(run: RunFolder, why: str, expected: tuple[str, str]) -> None:
    run.launch_log("7").write_text(f"srun: got SIGCONT\n{notice(why)}{STEP}")
    found = slurm_states.ending(run, "7")
    assert found is not None
    assert (found.state, found.reason) == expected
    assert found.ended.startswith("2024-05-01T12:30:00")


def test_notice_may_begin_with_the_time(run: RunFolder) -> None:
    # as SLURM 26.05 writes it
    log = "[2024-05-01T12:30:00.457] error: *** JOB 7 ON n1 CANCELLED AT 2024-05-01T12:30:00 DUE TO TIME LIMIT ***\n"
    run.launch_log("7").write_text(f"srun: forcing job termination\n{log}{log.replace('JOB 7', 'STEP 7.0')}")
    found = slurm_states.ending(run, "7")
    assert found is not None
    assert (found.state, found.reason) == ("TIMEOUT", "time limit")


@pytest.mark.parametrize(
    "text",
    [
        "",
        STEP,
        notice(" DUE TO JOB REQUEUE"),
        # of the start before
        notice("", at="2024-05-01T11:59:00"),
        # a rank may print anything
        f"echo {notice('')}",
        notice("", at="soon"),
        notice("", at="9999-12-31T23:59:59"),
    ],
)
def test_log_without_a_valid_notice_gives_no_ending(run: RunFolder, text: str) -> None:
    run.launch_log("7").write_text(text)
    assert slurm_states.ending(run, "7") is None


def test_notice_in_the_same_second_as_the_start_counts(run: RunFolder) -> None:
    run.launch_log("7").write_text(notice("", at=START))
    assert slurm_states.ending(run, "7") is not None


def test_missing_launch_log_gives_only_a_generic_reason(run: RunFolder) -> None:
    assert slurm_states.ending(run, "8") is None
    assert slurm_states.before_the_ranks(run, "8") == "its batch script failed before the ranks were started"


def test_last_line_of_a_failed_script_is_quoted(run: RunFolder) -> None:
    said = "/var/spool/slurmd/job00008/slurm_script: line 9: module: command not found\x1b[2J"
    run.launch_log("8").write_text(f"Welcome\n{said}\n\n")
    assert slurm_states.before_the_ranks(run, "8") == (
        "its batch script failed before the ranks were started: line 9: module: command not found\ufffd[2J"
    )
    assert slurm_states.before_the_ranks(run, "7") is None
