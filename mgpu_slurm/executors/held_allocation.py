"""An existing allocation, of salloc or of the user's own batch script: its resources, a run's share, and its end."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from mgpu_slurm.core.errors import ClusterError, UserError
from mgpu_slurm.core.hostlist import compress, expand
from mgpu_slurm.executors.base import HELD_JOB_VARIABLE
from mgpu_slurm.request.resources import Resources, resources_from
from mgpu_slurm.run_folder import states
from mgpu_slurm.slurm import commands, site

_EXAMPLE = "`salloc --nodes 2 --gpus-per-node 2 --time 2:00:00`"
_DECIDED = ("partition", "account", "qos", "constraint", "reservation")
"""Options that were decided when the allocation was requested."""

_FIELDS = {
    "state": r"^ +JobState=(\S+)",
    "reason": r"^ +JobState=\S+ Reason=(\S+)",
    "end": r"^ +StartTime=\S+ EndTime=(\S+)",
    "cpus_per_task": r"^ +NumNodes=\S+ NumCPUs=\S+ NumTasks=\S+ CPUs/Task=(\d+)",
    "ntasks_per_node": r"NtasksPerN:B:S:C=(\d+):",
}
_NODES = re.compile(
    r"^ +Nodes=(?P<nodes>\S+) CPU_IDs=(?P<cpus>\S+) Mem=(?P<memory>[0-9]{1,18}) GRES=(?P<gres>.*)$", re.MULTILINE
)
_MEMORY = re.compile(r"(?P<number>\d+)(?P<unit>[KMGT]?)B?", re.IGNORECASE)

PATIENCE_WITH_ENDING = 5.0
"""Seconds to wait for the reason of an ending allocation; it may be waiting for the process that asks."""


@dataclass(frozen=True)
class Node:
    """The allocation's resources on one node."""

    name: str
    cpus: int
    gpus: int
    memory: int
    """Megabytes; 0 if SLURM does not count memory."""


@dataclass(frozen=True)
class Allocation:
    """A job that holds nodes."""

    job_id: str
    state: str
    """SLURM's name of the state."""
    reason: str
    nodes: tuple[Node, ...]
    ntasks_per_node: int | None
    """As given to salloc; None if it was not."""
    cpus_per_task: int
    end: datetime | None
    """When SLURM ends it, in local time; None without a limit."""

    @property
    def label(self) -> str:
        return f"allocation {self.job_id}"

    @property
    def seconds_left(self) -> int | None:
        """Seconds until its end; None without a limit."""
        return None if self.end is None else max(0, int((self.end - datetime.now()).total_seconds()))

    def limit(self, resources: Resources) -> int | None:
        """Return the time limit in seconds of a run that starts now: what it asked for, and never more than is left."""
        limits = [limit for limit in (resources.time_limit, self.seconds_left) if limit is not None]
        return min(limits, default=None)

    def describe(self) -> str:
        """Return a description such as `job 42, n[1-2], 1:59:58 left`."""
        left = self.seconds_left
        until = "no time limit" if left is None else f"{timedelta(seconds=left)} left"
        return f"job {self.job_id}, {compress([node.name for node in self.nodes])}, {until}"


def held(environ: Mapping[str, str]) -> Allocation:
    """Return the allocation of this process.

    Raises:
        UserError: there is none, or it has ended.
        ClusterError: SLURM does not answer.
    """
    inside = environ.get(HELD_JOB_VARIABLE)
    if inside is None:
        raise UserError(
            f"--executor allocation: you hold no allocation here ({HELD_JOB_VARIABLE} is not set):"
            f" request one, such as {_EXAMPLE}, and run this in its shell"
        )
    found = ask(inside)
    if found is None or not _is_held(found):
        how = "" if found is None else f" ({found.state})"
        raise UserError(
            f"{HELD_JOB_VARIABLE}={inside}: that allocation has ended{how}:"
            f" leave this shell and request another, such as {_EXAMPLE}"
        )
    if not found.nodes:
        raise ClusterError(f"`{' '.join(show_command(inside))}` does not show the job's resources on its nodes")
    return found


def _is_held(found: Allocation) -> bool:
    return states.is_alive(states.from_slurm(found.state)) and not _is_ending(found)


def _is_ending(found: Allocation) -> bool:
    return "COMPLETING" in found.state


def show_command(inside: str) -> list[str]:
    """Return the command that shows a job with its resources on each node."""
    return ["scontrol", "show", "job", "--details", inside]


