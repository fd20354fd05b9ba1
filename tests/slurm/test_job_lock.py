"""Of all jobs that come for a run, one works on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_slurm.core import records
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.slurm import job_lock

CLAIM = """
import sys
from pathlib import Path
from mgpu_slurm.slurm import job_lock
from mgpu_slurm.core.layout import RunFolder
print("ready", flush=True)
sys.stdin.readline()
print(job_lock.take(RunFolder(Path(sys.argv[1])), "mgpu-1", sys.argv[2]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "digits-1")
    folder.create()
    return folder


def submitted(folder: RunFolder, *tokens: str, **facts: object) -> None:
    for token in tokens:
        records.record_event(folder, "submitting", token=token, **facts)


def test_of_jobs_that_come_at_the_same_moment_one_gets_the_run(folder: RunFolder) -> None:
    command = [sys.executable, "-c", CLAIM, str(folder.path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    jobs = {str(job): subprocess.Popen([*command, str(job)], **pipes) for job in range(40, 50)}  # type: ignore[call-overload]
    for process in jobs.values():
        assert process.stdout.readline() == "ready\n"
    for process in jobs.values():
        process.stdin.write("go\n")
        process.stdin.flush()
    holders = {job: process.communicate()[0].strip() for job, process in jobs.items()}
    (holder,) = set(holders.values())
    assert holder in jobs
    assert (folder.claims / "mgpu-1").read_text() == holder
    # no half of a claim is left either
    assert [path.name for path in folder.claims.iterdir()] == ["mgpu-1"]


def test_a_job_that_was_started_again_has_its_run_still(folder: RunFolder) -> None:
    assert job_lock.take(folder, "mgpu-1", "42") == "42"
    assert job_lock.take(folder, "mgpu-1", "42") == "42"
    assert job_lock.take(folder, "mgpu-1", "43") == "42"


def test_each_submission_can_be_claimed(folder: RunFolder) -> None:
    submitted(folder, "mgpu-1", "mgpu-2")
    assert job_lock.take(folder, "mgpu-2", "43") == "43"


def test_a_late_job_leaves_the_run_to_the_job_of_a_later_submission_that_has_come(folder: RunFolder) -> None:
    submitted(folder, "mgpu-1", "mgpu-2")
    job_lock.take(folder, "mgpu-2", "43")
    assert job_lock.take(folder, "mgpu-1", "42") == "43"


def test_a_late_job_that_comes_first_leaves_nothing_to_later_ones(folder: RunFolder) -> None:
    submitted(folder, "mgpu-1", "mgpu-2", "mgpu-3")
    assert job_lock.take(folder, "mgpu-1", "42") == "42"
    assert job_lock.take(folder, "mgpu-2", "43") == "42"
    assert job_lock.take(folder, "mgpu-3", "44") == "42"


def test_the_runs_of_a_group_are_claimed_one_by_one(folder: RunFolder) -> None:
    """A late task must not take the runs of others with it."""
    submitted(folder, "mgpu-1", tasks="0-1", first=0)
    submitted(folder, "mgpu-2", tasks="0-1", first=0)
    runs = [folder.of_task(task) for task in range(2)]
    for run in runs:
        run.create_task()
    assert job_lock.take(runs[0], "mgpu-1", "42_0") == "42_0"
    assert job_lock.take(runs[0], "mgpu-2", "43_0") == "42_0"
    assert job_lock.take(runs[1], "mgpu-2", "43_1") == "43_1"


def test_a_run_of_a_group_that_went_on_by_itself_is_claimed_by_its_own_submission(folder: RunFolder) -> None:
    submitted(folder, "mgpu-1", tasks="0-1", first=0)
    run = folder.of_task(1)
    run.create_task()
    assert job_lock.take(run, "mgpu-1", "42_1") == "42_1"
    submitted(run, "mgpu-2", tasks="1", first=0)
    assert job_lock.take(run, "mgpu-2", "77_1") == "77_1"
    # requeued after all
    assert job_lock.take(run, "mgpu-1", "42_1") == "77_1"


def test_who_came_with_a_token(folder: RunFolder) -> None:
    assert job_lock.holder(folder, "mgpu-1") is None
    job_lock.take(folder, "mgpu-1", "42")
    assert job_lock.holder(folder, "mgpu-1") == "42"


def test_the_array_that_came_with_the_token_of_a_group(folder: RunFolder) -> None:
    assert job_lock.holder(folder, "mgpu-1") is None
    run = folder.of_task(7)
    run.create_task()
    job_lock.take(run, "mgpu-1", "42_7")
    assert job_lock.holder(folder, "mgpu-1") == "42"
