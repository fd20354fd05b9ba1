"""How the ranks of a checkup work together: over the store alone, each wait with an end.

A collective would hang where the network does, and that is what a checkup is there to tell.
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

    from mgpu_slurm.core.layout import RunFolder
    from mgpu_slurm.rank.rank_info import RankInfo
    from mgpu_slurm.request.spec import Spec

PATIENCE = 90.0
"""Seconds for which one rank waits for another."""


@dataclass(frozen=True)
class Member:
    """One rank, as the others know it."""

    rank: int
    node: int
    """Index of its node, from 0."""
    node_name: str
    local_rank: int

    @property
    def is_leader(self) -> bool:
        """Whether it speaks for its node."""
        return self.local_rank == 0

    @property
    def words(self) -> str:
        return f"rank {self.rank} on {self.node_name}"


@dataclass(frozen=True)
class Answer:
    """What one rank has measured."""

    member: Member
    value: Any


@dataclass(frozen=True)
class Place:
    """Where a checkup runs."""

    folder: RunFolder
    spec: Spec
    device: torch.device
    attempt: int
    connecting: float
    """Seconds that this rank took to reach the store."""

    @property
    def is_one_machine(self) -> bool:
        """Whether the nodes are simulated: their names are labels that nobody can look up."""
        return self.spec.nodes_are_simulated


class TooLate(Exception):
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
        """In the order of their ranks."""

    @property
    def leaders(self) -> list[Member]:
        """One rank of each node, that of rank 0 first."""
        return [member for member in self.members if member.is_leader]

    def tell(self, key: str, value: Any = None) -> None:
        """Says something once, to whoever wants to hear it."""
        self._store.set(key, json.dumps(value))

    def hear(self, key: str) -> Any:
        """What another rank tells.

        Raises:
            TooLate: it was not told in time.
        """
        self._wait(key, time.monotonic() + self.patience)
        return json.loads(self._store.get(key))

    def meet(self, name: str) -> None:
        """Returns once all ranks have called it with this name."""
        self.tell(f"{name}/here/{self.me.rank}")
        for member in self.members:
            self.hear(f"{name}/here/{member.rank}")

    def gather(self, name: str, value: Any) -> dict[int, Any]:
        """The values of all ranks by rank, for rank 0 (nothing for the others); who tells none in time is missing."""
        self.tell(f"{name}/gathered/{self.me.rank}", value)
        found: dict[int, Any] = {}
        if self.is_first:
            give_up = time.monotonic() + self.patience
            for member in self.members:
                key = f"{name}/gathered/{member.rank}"
                try:
                    self._wait(key, give_up)
                except TooLate:
                    continue
                found[member.rank] = json.loads(self._store.get(key))
        return found

    def _wait(self, key: str, give_up: float) -> None:
        import torch.distributed as dist

        try:
            # what is told already is not waited for: a time-out of nothing would fail before it looks
            self._store.wait([key], timedelta(seconds=max(0.01, give_up - time.monotonic())))
        except dist.DistStoreError:
            raise TooLate(f"{key} was not told within {self.patience:g} s") from None


def names(members: list[Member]) -> str:
    """Their nodes, in short: `n[1-2]`."""
    return compress(list(dict.fromkeys(member.node_name for member in members)))


def who(members: list[Member]) -> str:
    """`rank 3 on n2`, or `ranks 0-3 on n[1-2]`."""
    if len(members) == 1:
        return members[0].words
    return f"ranks {ranges(member.rank for member in members)} on {names(members)}"


def alike(answers: Sequence[Answer]) -> list[tuple[Any, list[Answer]]]:
    """The answers by what they say, the first said first."""
    groups: list[tuple[Any, list[Answer]]] = []
    for answer in answers:
        same = next((group for value, group in groups if value == answer.value), None)
        if same is None:
            groups.append((answer.value, [answer]))
        else:
            same.append(answer)
    return groups


def within(seconds: float, look: Callable[[], bool]) -> float | None:
    """Seconds until `look` saw what it looks for, or None where that did not happen in time."""
    start = time.perf_counter()
    pause = 0.0005
    while not look():
        elapsed = time.perf_counter() - start
        if elapsed > seconds:
            return None
        time.sleep(min(pause, 0.05))
        pause *= 1.3
    return time.perf_counter() - start
