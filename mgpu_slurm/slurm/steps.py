"""Job steps: list those that srun has started, count them per node, and send them signals."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import dataclass

from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.slurm import commands
from mgpu_slurm.slurm.commands import wait_out

END_SECONDS = 60.0
"""Seconds for which a step that was killed may still exist."""

END_PAUSE = 0.5
"""Seconds between two checks for it."""


@dataclass(frozen=True)
class Step:
    """A step that srun started in a job."""

    step_id: str
    """`42.0`, as scancel takes it."""
    name: str
    nodes: tuple[str, ...]


def steps_command(inside: str) -> list[str]:
    return ["squeue", "--noheader", "--steps", f"--jobs={inside}", "-o", "%i|%N|%j"]


def parse_steps(output: str) -> list[Step]:
    """Return the steps that srun started, without SLURM's own (`42.extern`, `42.batch`, `42.interactive`).

    Raises:
        ClusterError: the nodes of a step cannot be read.
    """
    rows = [line.strip().split("|", 2) for line in output.splitlines() if line.count("|") >= 2]
    return [
        Step(step_id, name, tuple(commands.nodes_in(nodes)))
        for step_id, nodes, name in rows
        if step_id.rpartition(".")[2].isdigit()
    ]


def show_command(inside: str) -> list[str]:
    """Return the command that also asks the job's step manager; with one, the controller and squeue list no steps."""
    return ["scontrol", "show", "step", "--oneliner", inside]


def parse_shown(output: str) -> list[Step]:
    """Parse the output of `show_command`; like `parse_steps`."""
    rows = [commands.pairs_in(line) for line in output.splitlines()]
    lines = [f"{row['StepId']}|{row.get('NodeList', '')}|{row.get('Name', '')}" for row in rows if "StepId" in row]
    return parse_steps("\n".join(lines))


def steps(inside: str) -> list[Step]:
    """Return the steps that are running in a job; none if it has ended.

    Raises:
        ClusterError: SLURM does not answer.
    """
    try:
        return parse_steps(commands.run(steps_command(inside))) or parse_shown(commands.run(show_command(inside)))
    except commands.JobNotFound:
        return []
    except ClusterError as error:
        # scontrol's messages for a job without steps
        if re.search(r"Job step \S+ not found|No job steps", str(error)):
            return []
        raise


def busy(inside: str) -> dict[str, int]:
    """Return the number of running steps for each node of the job that has any."""
    names = [name for step in steps(inside) for name in step.nodes]
    return {name: names.count(name) for name in names}


def signal_command(step_id: str, signal_name: str) -> list[str]:
    """Return the command that signals a step.

    Without a signal's name scancel kills a step at once, and so does srun when it receives SIGTERM itself.
    """
    return ["scancel", f"--signal={signal_name}", step_id]


def signal_ranks(inside: str, run: str, signal_name: str) -> bool:
    """Send a signal such as `TERM` to every process of a run's step; return False if there is no such step.

    Raises:
        ClusterError: SLURM does not answer.
    """
    found = [step.step_id for step in steps(inside) if step.name == run]
    for step_id in found:
        commands.run(signal_command(step_id, signal_name))
    return bool(found)


def end(inside: str, run: str) -> None:
    """Kill a run's step and wait until it is gone: ranks keep running after their srun was killed.

    Raises:
        ClusterError: SLURM does not answer, or cannot end it.
    """
    give_up = time.monotonic() + END_SECONDS
    while found := [step.step_id for step in wait_out(lambda: steps(inside)) if step.name == run]:
        if time.monotonic() > give_up:
            raise ClusterError(f"step {found[0]} is still there {END_SECONDS:g} s after it was killed")
        for step_id in found:
            # it may have just ended
            with suppress(ClusterError):
                commands.run(signal_command(step_id, "KILL"))
        time.sleep(END_PAUSE)