def ask(inside: str) -> Allocation | None:
    """Ask SLURM for the allocation; return None if SLURM has forgotten it.

    Raises:
        ClusterError: SLURM does not answer.
    """
    try:
        return parse(inside, commands.run(show_command(inside)))
    except commands.JobNotFound:
        return None


def parse(inside: str, output: str) -> Allocation:
    """Parse scontrol's answer; of a heterogeneous job, the first component.

    Raises:
        ClusterError: it is none.
    """
    parts = re.split(r"^JobId=", output, flags=re.MULTILINE)
    if len(parts) < 2:
        said = commands.error_line(output)[:200]
        raise ClusterError(f"`{' '.join(show_command(inside))}` does not show a job: {said}")
    text = parts[1]
    found = {name: re.search(pattern, text, re.MULTILINE) for name, pattern in _FIELDS.items()}
    values = {name: match[1] for name, match in found.items() if match is not None}
    end = commands.time_of(values.get("end", ""))
    return Allocation(
        job_id=inside,
        state=values.get("state", ""),
        reason=values.get("reason", ""),
        nodes=tuple(_nodes(text)),
        ntasks_per_node=commands.number_of(values.get("ntasks_per_node", "")) or None,
        cpus_per_task=commands.number_of(values.get("cpus_per_task", "")) or 1,
        end=None if end is None else datetime.fromisoformat(end),
    )


def _nodes(text: str) -> Iterable[Node]:
    """Yield the nodes; those with the same share of the job are on one line."""
    for match in _NODES.finditer(text):
        cpus = len(commands.nodes_in(f"[{match['cpus']}]"))
        for name in commands.nodes_in(match["nodes"]):
            yield Node(name, cpus, site.gpus_in(match["gres"]).total(), int(match["memory"]))


# -- a run's share


def take(found: Allocation, given: Mapping[str, Any]) -> Resources:
    """Return the resources of a run with these flags; the allocation decides the rest.

    Raises:
        UserError: a flag cannot apply, or asks for more than there is.
    """
    asked = resources_from(dict(given), "resources")
    nodes = _eligible(found, asked)
    gpus = min(node.gpus for node in nodes) if asked.gpus_per_node is None else asked.gpus_per_node
    resources = replace(
        asked,
        nodes=asked.nodes if "nodes" in given else len(nodes),
        gpus_per_node=gpus if gpus or asked.gpus_per_node is not None else None,
        ntasks_per_node=asked.ntasks_per_node or found.ntasks_per_node,
    )
    # srun does not inherit cpus_per_task
    taken_over = replace(resources, cpus_per_task=found.cpus_per_task)
    if (
        asked.cpus_per_task is None
        and found.cpus_per_task > 1
        and not any(_shortage(found, n, taken_over) for n in nodes)
    ):
        resources = taken_over
    check(found, resources)
    return resources


def check(found: Allocation, resources: Resources) -> None:
    """Raise UserError if the allocation lacks a run's resources."""
    choose(found, resources)
    left = found.seconds_left
    if left is not None and resources.time_limit is not None and resources.time_limit > left:
        raise UserError(
            f"--time {resources.time}: {found.label} has {timedelta(seconds=left)} left:"
            " request less, or leave it out to use all of it"
        )


def choose(found: Allocation, resources: Resources, busy: Mapping[str, int] | None = None) -> list[Node]:
    """Return the nodes for a run's ranks, in the allocation's order.

    Args:
        busy: the load of each node; the least loaded ones are taken.

    Raises:
        UserError: there are not enough nodes.
    """
    nodes = _eligible(found, resources)
    if resources.nodes > len(nodes):
        has = compress([node.name for node in nodes])
        raise UserError(f"--nodes {resources.nodes}: {found.label} has {len(nodes)} for this run ({has})")
    short = {node: _shortage(found, node, resources) for node in nodes}
    able = [node for node in nodes if not short[node]]
    if resources.nodes > len(able):
        raise UserError(next(filter(None, short.values())))
    able.sort(key=lambda node: (busy or {}).get(node.name, 0))
    return sorted(able[: resources.nodes], key=nodes.index)


