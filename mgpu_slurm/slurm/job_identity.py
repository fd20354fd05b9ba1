"""Check that a job that SLURM lists is the one that a run submitted, as SLURM reuses ids.

A controller that was reset starts at 1 again, and the clusters of a federation may use the same ids.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta

from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.slurm import commands, jobs
from mgpu_slurm.slurm.accounting import AccountedStart
from mgpu_slurm.slurm.jobs import QueuedJob

CLOCKS_DIFFER = timedelta(minutes=5)
"""Largest difference between the controller's clock and that of the submission; beyond it munge refuses to work."""


def belongs_to(folder: RunFolder, job: QueuedJob | AccountedStart) -> bool:
    """Return whether a job with the id of a run's job, or of a group's array, is that job.

    Its name is the run's, unless the site changes names; then the time of its submission decides, if that was recorded.
    """
    if job.name == folder.group.run or job.submit is None:
        return True
    at = datetime.fromisoformat(job.submit).astimezone()
    earliest, latest = _span(folder, array_id(job.job_id))
    if earliest is not None and at < earliest - CLOCKS_DIFFER:
        return False
    # SLURM calls a requeue a submission too
    is_requeued = isinstance(job, QueuedJob) and job.restarts > 0
    return latest is None or is_requeued or at <= latest + CLOCKS_DIFFER


def _span(folder: RunFolder, job_id: str) -> tuple[datetime | None, datetime | None]:
    """Return the times between which the job was submitted; None for one that was not recorded."""
    submitted = [each for each in records.submissions_of(folder) if each.job_id == job_id]
    if submitted:
        return submitted[-1].begun, submitted[-1].confirmed
    state = records.read_state(folder)
    if state.executor == "allocation" and state.submitted:
        # the allocation existed before the run
        return None, datetime.fromisoformat(state.submitted)
    return None, None


def array_id(job_id: str) -> str:
    """Return the id of a task's array; other ids are returned unchanged."""
    return job_id.partition("_")[0]


def foreign_jobs(folder: RunFolder, job_ids: Collection[str]) -> list[QueuedJob]:
    """Return other jobs that SLURM lists under the ids of a run's or group's jobs.

    Raises:
        SlurmUnavailable: the controller does not answer.
    """
    listed = jobs.queued(commands.whole_jobs(job_ids)) if job_ids else {}
    if listed is None:
        raise commands.SlurmUnavailable("SLURM's controller does not answer: try again later")
    asked = [job for job in listed.values() if job.job_id in job_ids or array_id(job.job_id) in job_ids]
    return [job for job in asked if not belongs_to(folder, job)]


def check(folder: RunFolder, job_ids: Collection[str]) -> None:
    """Refuse to act on jobs by their ids if SLURM has reused one of the ids for another job.

    Raises:
        SlurmUnavailable: the controller does not answer.
        ClusterError: an id was reused.
    """
    for job in foreign_jobs(folder, job_ids):
        raise ClusterError(
            f"job {job.job_id} no longer belongs to run {folder.run}: SLURM has reused the id"
            f" (job {job.name!r}, submitted at {job.submit}); it was left alone"
        )
