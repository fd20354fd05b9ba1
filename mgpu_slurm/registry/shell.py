"""A shell, or one command, next to the ranks of a run: on one of its nodes, with its cores, memory and GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mgpu_slurm.core import states
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.hostlist import compress
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.executors.selection import EXECUTORS
from mgpu_slurm.registry import current_state
from mgpu_slurm.request.spec import read_spec


def words(
    folder: RunFolder, facts: dict[str, Any], node: str | None, command: Sequence[str], terminal: bool
) -> list[str]:
    """Return the command line to execute.

    Args:
        facts: the run's state.
        node: one of the run's nodes; None for the first.
        command: what to run there; empty for the user's shell.
        terminal: whether it is interactive.

    Raises:
        UserError: the run is not running, or not on that node, or not on this machine.
        ClusterError: SLURM does not answer, or the run's job is on another cluster.
    """
    if facts["state"] != states.RUNNING:
        raise UserError(f"run {folder.run} is {facts['state']}: a shell needs a running job")
    current_state.check_are_of_this_cluster([facts])
    way = EXECUTORS[facts["executor"]].shell(folder, facts)
    if node is not None and node not in way.nodes:
        raise UserError(f"--node {node}: run {folder.run} has {compress(way.nodes)}")
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
