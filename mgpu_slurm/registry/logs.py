"""The logs of a run: the output of its ranks, and of its batch scripts or supervisors."""

from __future__ import annotations

from pathlib import Path

from mgpu_slurm.core import records
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.executors import supervisors


def of_rank(folder: RunFolder, rank: int, attempts: range) -> list[Path]:
    """Return the existing logs of a rank in these attempts."""
    return [path for path in (folder.rank_log(attempt, rank) for attempt in attempts) if path.exists()]


def of_launch(folder: RunFolder) -> list[Path]:
    """Return the logs of the batch scripts or supervisors of a run or group, oldest first."""
    found = sorted(folder.group.logs.glob("launch-*.log"), key=lambda path: path.stat().st_mtime)
    if folder.task is None:
        return found
    # a job may have failed before it started the run
    jobs = {submission.job_of(folder.task) for submission in records.submissions_of(folder)}
    jobs |= {event.job_id for event in records.events(folder)}
    names = jobs | {supervisors.log_name(records.read_state(folder).executor, folder)}
    return [path for path in found if path.stem.removeprefix("launch-") in names]
