"""Communication between the ranks of a checkup: only through the store, with a time-out for each wait.

A collective would hang if the network does, which is what a checkup has to report.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mgpu_slurm.core.hostlist import compress, ranges

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

    from mgpu_slurm.rank.rank_info import RankInfo
    from mgpu_slurm.request.spec import Spec
    from mgpu_slurm.run_folder.layout import RunFolder

PATIENCE = 90.0
"""Seconds that one rank waits for another."""


@dataclass(frozen=True)
class Member:
    """One rank, as known to the others."""

    rank: int
    node: int
    """Index of its node, from 0."""
    node_name: str
    local_rank: int

    @property
    def is_leader(self) -> bool:
        """Whether it represents its node."""
        return self.local_rank == 0

    @property
    def words(self) -> str:
        return f"rank {self.rank} on {self.node_name}"


@dataclass(frozen=True)
class Answer:
    """The measurement of one rank."""

    member: Member
    value: Any


@dataclass(frozen=True)
class Place:
    """The environment of a checkup."""

    folder: RunFolder
    spec: Spec
    device: torch.device
    attempt: int
    connecting: float
    """Seconds that this rank took to reach the store."""

    @property
    def is_one_machine(self) -> bool:
        """Whether the nodes are simulated: their names are labels that cannot be resolved."""
        return self.spec.nodes_are_simulated


class GatherTimeout(Exception):
    """Another rank did not do its part in time."""


class Team:
    """All ranks of a run, seen from one of them."""

    def __init__(self, store: Store, facts: RankInfo, patience: float = PATIENCE) -> None:
        self._store = store
        self.patience = patience
        self.me = Member(facts.rank, facts.node, facts.node_name, facts.local_rank)
        self.is_first = facts.rank == 0
        self.size = facts.world_size
        self.tell(f"member/{facts.rank}", vars(self.me))
        self.members = [Member(**self.hear(f"member/{rank}")) for rank in range(facts.world_size)]
        """Members by rank."""

    @property
    def leaders(self) -> list[Member]:
        """One rank of each node, that of rank 0 first."""
        return [member for member in self.members if member.is_leader]

    def tell(self, key: str, value: Any = None) -> None:
        """Publish a value under a key, once, for all ranks."""
        self._store.set(key, json.dumps(value))

    def hear(self, key: str) -> Any:
        """Wait for the value of a key and return it.

        Raises:
            GatherTimeout: It was not published in time.
        """
        self._wait(key, time.monotonic() + self.patience)
        return json.loads(self._store.get(key))

    def meet(self, name: str) -> None:
        """Wait until all ranks have called it with this name."""
        self.tell(f"{name}/here/{self.me.rank}")
        for member in self.members:
            self.hear(f"{name}/here/{member.rank}")

    def gather(self, name: str, value: Any) -> dict[int, Any]:
        """Return the values of all ranks by rank on rank 0, without those that are late; empty on the others."""
        self.tell(f"{name}/gathered/{self.me.rank}", value)
        found: dict[int, Any] = {}
        if self.is_first:
            give_up = time.monotonic() + self.patience
            for member in self.members:
                key = f"{name}/gathered/{member.rank}"
                try:
                    self._wait(key, give_up)
                except GatherTimeout:
                    continue
                found[member.rank] = json.loads(self._store.get(key))
        return found

    def _wait(self, key: str, give_up: float) -> None:
        import torch.distributed as dist

        try:
            # at least 10 ms: with a time-out of 0 the store fails even if the key exists
            self._store.wait([key], timedelta(seconds=max(0.01, give_up - time.monotonic())))
        except dist.DistStoreError:
            raise GatherTimeout(f"{key} did not arrive within {self.patience:g} s") from None


def names(members: list[Member]) -> str:
    """Return the members' nodes in short form: `n[1-2]`."""
    return compress(list(dict.fromkeys(member.node_name for member in members)))


def who(members: list[Member]) -> str:
    """Return `rank 3 on n2`, or `ranks 0-3 on n[1-2]`."""
    if len(members) == 1:
        return members[0].words
    return f"ranks {ranges(member.rank for member in members)} on {names(members)}"


def alike(answers: Sequence[Answer]) -> list[tuple[Any, list[Answer]]]:
    """Group the answers by value, in the order of their first occurrence."""
    groups: list[tuple[Any, list[Answer]]] = []
    for answer in answers:
        same = next((group for value, group in groups if value == answer.value), None)
        if same is None:
            groups.append((answer.value, [answer]))
        else:
            same.append(answer)
    return groups


def within(seconds: float, look: Callable[[], bool]) -> float | None:
    """Call `look` until it returns True; return the seconds that took, or None if it did not happen in time."""
    start = time.perf_counter()
    pause = 0.0005
    while not look():
        elapsed = time.perf_counter() - start
        if elapsed > seconds:
            return None
        time.sleep(min(pause, 0.05))
        pause *= 1.3
    return time.perf_counter() - start
