"""Steps of a job: what srun has started in it, what is at work where, and how signals reach it."""

from __future__ import annotations

from dataclasses import dataclass

from mgpu_slurm import slurm
from mgpu_slurm.hostlist import expand


@dataclass(frozen=True)
class Step:
    """What srun started in a job."""

    step_id: str
    """`42.0`, as scancel takes it."""
    name: str
    nodes: tuple[str, ...]


def steps_command(inside: str) -> list[str]:
    return ["squeue", "--noheader", "--steps", f"--jobs={inside}", "-o", "%i|%N|%j"]


def parse_steps(output: str) -> list[Step]:
    """Steps that srun started; those of SLURM's own (`42.extern`, `42.batch`, `42.interactive`) are left out."""
    rows = [line.strip().split("|", 2) for line in output.splitlines() if line.count("|") >= 2]
    return [
        Step(step_id, name, tuple(expand(nodes)))
        for step_id, nodes, name in rows
        if step_id.rpartition(".")[2].isdigit()
    ]


def steps(inside: str) -> list[Step]:
    """What runs in the job now; nothing in one that is over.

    Raises:
        ClusterError: SLURM does not answer.
    """
    try:
        return parse_steps(slurm.run(steps_command(inside)))
    except slurm.Forgotten:
        return []


def busy(inside: str) -> dict[str, int]:
    """How many steps run on each node of the job that has any."""
    names = [name for step in steps(inside) for name in step.nodes]
    return {name: names.count(name) for name in names}


def signal_command(step_id: str, signal_name: str) -> list[str]:
    """Without a signal's name scancel kills a step at once, and so does srun when it gets a SIGTERM itself."""
    return ["scancel", f"--signal={signal_name}", step_id]


def signal_ranks(inside: str, run: str, signal_name: str) -> bool:
    """Sends a signal (`TERM`) to every process of a run's step; False where there is no such step.

    Raises:
        ClusterError: SLURM does not answer.
    """
    found = [step.step_id for step in steps(inside) if step.name == run]
    for step_id in found:
        slurm.run(signal_command(step_id, signal_name))
    return bool(found)


def end_all(inside: str) -> None:
    """Ends every step at once: ranks go on where their srun was killed.

    Raises:
        ClusterError: SLURM does not answer.
    """
    for step in steps(inside):
        slurm.run(signal_command(step.step_id, "KILL"))
