"""Restarts a run from inside its job: SLURM requeues the job, or, if refused, another job is submitted after it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from mgpu_slurm.core import log_lines
from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.core.hostlist import compress, expand
from mgpu_slurm.job import retry_policy
from mgpu_slurm.request.spec import REQUEUE_EXIT_CODE, Spec
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Event
from mgpu_slurm.slurm import commands, job_identity, sbatch
from mgpu_slurm.slurm.commands import Patience

SCONTROL_TAKES = 20.0
"""Time-out of scontrol in seconds: the time limit is near."""

PATIENCE = 40.0
"""Seconds to wait for a controller that does not answer."""


@dataclass(frozen=True)
class Job:
    """The job whose batch step is this process."""

    folder: RunFolder
    """The folder of its run."""
    spec: Spec
    id: str
    """Id for SLURM's commands: `42`, or `42_3` for an array task."""
    token: str
    """Token of its submission."""

    @property
    def nodes(self) -> list[str]:
        return expand(os.environ["SLURM_JOB_NODELIST"])


def chain_events(job: Job, event: str) -> list[Event]:
    """Return the run's `requeued` or `retried` events in this job and in the jobs that it continues.

    Resuming a run resets the count.
    """
    events = records.events(job.folder)
    continued = {event.token: event.continues for event in events if event.continues is not None}
    tokens = [job.token]
    while tokens[-1] in continued:
        tokens.append(continued[tokens[-1]])
    return [each for each in events if each.event == event and each.token in tokens]


def requeue_before_limit(job: Job, asked: Event) -> int:
    """Requeue a run that has stopped before its time limit; see `restart`.

    Args:
        asked: See `retry_policy.requeue_event`.
    """
    # the time limit is near, and the disk may be full
    with contextlib.suppress(OSError):
        facts = retry_policy.facts_of(asked)
        records.record_event(job.folder, "requeued", job_id=job.id, token=job.token, **facts)
        records.update_state(job.folder, state="REQUEUED", reason="stopped before the time limit")
    # avoided nodes stay avoided if the run continues as another job
    avoided = [each.avoid for each in chain_events(job, "retried")]
    return restart(job, avoided[-1] if avoided else [])


def restart(job: Job, avoid: Sequence[str] = ()) -> int:
    """Requeue the run; return the exit code with which this job has to end, if SLURM does not kill it before.

    Args:
        avoid: Nodes that it must not get again.

    Raises:
        ClusterError: The run is not in the queue, with the reason why neither way worked; or this is unknown.
    """
    folder = job.folder
    with contextlib.suppress(commands.SlurmUnavailable):
        # the controller may have been reset, so that this id is another job's
        job_identity.check(folder, [job.id])
    excluded = {"exclude": _excluded(job.spec, avoid)} if avoid else {}
    refused = _requeue(job, excluded)
    if refused is None:
        _cancel_if_requested(folder, job.id)
        return REQUEUE_EXIT_CODE
    log_lines.say(f"cannot requeue job {job.id} ({refused}): submitting a job that continues it")
    try:
        successor = _submit_behind(job, excluded)
    except ClusterError as also:
        raise ClusterError(f"{refused}; nor could a job that continues it be queued: {also}") from None
    records.update_state(folder, job_id=successor, reason=f"continues as job {successor}: {refused}")
    if _cancel_if_requested(folder, successor):
        return REQUEUE_EXIT_CODE
    # else jobs that wait for this one to complete would never start
    return 0 if _pass_on(job.id, successor) else REQUEUE_EXIT_CODE


def _cancel_if_requested(folder: RunFolder, job_id: str) -> bool:
    """Cancel the job if a cancel was requested; return whether it was.

    A cancel may only have reached the previous job, and SLURM also requeues a job that was just cancelled.
    """
    if not folder.cancel_request.exists():
        return False
    # if this fails, the job finds the request when it starts
    with contextlib.suppress(ClusterError):
        commands.run(commands.scancel_command([job_id]), SCONTROL_TAKES)
    return True


