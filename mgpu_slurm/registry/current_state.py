"""The current state of runs, even if no process was there to record a change."""

from __future__ import annotations

import shutil
from collections.abc import Iterable

from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.executors import slurm_states
from mgpu_slurm.executors.base import Executor, SlurmView, is_elsewhere
from mgpu_slurm.executors.selection import EXECUTORS, is_queued
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState, StateChange
from mgpu_slurm.slurm import site


def state(folder: RunFolder) -> RunState:
    return current([folder])[0][1]


def current(asked: Iterable[RunFolder], note: Note = quiet) -> list[tuple[RunFolder, RunState]]:
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
    here = site.cluster_name() if any(state.slurm_cluster for _, state in asks) else None
    away = sorted({state.slurm_cluster or "" for _, state in asks if is_elsewhere(state, here)})
    ids = {folder: state.job_id for folder, state in asks if state.job_id and not is_elsewhere(state, here)}
    known = slurm_states.ask(ids, note)
    if known is None or (away and here is None):
        silent = "SLURM's controller does not answer" if shutil.which("squeue") else "no squeue on PATH"
        note(f"{silent}: showing the last known states")
    elif away:
        note(f"this is cluster {here}: showing the last known states of runs on {', '.join(away)}")
    view = SlurmView(known or {}, known is None, here)
    return [(folder, _current(folder, state, view)) for folder, state in found]


def _executor_of_living(state: RunState) -> Executor | None:
    """Return the executor of a living run; None also for an unreadable state, which names none."""
    return EXECUTORS.get(state.executor) if states.is_alive(state.state) else None


def _current(folder: RunFolder, state: RunState, view: SlurmView) -> RunState:
    executor = _executor_of_living(state)
    return state if executor is None else executor.current(folder, state, view)


def check_are_of_this_cluster(found: Iterable[RunState]) -> None:
    """Refuse a request to SLURM if one of these runs has its job on another cluster.

    Raises:
        ClusterError: a run's job is on another cluster.
    """
    named = [state for state in found if state.slurm_cluster]
    here = site.cluster_name() if named else None
    for state in named:
        if here is not None and is_elsewhere(state, here):
            raise ClusterError(
                f"run {state.run} has its job on cluster {state.slurm_cluster}, this is {here}:"
                " run this on a login node there"
            )


def recorded(folder: RunFolder) -> list[tuple[RunFolder, RunState]]:
    """Return the recorded states, one per run of a group, with the ids of jobs that have not started."""
    found = records.read_states(folder)
    if not any(is_queued(state) and state.job_id is None for _, state in found):
        return found
    # what submits jobs is rarely needed here, and takes time to import
    from mgpu_slurm.executors import slurm_queue

    submissions = slurm_queue.confirmed(folder.group)
    return [
        (member, state.updated(submissions.get(member.task, StateChange())) if _lacks_job(state) else state)
        for member, state in found
    ]


def _lacks_job(state: RunState) -> bool:
    return state.job_id is None and states.is_alive(state.state)
