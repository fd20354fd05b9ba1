"""The current state of runs, even if no process was there to record a change."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from typing import Any

from mgpu_slurm.core import records, states
from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.core.files import is_own
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.executors import slurm_states
from mgpu_slurm.executors.base import Executor, SlurmView, is_elsewhere
from mgpu_slurm.executors.selection import EXECUTORS, is_queued
from mgpu_slurm.slurm import accounting, sbatch, site

State = dict[str, Any]

NEVER_ARRIVED: State = {
    "state": states.FAILED,
    "reason": "was never queued; `resume` submits it again",
}


def state(folder: RunFolder) -> State:
    return current([folder])[0][1]


def current(asked: Iterable[RunFolder], note: Note = quiet) -> list[tuple[RunFolder, State]]:
    """Return the current states of runs, one per run of a group.

    A run that has ended is taken from its record; for the others their executor is asked. One squeue serves all of
    them, and one sacct those that squeue no longer lists.

    Args:
        note: called if the cluster does not answer, or is not the one of a run's job.
    """
    found = [pair for folder in asked for pair in recorded(folder)]
    asks = [
        (folder, state)
        for folder, state in found
        if (executor := _executor_of_living(state)) is not None and executor.asks_slurm(state)
    ]
    here = site.cluster_name() if any(state["slurm_cluster"] for _, state in asks) else None
    away = sorted({state["slurm_cluster"] for _, state in asks if is_elsewhere(state, here)})
    ids = {folder: state["job_id"] for folder, state in asks if state["job_id"] and not is_elsewhere(state, here)}
    known = slurm_states.ask(ids, note)
    if known is None or (away and here is None):
        silent = "SLURM's controller does not answer" if shutil.which("squeue") else "no squeue on PATH"
        note(f"{silent}: showing the last known states")
    elif away:
        note(f"this is cluster {here}: showing the last known states of runs on {', '.join(away)}")
    view = SlurmView(known or {}, known is None, here)
    return [(folder, _current(folder, state, view)) for folder, state in found]


def _executor_of_living(state: State) -> Executor | None:
    """Return the executor of a living run; None also for an unreadable state, which names none."""
    return EXECUTORS.get(state["executor"]) if states.is_alive(state["state"]) else None


def _current(folder: RunFolder, state: State, view: SlurmView) -> State:
    executor = _executor_of_living(state)
    return state if executor is None else executor.current(folder, state, view)


def check_are_of_this_cluster(found: Iterable[State]) -> None:
    """Refuse a request to SLURM if one of these runs has its job on another cluster.

    Raises:
        ClusterError: a run's job is on another cluster.
    """
    named = [state for state in found if state["slurm_cluster"]]
    here = site.cluster_name() if named else None
    for state in named:
        if here is not None and is_elsewhere(state, here):
            raise ClusterError(
                f"run {state['run']} has its job on cluster {state['slurm_cluster']}, and this is {here}:"
                " call this on a login node there"
            )


def recorded(folder: RunFolder) -> list[tuple[RunFolder, State]]:
    """Return the recorded states, one per run of a group, with the ids of jobs that have not started."""
    found = records.read_states(folder)
    if any(is_queued(state) and state["job_id"] is None for _, state in found):
        submissions = _confirmed(folder.group)
        for member, recorded in found:
            if recorded["job_id"] is None and states.is_alive(recorded["state"]):
                recorded |= submissions.get(member.task, {})
    return found


def _confirmed(folder: RunFolder) -> dict[int | None, State]:
    """Return the job ids of a run or group by task, or the end of a job that never arrived in SLURM's queue."""
    found: dict[int | None, State] = {}
    for submission in records.submissions(folder):
        job_id, arrived = submission.job_id, not submission.refused
        if submission.is_unconfirmed:
            job_id, arrived = _looked_for(folder, submission)
        for task in submission.tasks or [None]:
            found[task] = {"job_id": submission.job_of(task, job_id)} if arrived else NEVER_ARRIVED
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
