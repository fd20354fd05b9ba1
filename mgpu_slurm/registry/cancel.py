"""Cancel runs: through SLURM, or through the supervisor of a run without a queue."""

from __future__ import annotations

import contextlib
from typing import TypeAlias

from mgpu_slurm.core import records, states
from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.executors import supervisors
from mgpu_slurm.executors.selection import is_queued
from mgpu_slurm.registry import current_state
from mgpu_slurm.registry.current_state import State
from mgpu_slurm.registry.permissions import check_may_change, owner
from mgpu_slurm.slurm import commands, job_identity

_Alive: TypeAlias = list[tuple[RunFolder, State]]


def cancel_run(folder: RunFolder) -> bool:
    """Ask the living runs of a run or group to save and end; return False if all had already ended.

    Raises:
        UserError: the run belongs to another user, or is a local run of another machine.
        ClusterError: SLURM refuses or does not answer, or the job is on another cluster.
    """
    alive = _alive(folder)
    if not alive:
        return False
    current_state.check_are_of_this_cluster(state for _, state in alive)
    if is_queued(alive[0][1]):
        if any(state["job_id"] is None for _, state in alive):
            current_state.look_for_jobs(folder.group)
            alive = _alive(folder)
        _cancel_jobs(folder, alive)
        return True
    check_may_change(folder, "cancel")
    if folder.task is None and any(_is_waiting(member, state) for member, state in alive):
        # the coordinator then starts no more runs, and waits for no dependency
        supervisors.cancel(folder, records.read_state(folder))
    reached = [_cancel_local(member, state) for member, state in alive]
    return any(reached)


def _alive(folder: RunFolder) -> _Alive:
    return [(member, state) for member, state in current_state.current([folder]) if states.is_alive(state["state"])]


def _cancel_jobs(folder: RunFolder, alive: _Alive) -> None:
    started = [member for member, state in alive if state["attempts"]]
    # their jobs may be about to requeue; an operator who cancels them may lack write access
    with contextlib.suppress(OSError):
        for member in started:
            member.cancel_wish.touch()
    told = {state["job_id"] for _, state in alive if state["job_id"] is not None}
    try:
        _scancel(folder, told)
    except ClusterError:
        with contextlib.suppress(OSError):
            for member in started:
                member.cancel_wish.unlink(missing_ok=True)
        raise
    # jobs that have not started end at once, and only SLURM reports that, for some minutes
    left = _alive(folder)
    _scancel(folder, {state["job_id"] for _, state in left if state["job_id"] is not None} - told)
    unknown = [state["run"] for _, state in left if state["job_id"] is None]
    if unknown:
        raise ClusterError(f"run {unknown[0]}: SLURM does not have its job, or not yet: try again in a minute")


def _scancel(folder: RunFolder, job_ids: set[str]) -> None:
    # one request per array: each request is a load on the controller
    jobs = sorted(job_ids) if folder.task is not None else commands.whole_jobs(sorted(job_ids))
    job_identity.check(folder, jobs)
    try:
        if jobs:
            commands.run(commands.scancel_command(jobs))
    except ClusterError as error:
        if "permission denied" not in str(error):
            raise
        raise ClusterError(f"run {folder.run} is {owner(folder)}'s, and SLURM does not let you cancel it") from None


def _cancel_local(folder: RunFolder, state: State) -> bool:
    """Cancel a local run, even one of a group that has not started yet."""
    if _is_waiting(folder, state):
        # a supervisor that is started for it meanwhile finds the request
        folder.create_task()
        folder.cancel_wish.touch()
        state = records.read_state(folder)
    if _is_waiting(folder, state):
        records.cancel_unstarted(folder, "cancelled")
        return True
    return supervisors.cancel(folder, state)


def _is_waiting(folder: RunFolder, state: State) -> bool:
    """Return whether a local run waits for its group's coordinator to start it."""
    return folder.task is not None and state["job_id"] is None
