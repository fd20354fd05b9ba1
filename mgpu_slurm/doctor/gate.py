"""Let the tasks of a held job array start, each on its own node.

Once a task of an array has to wait, SLURM's schedulers skip the array's other tasks, even if their nodes are idle. So
a task is released only when its node may have room, and held again when it waits in the way of others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress

from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.slurm import commands, partition_nodes
from mgpu_slurm.slurm.partition_nodes import Node

HELD = "JobHeldUser"
"""SLURM's reason for a task that is held."""


class Gate:
    """The tasks that have not started, by the names of their nodes."""

    def __init__(self, partition: str | None) -> None:
        self._partition = partition
        self._jobs: dict[str, str] = {}
        self._tries: dict[str, int] = {}
        self._released: list[str] = []

    def add(self, node: str, job_id: str) -> None:
        """Add a held task."""
        self._jobs[node] = job_id
        self._tries[node] = 0

    def turn(self, waiting: Collection[str]) -> None:
        """Give other tasks a try, if there are any. A controller that does not answer is asked at the next turn.

        Args:
            waiting: the nodes whose tasks have not started.
        """
        with suppress(ClusterError):
            found = {node.name: node for node in partition_nodes.nodes_of(self._partition)}
            self._change(*self.choose(waiting, found))

    def choose(self, waiting: Collection[str], found: Mapping[str, Node]) -> tuple[list[str], list[str]]:
        """Return the nodes whose tasks to hold, and those whose tasks to release: of the others, those that were tried
        least, on idle nodes first.

        Args:
            found: the nodes as SLURM lists them now.
        """
        others = [
            name
            for name in self._jobs
            if name in waiting and name not in self._released and name in found and found[name].may_have_room
        ]
        ranks = {name: (self._tries[name], not found[name].is_idle) for name in others}
        chosen = [name for name in others if ranks[name] == min(ranks.values())]
        return [name for name in self._released if name in waiting and chosen], chosen

    def _change(self, held: list[str], released: list[str]) -> None:
        if held:
            # one that has started meanwhile cannot be held, which is as good
            with suppress(ClusterError):
                commands.run(partition_nodes.hold_command([self._jobs[name] for name in held]))
        if released:
            commands.run(partition_nodes.release_command([self._jobs[name] for name in released]))
            self._released = released
            for name in released:
                self._tries[name] += 1
