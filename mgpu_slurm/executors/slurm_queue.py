"""Submit the jobs of a run or group to SLURM: each arrives exactly once or not at all, whatever happens meanwhile.

That includes finding a job whose submission got no answer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mgpu_slurm.core import files
from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.core.files import is_own
from mgpu_slurm.core.formatting import program
from mgpu_slurm.core.hostlist import ranges
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.executors import slurm_states
from mgpu_slurm.executors.base import is_elsewhere
from mgpu_slurm.request.spec import Spec
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import StateChange
from mgpu_slurm.slurm import accounting, commands, sbatch, script, site
from mgpu_slurm.slurm.commands import Patience, wait_out
from mgpu_slurm.slurm.sbatch import ExactlyOnceSubmission, Start
from mgpu_slurm.slurm.script import Array, split


@dataclass(frozen=True)
class Job:
    """A job to request from SLURM."""

    token: str
    array: Array | None
    """The runs of a group in this job; None for a single run."""


def announce(folder: RunFolder, tasks: Sequence[int] | None = None, note: Note = quiet) -> list[Job]:
    """Record the jobs that will be requested from SLURM, so that they can be looked for if no answer is recorded.

    Args:
        folder: of a run or group; it may still be hidden.
        tasks: indices in the group; None for a single run.

    Raises:
        ClusterError: the cluster did not answer.
    """
    arrays = [None] if tasks is None else split(tasks, wait_out(site.max_array_size, note))
    jobs = [Job(sbatch.new_token(), array) for array in arrays]
    for job in jobs:
        part = {} if job.array is None else {"first": job.array.first, "tasks": ranges(job.array.tasks)}
        records.record_event(folder, "submitting", token=job.token, **part)
    return jobs


def submit(folder: RunFolder, spec: Spec, jobs: Sequence[Job], dependency: str = "", note: Note = quiet) -> str:
    """Queue the announced jobs; return the job id, or those of several arrays joined by commas.

    Args:
        dependency: in the format of sbatch's `--dependency`.
        note: called when waiting for a controller that does not answer.

    Raises:
        MayBeQueued: the cluster did not answer, so it is unknown whether it accepted the job.
        ClusterError: it refused, or did not answer for too long; states which runs of a group it had accepted.
    """
    job_ids: list[str] = []
    for place, job in enumerate(jobs):
        # the limit applies to each array, so they run one after the other
        before = f"afterany:{job_ids[-1]}" if spec.at_once is not None and job_ids else ""
        try:
            job_ids.append(_queue(folder, spec, job, ",".join(filter(None, [dependency, before])), note))
        except BaseException as stopped:
            for other in jobs[place + 1 :]:
                records.record_event(folder, "refused", token=other.token, reason="not asked for")
            if isinstance(stopped, ClusterError) and job_ids:
                assert job.array is not None
                raise type(stopped)(
                    f"{stopped}; the runs before {folder.run}/{job.array.tasks[0]} are queued as job"
                    f" {', '.join(job_ids)}, and `resume` submits the others"
                ) from None
            raise
    return ",".join(job_ids)


def may_have_arrived(folder: RunFolder, jobs: Sequence[Job]) -> bool:
    """Return whether SLURM may have one of the jobs."""
    tokens = {job.token for job in jobs}
    return any(not submission.refused for submission in records.submissions(folder) if submission.token in tokens)


def check(spec: Spec, folder: RunFolder) -> Start | None:
    """Return when and where SLURM would start a run, or one of a group; None if the executor is not SLURM.

    Raises:
        ClusterError: SLURM never would, with its message; or the cluster did not answer.
    """
    if spec.executor != "slurm":
        return None
    text = script.render(spec, folder, sbatch.new_token())
    environ = commands.scrubbed_environment(os.environ)
    return sbatch.start_in(sbatch.call(sbatch.command("--test-only"), environ, text))


def _queue(folder: RunFolder, spec: Spec, job: Job, dependency: str, note: Note) -> str:
    # importing submitit takes a tenth of a second
    from mgpu_slurm.slurm import submitit_adapter

    interrupts: list[int] = []
    environ = commands.scrubbed_environment(os.environ)

    def ask() -> str:
        with _deferred_interrupts(interrupts, note):
            return submitit_adapter.submit(text, folder, environ)

    def look() -> str | None:
        _raise_deferred(interrupts)
        return sbatch.find(folder, job.token)

    submission = ExactlyOnceSubmission(job.token, ask, look)
    try:
        text = script.render(spec, folder, job.token, job.array, dependency)
        files.write_whole(folder.submission(job.array.first if job.array else 0), text)
        job_id = submission.queue(Patience(note))
        _raise_deferred(interrupts)
        return job_id
    except KeyboardInterrupt:
        _find_out(submission, folder, note)
        raise
    finally:
        submission.write_down(folder)


def _find_out(submission: ExactlyOnceSubmission, folder: RunFolder, note: Note) -> None:
    """Report after an interrupted submission whether the job was queued anyway."""
    if submission.job_id is None and submission.is_unsure:
        try:
            submission.find(ClusterError("interrupted"), Patience(seconds=0))
        except ClusterError as unknown:
            note(str(unknown))
    if submission.job_id is not None:
        note(f"already queued as job {submission.job_id}: cancel it with `{program()} cancel {folder.run}`")


@contextlib.contextmanager
def _deferred_interrupts(interrupts: list[int], note: Note) -> Iterator[None]:
    """Defer every Ctrl-C until sbatch has answered: without its answer it is unknown whether the job is queued."""

    def hold(signum: int, _: Any) -> None:
        if not interrupts:
            note(f"waiting for sbatch to answer, at most {sbatch.TIME_LIMIT} s")
        interrupts.append(signum)

    if threading.current_thread() is not threading.main_thread():
        # only the main thread receives the interrupt
        yield
        return
    before = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _raise_deferred(interrupts: list[int]) -> None:
    """Raise the deferred Ctrl-C."""
    if interrupts:
        interrupts.clear()
        raise KeyboardInterrupt


def confirmed(folder: RunFolder) -> dict[int | None, StateChange]:
    """Return the job ids of a run or group by task, or the end of a job that never arrived in SLURM's queue."""
    found: dict[int | None, StateChange] = {}
    for submission in records.submissions(folder):
        job_id, arrived = submission.job_id, not submission.refused
        if submission.is_unconfirmed:
            job_id, arrived = _looked_for(folder, submission)
        for task in submission.tasks or [None]:
            found[task] = StateChange(job_id=submission.job_of(task, job_id)) if arrived else slurm_states.NEVER_ARRIVED
    return found


def look_for_jobs(folder: RunFolder) -> None:
    """Record the jobs of a run or group that SLURM has but that are not recorded yet."""
    for submission in records.submissions(folder):
        if submission.job_id is None and not submission.refused:
            _looked_for(folder, submission)


def _looked_for(folder: RunFolder, submission: records.Submission) -> tuple[str | None, bool]:
    """Return the job id of an unconfirmed submission, and whether it may have arrived, or still may."""
    if not is_own(folder.group.path) or is_elsewhere(records.read_state(folder), site.cluster_name()):
        # the jobs of other users are not searched, and those of another cluster cannot be
        return None, True
    try:
        job_id = sbatch.find(folder, submission.token)
    except ClusterError:
        return None, True
    if job_id is not None:
        records.record_event(folder, "submitted", job_id=job_id, token=submission.token)
    return job_id, job_id is not None or not submission.is_over or _may_be_hidden(folder, submission)


def _may_be_hidden(folder: RunFolder, submission: records.Submission) -> bool:
    """Return whether a job may be in the queue although squeue does not list it."""
    named = accounting.named(folder.run, submission.begun)
    if named is None:
        return not slurm_states.is_missing_for_long(folder, submission.token)
    return any(states.is_alive(start.state) for start in named)