def can_start_without(job: Job, avoid: Sequence[str]) -> bool:
    """Return whether SLURM has enough nodes for the run without these, according to `sbatch --test-only`."""
    options = _as_here({"exclude": _excluded(job.spec, avoid), **_alone(job)}, job.spec)
    script = str(job.folder.submission(_first(job)))
    words = sbatch.command("--test-only", *options, script, job.token)
    try:
        return sbatch.start_in(sbatch.call(words, commands.scrubbed_environment(os.environ))) is not None
    except ClusterError:
        return False


def _excluded(spec: Spec, avoid: Sequence[str]) -> str:
    """Return the nodes to exclude in sbatch's format, which replaces the earlier list."""
    return compress(list(dict.fromkeys([*expand(spec.resources.exclude or ""), *avoid])))


def _requeue(job: Job, excluded: dict[str, str]) -> ClusterError | None:
    """Requeue the job itself, which also ends this process; return the error if that failed, else None."""
    try:
        commands.run(commands.requeue_command(job.id), SCONTROL_TAKES)
    except ClusterError as refused:
        return refused
    if excluded:
        try:
            # only now: SLURM does not change this for a running job
            commands.run(commands.exclude_command(job.id, excluded["exclude"]), SCONTROL_TAKES)
        except ClusterError as refused:
            log_lines.say(f"job {job.id} may run on {excluded['exclude']} again: {refused}")
    return None


def _pass_on(job_id: str, successor: str) -> bool:
    """Make all jobs that wait for this one wait for the successor too; return whether that worked."""
    try:
        waiting = commands.parse_dependants(
            commands.run(commands.dependencies_command(), SCONTROL_TAKES), job_id, successor
        )
        for dependant, dependency in waiting.items():
            commands.run(commands.dependency_command(dependant, dependency), SCONTROL_TAKES)
    except ClusterError as error:
        log_lines.say(f"jobs that wait for job {job_id} may not wait for job {successor}: {error}")
        return False
    return True


def _alone(job: Job) -> dict[str, str]:
    """Return sbatch options to run only this run of the script, after this job, whatever the script waited for."""
    _, _, task = job.id.partition("_")
    return {"dependency": f"afterany:{job.id}", **({"array": task} if task else {})}


def _first(job: Job) -> int:
    """Return the index in the group of the array's task 0."""
    return next((each.first for each in records.submissions_of(job.folder) if each.token == job.token), 0)


def _submit_behind(job: Job, more: dict[str, str]) -> str:
    """Submit the job's script again, for this run only, to start when this job has ended; return the new job's id.

    Args:
        more: Further options for sbatch.
    """
    folder, spec, token = job.folder, job.spec, sbatch.new_token()
    _, _, task = job.id.partition("_")
    first = _first(job)
    part = {"first": first, "tasks": str(folder.task)} if task else {}
    records.record_event(folder, "submitting", token=token, continues=job.token, **part)
    options = {"comment": sbatch.comment(spec, token), **_alone(job), **more}
    words = sbatch.command("--parsable", *_as_here(options, spec), str(folder.submission(first)), token)
    environ = commands.scrubbed_environment(os.environ)
    submission = sbatch.ExactlyOnceSubmission(
        token,
        lambda: sbatch.job_id_in(sbatch.call(words, environ)),
        lambda: sbatch.find(folder, token),
    )
    try:
        new = submission.queue(Patience(print, PATIENCE))
    finally:
        submission.write_down(folder)
    return f"{new}_{task}" if task else new


def _as_here(options: dict[str, str], spec: Spec) -> list[str]:
    """Return options for sbatch in the form that this site requires (`rename` in mgpu.yaml)."""
    forms = {name: spec.rename.get(name, f"{name}={{}}") for name in options}
    return [f"--{form.replace('{}', options[name])}" for name, form in forms.items() if form is not None]
