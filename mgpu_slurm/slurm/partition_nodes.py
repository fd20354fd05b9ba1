"""List the nodes of a partition as SLURM sees them, and tie each task of a held job array to one of them.

sbatch has one `--nodelist` for a whole array, but `scontrol update` changes that of a task that has not started.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.slurm import commands, site

_LINE = re.compile(
    r"(?P<name>[^|]+)\|(?P<partition>[^|*]+)(?P<default>\*?)\|(?P<state>[^|]+)\|(?P<user>[^|]*)\|(?P<time>[^|]*)"
    # a reason may contain any character
    r"\|(?P<reason>.*)"
)


@dataclass(frozen=True)
class Node:
    """A node in SLURM's own words."""

    name: str
    state: str
    """As sinfo prints it: `idle`, `drained`, `down*`."""
    reason: str = ""
    """Why it takes no jobs, with who said so and when; empty without a reason."""

    @property
    def is_unusable(self) -> bool:
        return site.is_unusable(self.state)

    @property
    def is_idle(self) -> bool:
        return self.state.startswith("idle")

    @property
    def may_have_room(self) -> bool:
        """Return whether a job might start on it now; one that is `mixed` or `planned` may fit."""
        return not (self.is_unusable or self.state.startswith(("alloc", "comp")))

    @property
    def words(self) -> str:
        """Return its state with the reason, in one line."""
        return f"{self.state}: {self.reason}" if self.reason else f"{self.state}, without a reason"


def nodes_command(partition: str | None) -> list[str]:
    """Return the command that lists the nodes of a partition (or several, by commas), or of all."""
    chosen = "--all" if partition is None else f"--partition={partition}"
    return ["sinfo", "--noheader", "--Node", chosen, "-o", "%N|%P|%T|%u|%H|%E"]


def parse_nodes(output: str, partition: str | None) -> list[Node]:
    """Return the nodes in SLURM's order, each once.

    Args:
        output: the output of `nodes_command`.
        partition: as the job names it; None for the cluster's default.
    """
    found = [_LINE.fullmatch(line.strip()) for line in output.splitlines()]
    lines = [line for line in found if line is not None and (partition is not None or line["default"])]
    # a node is listed for each of several partitions
    return list({line["name"]: Node(line["name"], line["state"], _reason(line)) for line in lines}.values())


def _reason(line: re.Match[str]) -> str:
    reason = commands.value_of(line["reason"])
    if reason is None or reason == "none":
        return ""
    return f"{reason} ({line['user']}, {time})" if (time := commands.time_of(line["time"])) else reason


def nodes_of(partition: str | None) -> list[Node]:
    """Query the nodes of a partition; None for the cluster's default.

    Raises:
        ClusterError: the cluster does not answer, or has no such partition.
    """
    found = parse_nodes(commands.run(nodes_command(partition)), partition)
    if found:
        return found
    if partition is None:
        raise ClusterError("there is no default partition: pass --partition, or set it under flags: in mgpu.yaml")
    raise site.no_such_partition(partition)


def pin_command(job_id: str, node: str) -> list[str]:
    """Return the command after which a job or array task that has not started runs on this node only."""
    return ["scontrol", "update", f"JobId={job_id}", f"ReqNodeList={node}"]


def release_command(job_ids: Sequence[str]) -> list[str]:
    """Return the command that lets held jobs or array tasks start."""
    return ["scontrol", "release", ",".join(job_ids)]


def hold_command(job_ids: Sequence[str]) -> list[str]:
    """Return the command that keeps jobs or array tasks that have not started from starting."""
    return ["scontrol", "hold", ",".join(job_ids)]
