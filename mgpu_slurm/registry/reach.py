"""Reach the processes of living runs: cancel them, or execute a command on their nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.hostlist import compress
from mgpu_slurm.executors.base import Living
from mgpu_slurm.executors.selection import EXECUTORS
from mgpu_slurm.registry import current_state, sweep_state
from mgpu_slurm.registry.index import check_may_change
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder import states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState


def cancel(folder: RunFolder) -> bool:
    """Ask the living runs of a run or group to save and end; return False if all had already ended.

    Raises:
        UserError: the run belongs to another user, or is a local run of another machine.
        ClusterError: SLURM refuses or does not answer, or the job is on another cluster.
    """
    folder = sweep_state.confirmed_by(folder)
    living = _living(folder)
    if not living:
        return False
    current_state.check_are_of_this_cluster(state for _, state in living)
    found = [EXECUTORS[state.executor] for _, state in living if state.executor in EXECUTORS]
    if not found:
        reason = living[0][1].reason or "its state is empty"
        raise UserError(f"run {folder.run}: {reason}, so it is unknown where it runs: end it with scancel or kill")
    executor = found[0]
    if not executor.is_queued:
        # SLURM itself knows who may cancel a job
        check_may_change(folder, "cancel")
    return executor.cancel(folder, living, lambda: _living(folder))


def _living(folder: RunFolder) -> Living:
    return [(member, state) for member, state in current_state.current([folder]) if states.is_alive(state.state)]


def words(folder: RunFolder, state: RunState, node: str | None, command: Sequence[str], terminal: bool) -> list[str]:
    """Return the command line to execute.

    Args:
        state: the run's state.
        node: one of the run's nodes; None for the first.
        command: what to run there; empty for the user's shell.
        terminal: whether it is interactive.

    Raises:
        UserError: the run is not running, or not on that node, or not on this machine.
        ClusterError: SLURM does not answer, or the run's job is on another cluster.
    """
    if state.state != states.RUNNING:
        raise UserError(f"run {folder.run} is {state.state}: a shell needs a running job")
    current_state.check_are_of_this_cluster([state])
    way = EXECUTORS[state.executor].shell(folder, state)
    if node is not None and node not in way.nodes:
        raise UserError(f"--node {node}: run {folder.run} is on {compress(way.nodes)}")
    inner = list(command) or [os.environ.get("SHELL") or "/bin/bash"]
    if way.job_id is None:
        return inner
    # overlap: the ranks' step holds all of the job's cores
    srun = ["srun", f"--jobid={way.job_id}", "--overlap", "--export=ALL", "--nodes=1", "--ntasks=1"]
    srun += [f"--nodelist={node or way.nodes[0]}", f"--chdir={place(folder)}"]
    return [*srun, *(["--pty"] if terminal else []), *inner]


def place(folder: RunFolder) -> Path:
    """Return the working directory of the ranks."""
    return folder.code / read_spec(folder).workdir
