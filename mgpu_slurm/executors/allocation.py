"""The executor for an existing allocation of salloc or a batch script: a supervisor starts steps of that job.

What only a request needs is imported there: `status` loads this module too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager

from mgpu_slurm.core.retry import Note
from mgpu_slurm.executors import slurm_states, supervisors
from mgpu_slurm.executors.base import (
    HELD_JOB_VARIABLE,
    SUPERVISOR_LOST,
    Asked,
    Executor,
    Living,
    Resolved,
    Shell,
    SlurmView,
    Start,
    ended_unseen,
    job_of,
)
from mgpu_slurm.request.spec import Spec
from mgpu_slurm.run_folder import states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState, StateChange
from mgpu_slurm.slurm.commands import wait_out


class AllocationExecutor(Executor):
    """Runs in the allocation of this process."""

    name = "allocation"

    def resolve(self, asked: Asked, note: Note) -> Resolved:
        from mgpu_slurm.executors import held_allocation

        # the cluster file's flags are only for new requests to SLURM
        held = wait_out(lambda: held_allocation.held(os.environ), note)
        resources = held_allocation.take(held, asked.flags)
        count = resources.gpus_per_node
        how = "as requested" if asked.flags.get("gpus-per-node") is not None else f"as in {held.label}"
        notes = [f"gpus      {count} per node, {how}" if count else f"gpus      none, {how}"]
        nodes = held_allocation.choose(held, resources)
        if held_allocation.shares_cores(nodes, resources):
            least = min(node.cpus for node in nodes)
            notes.append(
                f"cores     {least} on a node, shared by {resources.ranks_per_node} ranks:"
                " pass --ntasks-per-node and --cpus-per-task to salloc for more"
            )
        return Resolved(resources, held.limit(resources), tuple(notes), held.describe())

    def start(self, spec: Spec, run: RunFolder, now_at: RunFolder) -> AbstractContextManager[Start]:
        return supervisors.supervisor(spec, run, now_at, os.environ[HELD_JOB_VARIABLE])

    def restart(self, spec: Spec, run: RunFolder) -> AbstractContextManager[Start]:
        from mgpu_slurm.executors import held_allocation

        held_allocation.check(held_allocation.held(os.environ), spec.resources)
        supervisors.await_coordinator(run.group)
        return self.start(spec, run, run)

    def asks_slurm(self, state: RunState) -> bool:
        """Return whether its supervisor is not known to be alive."""
        return not (supervisors.is_here(state) and supervisors.is_supervised(state))

    def current(self, folder: RunFolder, state: RunState, slurm: SlurmView) -> RunState:
        """Return the run's state; it is alive while both its supervisor and the allocation are."""
        if not self.asks_slurm(state):
            return state
        if (last_known := slurm.last_known(state)) is not None:
            return last_known
        if state.job_id is not None:
            job = slurm_states.settled(folder, state, slurm.known[folder])
            if job.state is not None and not states.is_alive(job.state):
                from mgpu_slurm.executors import held_allocation

                of_run, reason = held_allocation.ending(state.job_id, job.state)
                return ended_unseen(folder, state, StateChange(of_run, reason, job.ended))
            if job.reason == slurm_states.UNLISTED.reason:
                return state.updated(job)
        if supervisors.is_here(state):
            return ended_unseen(folder, state, StateChange(states.FAILED, SUPERVISOR_LOST))
        return state

    def cancel(self, folder: RunFolder, living: Living, look_again: Callable[[], Living]) -> bool:
        return supervisors.cancel_all(folder, living)

    def shell(self, folder: RunFolder, state: RunState) -> Shell:
        job_id, _, _ = job_of(state).partition(".")
        return Shell(supervisors.started_nodes(folder), job_id)
