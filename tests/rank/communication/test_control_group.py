"""Exchanges over a tree of groups give every rank what one group of all ranks would, and end with the first rank that
dies."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import torch

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.rank import watchdog
from mgpu_slurm.rank.communication import collectives, control_group, rendezvous
from mgpu_slurm.rank.communication.collectives import Collectives
from mgpu_slurm.rank.communication.control_group import LARGEST, tree_of
from mgpu_slurm.rank.communication.step_sync import Agreed, Call
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.signals import Stop
from tests.ranks import KILLED, Failed, join_ranks

# -- which groups there are


def test_few_ranks_form_one_group_wherever_they_are() -> None:
    assert tree_of([*range(LARGEST)]) == [[[*range(LARGEST)]]]


@pytest.mark.parametrize(
    ("nodes", "sizes"),
    [
        ([rank // 8 for rank in range(1024)], [[8] * 128, [64] * 2, [2]]),
        ([rank // 8 for rank in range(4096)], [[8] * 512, [64] * 8, [8]]),
        # with SLURM's cyclic distribution
        ([rank % 16 for rank in range(128)], [[8] * 16, [16]]),
        ([*range(1024)], [[1] * 1024, [64] * 16, [16]]),
        ([0] * 100, [[50] * 2, [2]]),
        ([0] * 60 + [1] * 7, [[60, 7], [2]]),
    ],
    ids=["1024", "4096", "cyclic", "one-per-node", "one-node", "uneven"],
)
def test_many_ranks_form_groups_by_node(nodes: Sequence[int], sizes: list[list[int]]) -> None:
    tree = tree_of(nodes)
    assert [[*map(len, groups)] for groups in tree] == sizes
    expected = [*range(len(nodes))]
    for groups in tree:
        assert sorted(rank for ranks in groups for rank in ranks) == expected
        expected = sorted(ranks[0] for ranks in groups)
    assert all(len({nodes[rank] for rank in ranks}) == 1 for ranks in tree[0])
    assert expected == [0]


# -- what they exchange

LAYOUTS = {
    "two": [0, 1],
    "one group": [0, 0, 0],
    "nodes": [0, 0, 1, 1, 2, 2],
    "cyclic": [0, 1, 2, 0, 1, 0, 0],
    "one-per-node": [0, 1, 2, 3],
    "three levels": [0, 1, 1, 2, 3, 4, 5, 6, 7, 7, 7],
}
"""The node of each rank, in groups of three ranks at most."""


def facts_of(nodes: Sequence[int]) -> list[RankInfo]:
    return [
        RankInfo(rank, len(nodes), nodes[:rank].count(node), nodes.count(node), node, f"n{node}")
        for rank, node in enumerate(nodes)
    ]


def joined(facts: RankInfo, work: Any, *arguments: Any) -> Any:
    control_group.LARGEST = 3
    rendezvous.join(facts, torch.device("cpu"), timeout=timedelta(seconds=60))
    with closing(Collectives(facts)) as channel:
        found = work(channel, facts.rank, *arguments)
        # a rank that leaves may be in the way of others
        channel.sync(Call.FINISH, Agreed())
    torch.distributed.destroy_process_group()
    return found


def raises_on_rank_0() -> Any:
    raise UserError("no such file")


def exchanges(channel: Collectives, rank: int) -> str:
    """Make each kind of exchange twice: memory is reused."""
    found: list[Any] = []
    for turn in range(2):
        request = Agreed(Stop.END if rank == 1 else Stop.NO, save=rank == 2, failed=turn == 1)
        # the sums depend on the order of the ranks
        found.append(channel.with_sums(Call.MEAN, request, [0.1 + rank, 1e16 if rank == 1 else rank / 3]))
        found.append([*map(list, channel.with_values(Call.REPORT, Agreed(), [float(rank), -0.5])[1])])
        found.append(channel.total([float(rank), 1e16 if rank == 1 else rank / 3]))
        found.append(channel.differ([7, rank, -(2**62), 2**63 - 1 if rank == 1 else 0]))
        found.append(channel.differ([]))
        found.append(channel.broadcast_from_rank0(lambda: {"of": ("é" * 1000, rank, None)}))
        with pytest.raises(UserError, match="no such file"):
            channel.broadcast_from_rank0(raises_on_rank_0)
    return repr(found)


def expected_of(count: int) -> str:
    found: list[Any] = []
    large = [1e16 if rank == 1 else rank / 3 for rank in range(count)]
    for turn in range(2):
        agreed = Agreed(Stop.END, save=count > 2, failed=turn == 1)
        found.append((agreed, [sum(0.1 + rank for rank in range(count)), sum(large)]))
        found.append([[*map(float, range(count))], [-0.5] * count])
        found.append([float(sum(range(count))), sum(large)])
        found.append([False, True, False, True])
        found.append([])
        found.append({"of": ("é" * 1000, 0, None)})
    return repr(found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_receives_all_messages_in_order_of_ranks(layout: str) -> None:
    nodes = LAYOUTS[layout]
    assert join_ranks(joined, facts_of(nodes), exchanges) == [expected_of(len(nodes))] * len(nodes)


def counted(channel: Collectives, rank: int) -> int:
    for _ in range(3):
        channel.sync(Call.MEAN, Agreed())
        channel.broadcast_from_rank0(lambda: 1)
    return watchdog._count(watchdog._collectives(rank))


@pytest.mark.needs_torch("2.9")
def test_place_in_the_tree_does_not_change_how_many_collectives_a_rank_has_made() -> None:
    nodes = LAYOUTS["three levels"]
    counts = join_ranks(recorded, facts_of(nodes), counted)
    assert len({*counts}) == 1
    assert counts[0] >= 3 * 2


def recorded(facts: RankInfo, work: Any) -> Any:
    # torch reads it when the first group is created
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    return joined(facts, work)


def steps(channel: Collectives, rank: int) -> list[int]:
    found = []
    for boundary in range(1, 20):
        agreed = channel.step(Agreed(save=boundary == 7 and rank == 5))
        if agreed.save:
            found.append(boundary)
        channel.total([0.0])
    return found


def test_all_ranks_of_a_tree_act_at_the_same_boundary() -> None:
    first, *others = join_ranks(joined, facts_of(LAYOUTS["nodes"]), steps)
    assert len(first) == 1
    assert others == [first] * 5


# -- what ends them


def differ_in_calls(channel: Collectives, rank: int) -> None:
    collectives.LOOKS = (0.2, 0.2)
    if rank == 3:
        channel.sync(Call.EPOCH, Agreed())
    channel.sync(Call.MEAN, Agreed())


def leaves_the_others(channel: Collectives, rank: int) -> None:
    """Rank 3 passes boundaries, while the others wait for it."""
    collectives.LOOKS = (0.2,) * 100
    if rank != 3:
        channel.sync(Call.MEAN, Agreed())
    for _ in range(1000):
        channel.step(Agreed())
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("work", "calls"),
    [
        (differ_in_calls, "ranks 0 to 5 at run.mean(), rank 3 at the end of an epoch"),
        (leaves_the_others, "ranks 0 to 5 at run.mean(), rank 3 at the next batch of a loader"),
    ],
)
def test_rank_of_a_tree_that_makes_another_call_is_named(work: Any, calls: str) -> None:
    for answer in join_ranks(joined, facts_of(LAYOUTS["nodes"]), work):
        assert answer.startswith(f"CollectiveMismatch: the ranks make different calls: {calls}."), answer


def dies(channel: Collectives, rank: int, victim: int) -> None:
    channel.sync(Call.MEAN, Agreed())
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        channel.sync(Call.MEAN, Agreed())
    assert caught.value.__context__ is None, "a log shows the error twice"
    raise caught.value


@pytest.mark.parametrize("victim", [0, 2, 3], ids=["root", "first of a node", "other"])
def test_death_of_a_rank_ends_the_exchange_on_all_others(victim: int) -> None:
    answers = join_ranks(joined, facts_of(LAYOUTS["nodes"]), dies, victim)
    assert answers.pop(victim) == KILLED
    for answer in answers:
        assert isinstance(answer, Failed)
        assert "RuntimeError" in answer, answer
        assert re.search("by peer|Broken pipe", answer), answer
