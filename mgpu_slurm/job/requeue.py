"""Starting a run again from inside its job: requeued by SLURM, or where that is refused, as another job behind it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mgpu_slurm.core import records
from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.core.hostlist import compress, expand
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.request.spec import REQUEUE_EXIT_CODE, Spec
from mgpu_slurm.slurm import commands, job_identity, sbatch
from mgpu_slurm.slurm.outage import Patience

SCONTROL_TAKES = 20.0
"""Seconds for which scontrol may work on an answer: the time limit is near."""

PATIENCE = 40.0
"""Seconds for which a controller that does not answer is waited out."""


@dataclass(frozen=True)
class Job:
    """The job that this process is the batch step of."""

    id: str
    """As SLURM's commands know it: `42`, or `42_3` for a task of an array."""
    token: str
    """Of the submission that it came of."""


def starts(folder: RunFolder, job: Job, event: str) -> list[dict[str, Any]]:
    """How the run has been started again (`requeued` or `retried`), as this job or as those that it continues.

    A resumed run starts counting anew.
    """
    events = records.events(folder)
    continued = {event["token"]: event["continues"] for event in events if "continues" in event}
    tokens = [job.token]
    while tokens[-1] in continued:
        tokens.append(continued[tokens[-1]])
    return [each for each in events if each["event"] == event and each["token"] in tokens]


def start_again_in_time(folder: RunFolder, spec: Spec, job: Job, **facts: Any) -> int:
    """Puts a run back into the queue that has left before its time limit; see `start_again`.

    Args:
        facts: what else the event tells.
    """
    # the time limit is near, and the disk may be full
    with contextlib.suppress(OSError):
        records.record_event(folder, "requeued", job_id=job.id, token=job.token, **facts)
        records.update_state(folder, state="REQUEUED", reason="stopped before the time limit")
    # what was avoided stays so also where it goes on as another job
    avoided = [each["avoid"] for each in starts(folder, job, "retried")]
    return start_again(folder, spec, job, avoided[-1] if avoided else [])


def start_again(folder: RunFolder, spec: Spec, job: Job, avoid: Sequence[str] = ()) -> int:
    """Puts the run back into the queue; the exit code with which this job has to end, if SLURM lets it go so far.

    Args:
        avoid: nodes that it is not to get again.

    Raises:
        ClusterError: it is not in the queue, and why neither way worked; or nobody can tell.
    """
    with contextlib.suppress(commands.SlurmUnavailable):
        # the controller may have been reset meanwhile, and have another job of this id
        job_identity.check(folder, [job.id])
    excluded = {"exclude": _excluded(spec, avoid)} if avoid else {}
    refused = _requeue(job, excluded)
    if refused is None:
        _cancel_if_wished(folder, job.id)
        return REQUEUE_EXIT_CODE
    print(f"mgpu_slurm: job {job.id} is not requeued ({refused}): submitting another one behind it", flush=True)
    try:
        successor = _submit_behind(folder, spec, job, excluded)
    except ClusterError as also:
        raise ClusterError(f"{refused}; nor is another job known to be in the queue: {also}") from None
    records.update_state(folder, job_id=successor, reason=f"continues as job {successor}: {refused}")
    if _cancel_if_wished(folder, successor):
        return REQUEUE_EXIT_CODE
    # those that wait for this job to complete would never start otherwise
    return 0 if _pass_on(job.id, successor) else REQUEUE_EXIT_CODE


def _cancel_if_wished(folder: RunFolder, job_id: str) -> bool:
    """A cancel that came meanwhile has reached what was before; SLURM also requeues a job that was just cancelled."""
    if not folder.cancel_wish.exists():
        return False
    # where this fails the job finds the wish when it starts
    with contextlib.suppress(ClusterError):
        commands.run(commands.scancel_command([job_id]), SCONTROL_TAKES)
    return True


def can_start_without(folder: RunFolder, spec: Spec, job: Job, avoid: Sequence[str]) -> bool:
    """Whether SLURM has enough other nodes for the run than these, as far as it says."""
    options = _as_here({"exclude": _excluded(spec, avoid), **_alone(job)}, spec)
    script = str(folder.submission(_first(folder, job)))
    words = sbatch.command("--test-only", *options, script, job.token)
    try:
        return sbatch.start_in(sbatch.call(words, commands.scrubbed_environment(os.environ))) is not None
    except ClusterError:
        return False


def _excluded(spec: Spec, avoid: Sequence[str]) -> str:
    """As sbatch takes it: it replaces what was excluded before."""
    return compress(list(dict.fromkeys([*expand(spec.resources.exclude or ""), *avoid])))


def _requeue(job: Job, excluded: dict[str, str]) -> ClusterError | None:
    """Puts the job itself back into the queue, which also ends it here; why that failed, or None."""
    try:
        commands.run(commands.requeue_command(job.id), SCONTROL_TAKES)
    except ClusterError as refused:
        return refused
    if excluded:
        try:
            # only now: of a job that runs SLURM takes no such thing
            commands.run(commands.exclude_command(job.id, excluded["exclude"]), SCONTROL_TAKES)
        except ClusterError as refused:
            print(f"mgpu_slurm: job {job.id} may get {excluded['exclude']} again: {refused}", flush=True)
    return None


def _pass_on(job_id: str, successor: str) -> bool:
    """Lets all who wait for this job wait for the successor too; whether that worked."""
    try:
        waiting = commands.parse_dependants(
            commands.run(commands.dependencies_command(), SCONTROL_TAKES), job_id, successor
        )
        for dependant, dependency in waiting.items():
            commands.run(commands.dependency_command(dependant, dependency), SCONTROL_TAKES)
    except ClusterError as error:
        print(f"mgpu_slurm: jobs that wait for job {job_id} may not wait for job {successor}: {error}", flush=True)
        return False
    return True


def _alone(job: Job) -> dict[str, str]:
    """Options of sbatch for this run of the script's, behind this job, whatever the script waited for."""
    _, _, task = job.id.partition("_")
    return {"dependency": f"afterany:{job.id}", **({"array": task} if task else {})}


def _first(folder: RunFolder, job: Job) -> int:
    """Of an array: the index in the group of the array's task 0."""
    return next((each.first for each in records.submissions_of(folder) if each.token == job.token), 0)


def _submit_behind(folder: RunFolder, spec: Spec, job: Job, more: dict[str, str]) -> str:
    """Submits the job's script again, for this run alone, to start when this job has ended; its id.

    Args:
        more: options of sbatch.
    """
    token = sbatch.new_token()
    _, _, task = job.id.partition("_")
    first = _first(folder, job)
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
    """Options of sbatch as this site wants them said."""
    forms = {name: spec.rename.get(name, f"{name}={{}}") for name in options}
    return [f"--{form.replace('{}', options[name])}" for name, form in forms.items() if form is not None]
