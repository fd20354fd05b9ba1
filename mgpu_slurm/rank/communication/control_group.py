"""Messages of a fixed size from every rank to all ranks, over a tree of small gloo groups.

Each group gathers at its first rank, the first ranks of groups form groups in turn, and the result is broadcast back
the same way. The groups of the first level are the ranks of a node. With few ranks there is only one group.

Gloo's all-gather would pass the messages around a ring, so that its time grows with the number of ranks.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mgpu_slurm.rank import torch_adapter

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from mgpu_slurm.rank.rank_info import RankInfo

LARGEST = 64
"""Largest number of ranks in one group. Up to this number, a group per node was not faster than a single group."""

Tree = list[list[list[int]]]
"""The groups of each level, from the leaves to the root: ranks, the first of which is also in the next level."""


def tree_of(nodes: Sequence[Hashable]) -> Tree:
    """Return the groups through which ranks exchange messages.

    Args:
        nodes: the node of each rank.
    """
    if len(nodes) <= LARGEST:
        return [[[*range(len(nodes))]]]
    on_node: dict[Hashable, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        on_node[node].append(rank)
    levels = [[part for ranks in on_node.values() for part in _parts(ranks)]]
    while len(levels[-1]) > 1:
        levels.append(_parts([group[0] for group in levels[-1]]))
    return levels


def _parts(ranks: list[int]) -> list[list[int]]:
    """Divide ranks into as few groups of similar size as possible."""
    count = -(-len(ranks) // LARGEST)
    ends = [len(ranks) * part // count for part in range(count + 1)]
    return [ranks[ends[part] : ends[part + 1]] for part in range(count)]


@dataclass(frozen=True)
class _Level:
    """One rank's place in a level of the tree."""

    group: Any
    """A gloo group; torch's hints lack its methods."""
    size: int
    is_first: bool
    """Whether this rank gathers the messages of its group."""
    rows: int
    """Number of messages that each rank of the group sends, with padding if they have gathered different numbers."""


class ControlGroup:
    """One rank's connections to the ranks with which it exchanges messages."""

    def __init__(self, facts: RankInfo, store: Store, timeout: timedelta | None) -> None:
        """Connect this rank to its groups. Every rank must call it.

        Args:
            store: a store that no other group of the ranks uses.
            timeout: time-out of a message; None for torch's default.
        """
        torch_adapter.connect_lazily()
        self.world_size = facts.world_size
        limit = torch_adapter.default_timeout() if timeout is None else timeout
        tree = tree_of(_nodes(facts, store, limit) if facts.world_size > LARGEST else [0] * facts.world_size)
        rows, self.places = _places(tree)
        self.levels = []
        for level, groups in enumerate(tree):
            (ranks,) = [each for each in groups if facts.rank in each] or [[]]
            if len(ranks) > 1:
                name = f"control {level}/{ranks[0]}"
                group = torch_adapter.gloo_group(store, name, ranks, facts.rank, limit)
                self.levels.append(_Level(group, len(ranks), facts.rank == ranks[0], rows[level][ranks[0]]))
        # a rank that ends before its connections exist would be waited for
        self.gather(b"\0")

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in the order of the ranks. All have the same size, at least one byte."""
        exchange = Exchange(self, len(message))
        exchange.own[:] = message
        for work in exchange.steps():
            work.wait()
        return [bytes(row) for (row,) in struct.iter_unpack(f"{len(message)}s", exchange.table)]

    def broadcast(self, data: bytes) -> bytes:
        """Return rank 0's data; that of other ranks is ignored."""
        size = torch.tensor([len(data)], device="cpu")
        for work in self.send_down(size):
            work.wait()
        # torch requires writable memory
        held = torch.frombuffer(bytearray(data) or bytearray(int(size)), dtype=torch.uint8)
        for work in self.send_down(held):
            work.wait()
        return held.numpy().tobytes()

    def send_down(self, tensor: torch.Tensor) -> Iterator[dist.Work]:
        """Broadcast rank 0's tensor; yield each step to wait for."""
        for level in reversed(self.levels):
            yield level.group.broadcast(tensor, 0)

    def keep_open(self) -> None:
        """Never destroy the groups: that would wait until the other ranks have answered a message."""
        for level in self.levels:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(level.group))


