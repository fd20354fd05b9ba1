"""The executor for this machine: simulated nodes, and a supervisor process in place of SLURM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from mgpu_slurm.core import node_gpus
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import counted
from mgpu_slurm.core.retry import Note
from mgpu_slurm.executors import supervisors
from mgpu_slurm.executors.base import (
    SUPERVISOR_LOST,
    Asked,
    Executor,
    Living,
    Resolved,
    Shell,
    SlurmView,
    Start,
    ended_unseen,
)
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.resources import Resources, resources_from
from mgpu_slurm.request.spec import Spec
from mgpu_slurm.run_folder import states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState, StateChange


class LocalExecutor(Executor):
    """Runs on this machine."""

    name = "local"
    is_this_machine = True

    def resolve(self, asked: Asked, note: Note) -> Resolved:
        resources = resources_from(configs.merge(asked.defaults, asked.flags), "resources")
        resources, how = _with_gpus(resources, asked.workers)
        return Resolved(resources, resources.time_limit, (f"gpus      {how}",))

    def start(self, spec: Spec, run: RunFolder, now_at: RunFolder) -> AbstractContextManager[Start]:
        return supervisors.supervisor(spec, run, now_at)

    def restart(self, spec: Spec, run: RunFolder) -> AbstractContextManager[Start]:
        supervisors.await_coordinator(run.group)
        return self.start(spec, run, run)

    def current(self, folder: RunFolder, state: RunState, slurm: SlurmView) -> RunState:
        if state.supervisor is None or supervisors.is_supervised(state):
            return state
        return ended_unseen(folder, state, StateChange(states.FAILED, SUPERVISOR_LOST))

    def cancel(self, folder: RunFolder, living: Living, look_again: Callable[[], Living]) -> bool:
        return supervisors.cancel_all(folder, living)

    def shell(self, folder: RunFolder, state: RunState) -> Shell:
        if not supervisors.is_here(state):
            raise UserError(f"run {folder.run} is a local run on {state.host}: run this there")
        return Shell(supervisors.started_nodes(folder), None)


def _with_gpus(resources: Resources, workers: int) -> tuple[Resources, str]:
    """Return the resources with the GPUs per node decided, and the reason.

    Args:
        workers: how many share the machine; if there are too few GPUs for all, some wait for others to end.
    """
    available = len(node_gpus.of_this_machine())
    asked = resources.gpus_per_node
    if asked is not None:
        if asked * resources.nodes > available:
            nodes = counted(resources.nodes, "simulated node")
            needed = counted(asked * resources.nodes, "GPU")
            raise UserError(
                f"--gpus-per-node {resources.gpus_as_requested} on {nodes} needs {needed},"
                f" but this machine has {available}: lower one of them, or use --gpus-per-node 0"
            )
        return resources, f"{asked} per simulated node, as requested"
    share = max(available // (resources.nodes * workers), min(1, available // resources.nodes))
    if share == 0:
        few = f"{available} for {resources.nodes} nodes" if available else "no GPU on this machine"
        # set for the ranks too, which would otherwise all use the same GPU
        return replace(resources, gpus_per_node=0), f"none: {few}"
    return replace(resources, gpus_per_node=share), f"{share} per simulated node, this machine's {available} divided"
