"""What is read from srun's words."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_slurm.job.srun_watch import LaunchLog, first_failure

ABORTED = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("srun: error: n2: task 1: Killed", "rank 1 on n2: Killed"),
        ("srun: error: n[1-2]: tasks 0-3: Exited with exit code 2", "ranks 0-3 on n[1-2] ended with exit code 2"),
        (
            "srun: error: gpu07: task 5: Segmentation fault (core dumped)",
            "rank 5 on gpu07: Segmentation fault (core dumped)",
        ),
        ("srun: error: gpu07: task 5: Out Of Memory", "rank 5 on gpu07: Out Of Memory"),
    ],
)
def test_first_failure_is_read_from_the_srun_log(line: str, told: str) -> None:
    consequence = "srun: launch/slurm: _step_signal: Terminating StepId=9.0\nsrun: error: n1: task 0: Terminated\n"
    log = f"site banner\n{line}\n{consequence}"
    assert first_failure(log) == told


def test_killed_rank_comes_before_those_that_lost_it() -> None:
    """With proctrack/cgroup, srun may hear of them first."""
    log = "srun: error: n1: tasks 0,2-3: Exited with exit code 1\nsrun: error: n2: task 1: Killed\n"
    assert first_failure(log) == "ranks 0,2-3 on n1 ended with exit code 1"
    assert first_failure(log, followers={0, 2}) == "ranks 0,2-3 on n1 ended with exit code 1"
    assert first_failure(log, followers={0, 2, 3}) == "rank 1 on n2: Killed"
    # all of them lost a connection, and the first knows no better
    assert first_failure(log, followers={0, 1, 2, 3}) == "ranks 0,2-3 on n1 ended with exit code 1"


def test_refusal_to_create_a_step_is_reported_verbatim() -> None:
    refusal = "srun: error: Unable to create step for job 9: Invalid generic resource (gres) specification"
    assert first_failure(f"site banner\n{refusal}\n") == refusal
    assert first_failure("srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n") is None


def test_last_words_name_a_program_that_a_node_lacks(tmp_path: Path) -> None:
    path = tmp_path / "launch-9.log"
    log = LaunchLog(path)
    missing = "slurmstepd-n2: error: execve(): apptainer: No such file or directory"
    cancelled = "slurmstepd-n1: error: *** STEP 9.0 ON n1 CANCELLED AT 2026-11-29T21:00:00 DUE to TASK FAILURE ***"
    path.write_text(
        f"module: command not found\n{missing}\nsrun: error: n2: task 1: Exited with exit code 2\n{cancelled}\n"
    )
    assert log.last_words() == missing
    path.write_text(f"module: command not found\n{cancelled}\n")
    assert log.last_words() == "module: command not found"


def test_rank_out_of_memory_takes_precedence(tmp_path: Path) -> None:
    """The other ranks lose their connections to it, and srun may report them earlier."""
    lost = "srun: error: n[1-2]: tasks 0-3: Exited with exit code 1\n"
    path = tmp_path / "launch-9.log"
    log = LaunchLog(path)
    path.write_text(lost)
    assert not log.reports_out_of_memory()
    path.write_text(f"{lost}srun: error: n2: task 4: Out Of Memory\n")
    assert log.reports_out_of_memory()
    assert first_failure(path.read_text()) == "rank 4 on n2: Out Of Memory"


@pytest.mark.parametrize(
    ("words", "is_slurms_doing"),
    [
        (ABORTED, True),
        # where all tasks have left already
        ("srun: Job step aborted\n", True),
        ("srun: error: n2: task 1: Exited with exit code 3\n", False),
        (f"srun: error: Task launch for StepId=9.0 failed on node n2: Invalid job credential\n{ABORTED}", False),
        (f"srun: error: Application launch failed: Communication connection failure\n{ABORTED}", False),
        (f"srun: error: timeout waiting for task launch, started 1 of 2 tasks\n{ABORTED}", False),
        (f"{ABORTED}srun: error: Task launch for StepId=9.0 failed on node n2: Job credential revoked\n", True),
    ],
)
def test_abort_by_slurm_is_detected_from_new_srun_messages(tmp_path: Path, words: str, is_slurms_doing: bool) -> None:
    """A rank that exits with 0 on SIGTERM may be gone before the batch step gets its own SIGTERM."""
    path = tmp_path / "launch-9.log"
    # of an earlier start
    path.write_text(ABORTED)
    log = LaunchLog(path)
    with path.open("a") as file:
        file.write(words)
    assert log.reports_abort() is is_slurms_doing
