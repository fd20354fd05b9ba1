"""A shell, or one command, beside the ranks of a run: on one of its nodes, with its cores, memory and GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mgpu_slurm.core import records, states
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.hostlist import compress
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.executors import supervisors
from mgpu_slurm.registry import current_state
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.slurm import jobs


def words(
    folder: RunFolder, facts: dict[str, Any], node: str | None, command: Sequence[str], terminal: bool
) -> list[str]:
    """What to execute.

    Args:
        facts: the run's state.
        node: one of the run's; None for its first.
        command: what to run there; empty for the user's shell.
        terminal: whether somebody sits in front of it.

    Raises:
        UserError: the run is not running, or not on that node, or not on this machine.
        ClusterError: SLURM does not answer, or it is another cluster's that has the run.
    """
    if facts["state"] != states.RUNNING:
        raise UserError(f"run {folder.run} is {facts['state']}: there is nothing to be beside until it runs")
    if facts["executor"] == "local" and not supervisors.is_here(facts):
        raise UserError(f"run {folder.run} is a local run of {facts['host']}: call this there")
    current_state.check_are_of_this_cluster([facts])
    job_id, nodes = _place(folder, facts)
    if node is not None and node not in nodes:
        raise UserError(f"--node {node}: run {folder.run} has {compress(nodes)}")
    inner = list(command) or [os.environ.get("SHELL") or "/bin/bash"]
    if facts["executor"] == "local":
        return inner
    # overlap: the ranks' step holds all of the job's cores
    srun = ["srun", f"--jobid={job_id}", "--overlap", "--export=ALL", "--nodes=1", "--ntasks=1"]
    srun += [f"--nodelist={node or nodes[0]}", f"--chdir={place(folder)}"]
    return [*srun, *(["--pty"] if terminal else []), *inner]


def _place(folder: RunFolder, facts: dict[str, Any]) -> tuple[str, list[str]]:
    """The job id as srun takes it, and the run's nodes."""
    if facts["executor"] == "slurm":
        return jobs.place_of(facts["job_id"])
    started = [event for event in records.events(folder) if event["event"] == "started"]
    if not started:
        raise UserError(f"run {folder.run} has not started its ranks yet: try again in a moment")
    job_id, _, _ = facts["job_id"].partition(".")
    return job_id, started[-1]["nodes"]


def place(folder: RunFolder) -> Path:
    """Where the ranks stand."""
    return folder.code / read_spec(folder).workdir