class Exchange:
    """A message from each rank to all. Use it for many: creating its tensors takes longer than an exchange."""

    def __init__(self, group: ControlGroup, size: int) -> None:
        """
        Args:
            size: size of a rank's message in bytes.
        """
        self._group = group
        self.own = bytearray(size)
        """This rank's message."""
        self.table = bytearray(size * group.world_size)
        """The newest messages of all ranks, in the order of the ranks."""
        self._own = torch.frombuffer(self.own, dtype=torch.uint8)
        self._table = torch.frombuffer(self.table, dtype=torch.uint8).view(group.world_size, size)
        self._places = torch.tensor(group.places, device="cpu")
        firsts = [level for level in group.levels if level.is_first]
        self._gathered = [
            torch.zeros(level.size, level.rows * size, dtype=torch.uint8, device="cpu") for level in firsts
        ]
        """What this rank has gathered in each level: a row from each rank of the group."""
        self._rows = [[*each.unbind()] for each in self._gathered]
        self._is_root = len(firsts) == len(group.levels)
        self._both = [*self._table.unbind()] if group.world_size == 2 else []
        self._options = dist.GatherOptions()
        self._options.rootRank = 0

    def steps(self) -> Iterator[dist.Work]:
        """Exchange the messages; yield each step to wait for."""
        if self._both:
            # at the same time, which gathering would not
            yield self._group.levels[0].group.allgather([self._both], [self._own])
            return
        block = self._own
        for level, gathered, rows in zip_longest(self._group.levels, self._gathered, self._rows):
            # in this form, as torch 2.6 has no other for ranks that gather nothing
            yield level.group.gather(
                [rows] if rows else [], [_padded(block, level.rows * len(self.own))], self._options
            )
            if gathered is not None:
                block = gathered.view(-1)
        if self._is_root:
            torch.index_select(block.view(-1, len(self.own)), 0, self._places, out=self._table)
        yield from self._group.send_down(self._table)


def _padded(block: torch.Tensor, size: int) -> torch.Tensor:
    return block if len(block) == size else torch.nn.functional.pad(block, (0, size - len(block)))


def _nodes(facts: RankInfo, store: Store, limit: timedelta) -> list[Any]:
    """Return the node of each rank, as a number.

    Args:
        limit: how long to wait for other ranks, which may still copy data for `--stage`.
    """
    store.set(f"node/{facts.rank}", f"{facts.node} {facts.node_name}")
    if facts.rank == 0:
        keys = [f"node/{rank}" for rank in range(facts.world_size)]
        store.wait(keys, limit)
        names = [store.get(key) for key in keys]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        store.set("nodes", json.dumps([numbers[name] for name in names]))
    store.wait(["nodes"], limit)
    return list(json.loads(store.get("nodes")))


def _places(tree: Tree) -> tuple[list[dict[int, int]], list[int]]:
    """Return how many messages each rank of a group sends, for each level by the group's first rank; and the place of
    each rank's message among those that rank 0 has gathered in the end."""
    world_size = sum(map(len, tree[0]))
    held = {rank: [rank] for rank in range(world_size)}
    """The ranks whose messages a rank has gathered; -1 for padding."""
    sent: list[dict[int, int]] = []
    for groups in tree:
        sent.append({ranks[0]: max(len(held[rank]) for rank in ranks) for ranks in groups})
        for ranks in groups:
            rows = sent[-1][ranks[0]]
            held[ranks[0]] = [row for rank in ranks for row in [*held[rank], *[-1] * (rows - len(held[rank]))]]
    place = {rank: at for at, rank in enumerate(held[0])}
    return sent, [place[rank] for rank in range(world_size)]