def _eligible(found: Allocation, asked: Resources) -> list[Node]:
    """Return the nodes that the flags permit; refuse flags that cannot apply in an allocation."""
    for name in _DECIDED:
        if getattr(asked, name) is not None:
            raise UserError(
                f"--{name} {getattr(asked, name)}: {found.label} has fixed this already:"
                " leave it out, or use --executor slurm"
            )
    for name in asked.sbatch:
        raise UserError(f"--sbatch {name}: {found.label} does not use sbatch: leave it out")
    names = [node.name for node in found.nodes]
    for name in expand(asked.nodelist or ""):
        if name not in names:
            raise UserError(f"--nodelist {asked.nodelist}: {name} is not in {found.label}, which has {compress(names)}")
    wanted, excluded = expand(asked.nodelist or "") or names, expand(asked.exclude or "")
    nodes = [node for node in found.nodes if node.name in wanted and node.name not in excluded]
    if not nodes:
        raise UserError(f"--exclude {asked.exclude}: leaves no node of {found.label}, which has {compress(names)}")
    return nodes


def _shortage(found: Allocation, node: Node, asked: Resources) -> str:
    """Return what the node lacks for its ranks; empty if nothing."""
    here = f"{found.label} has {{}} on {node.name}: request less, or a larger allocation"
    if (asked.gpus_per_node or 0) > node.gpus:
        return f"--gpus-per-node {asked.gpus_as_requested}: {here.format(node.gpus)}"
    cores = asked.ranks_per_node * (asked.cpus_per_task or 0)
    if cores > node.cpus:
        of = f"{asked.ranks_per_node} ranks on a node need {cores} cores, but {here.format(node.cpus)}"
        return f"--cpus-per-task {asked.cpus_per_task}: {of}"
    if asked.mem is not None and node.memory and _megabytes(asked.mem) > node.memory:
        return f"--mem {asked.mem}: {here.format(f'{node.memory}M')}"
    return ""


def _megabytes(text: str) -> float:
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise UserError(f"--mem {text!r}: expected a number with K, M, G or T, such as 64G")
    return int(match["number"]) * commands.MEGABYTES[match["unit"].upper()]


def shares_cores(nodes: Iterable[Node], resources: Resources) -> bool:
    """Return whether a node has more ranks than cores, for which srun needs an option."""
    return resources.cpus_per_task is None and any(resources.ranks_per_node > node.cpus for node in nodes)


def srun_options(found: Allocation, nodes: list[Node], resources: Resources, run: str) -> list[str]:
    """Return srun's options for a run's step: its nodes, its resources, and its name, by which it is found later.

    Steps may overlap in an allocation, for example with a shell on one of its nodes.
    """
    options = [f"--jobid={found.job_id}", "--overlap", f"--job-name={run}"]
    options.append(f"--nodelist={','.join(node.name for node in nodes)}")
    if resources.cpus_per_task is not None:
        options.append(f"--cpus-per-task={resources.cpus_per_task}")
    if resources.gpus_per_node:
        options.append(f"--gres=gpu:{resources.gpus_as_requested}")
    elif resources.gpus_per_node == 0 and any(node.gpus for node in nodes):
        # a step without a request gets all GPUs of the job
        options.append("--gres=none")
    if resources.mem is not None:
        options.append(f"--mem={resources.mem}")
    if shares_cores(nodes, resources):
        options.append("--overcommit")
    return options


# -- the end of an allocation


def ending(inside: str, state: str) -> tuple[str, str]:
    """Return the state and reason of a run whose allocation has ended.

    Args:
        state: how the allocation's job ended, one of `states`.
    """
    how = {
        states.CANCELLED: "was cancelled",
        states.NODE_FAIL: "lost a node",
        states.PREEMPTED: "was preempted",
        states.TIMEOUT: "reached its time limit",
    }
    # an allocation counts as completed when its shell exits
    of_run = state if state in how else states.CANCELLED
    return of_run, f"its allocation {inside} {how.get(state, 'was released')}; continue with `resume` inside a new one"


def lost(inside: str) -> tuple[str, str] | None:
    """Return the state and reason of a run if its allocation has ended; None if it has not, or that is unknown."""
    give_up = time.monotonic() + PATIENCE_WITH_ENDING
    while True:
        try:
            found = ask(inside)
        except ClusterError:
            return None
        if found is None:
            return ending(inside, states.UNKNOWN)
        if not _is_ending(found):
            state = states.from_slurm(found.state)
            return None if states.is_alive(state) else ending(inside, state)
        if found.reason == "TimeLimit" or time.monotonic() > give_up:
            return ending(inside, states.TIMEOUT if found.reason == "TimeLimit" else states.UNKNOWN)
        time.sleep(0.2)
