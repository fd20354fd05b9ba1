"""All ranks act at one boundary, whoever wants it, and a step costs no message until then."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from mgpu_slurm.rank.communication import collectives, step_sync
from mgpu_slurm.rank.communication.control_group import ControlGroup, Exchange
from mgpu_slurm.rank.communication.step_sync import Agreed, Call, Place, have_diverged
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks
from tests.support import wait_until

NOTHING = Agreed()


def passes(run: Run, seed: int) -> list[tuple[int, Agreed]]:
    """Each rank at its own pace; each wants something now and then."""
    draw = random.Random(f"{seed} {run.rank}")
    pace = draw.choice([0.0, 0.0005, 0.002])
    requests = {draw.randrange(1, 200): Agreed(save=True) for _ in range(3)}
    requests |= {draw.randrange(1, 200): Agreed(stop=stop) for stop in (Stop.REQUEUE, Stop.END)}
    found, request = [], NOTHING
    for boundary in range(1, 200):
        request = requests.get(boundary, request)
        agreed = run._collectives.step(request)
        if agreed != NOTHING:
            found.append((boundary, agreed))
            # what was done is not requested any more, and who was told to stop is not told otherwise
            request = Agreed(request.stop)
        time.sleep(pace)
    run._collectives.sync(Call.EPOCH, request)
    run.close()
    return found


@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_act_at_the_same_boundary(seed: int) -> None:
    first, *others = run_ranks(passes, 4, seed)
    assert {agreed.stop for _, agreed in first} >= {Stop.END}
    assert any(agreed.save for _, agreed in first)
    assert others == [first] * 3


def all_want_it(run: Run) -> list[int]:
    found = []
    for boundary in range(1, 10):
        if run._collectives.step(Agreed(save=boundary == 5)).save:
            found.append(boundary)
        # as ranks in step are, by the gradients that they exchange
        run._collectives.total([0.0])
    run.close()
    return found


def test_request_of_all_ranks_is_done_at_that_boundary() -> None:
    assert run_ranks(all_want_it, 3) == [[5]] * 3


class Ones(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat([torch.ones(1)], 200)


def counts_messages(run: Run, is_stream: bool) -> list[int]:
    """Of a training in which nobody wants anything, and then one rank does."""
    model = run.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = run.loader(Ones() if is_stream else TensorDataset(torch.ones(200, 1)), batch_size=2)
    run.restore(model=model, optimizer=optimizer, data=data)
    run.checkpoints(every_minutes=None)
    calls, counts = _count_messages(run), []
    for (batch,) in data:
        if run.step in (5, 95, 98):
            counts.append(calls[0])
        if run.step == 95 and run.rank == 1:
            run.save()
        run.backward(model(batch).mean())
        run.update(optimizer)
    run.close()
    return counts


def _count_messages(run: Run) -> list[int]:
    """Count what this rank sends from now on in the one number that is returned."""
    calls = [0]
    for owner, names in (
        (dist, ("all_gather", "all_reduce", "broadcast")),
        (ControlGroup, ("gather", "broadcast")),
        (Exchange, ("steps",)),
        (type(run._collectives._store), ("set", "add", "get", "check")),
    ):
        for name in names:
            setattr(owner, name, _counting(getattr(owner, name), calls))
    return calls


def _counting(function: Any, calls: list[int]) -> Any:
    def called(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        return function(*arguments, **options)

    return called


@pytest.mark.needs_torch("2.9")
@pytest.mark.parametrize("is_stream", [False, True])
def test_step_sends_no_messages_until_a_rank_requests_something(is_stream: bool) -> None:
    for at_5, at_95, at_98 in run_ranks(counts_messages, 2, is_stream):
        assert at_5 == at_95 < at_98


def counts_messages_of_calls(run: Run) -> list[int]:
    """Of ten means, and of ten reports."""
    # who waits long for another rank asks where that is
    collectives.LOOKS = (60.0,)
    calls = _count_messages(run)
    counts = [calls[0]]
    for _ in range(10):
        run.mean(1, 1)
    counts.append(calls[0])
    for progress in range(10):
        run.report(progress + 1, loss=0.5)
    counts.append(calls[0])
    run.close()
    return [after - before for before, after in pairwise(counts)]


@pytest.mark.needs_torch("2.9")
@pytest.mark.parametrize("ranks", [2, 3])
def test_mean_and_report_send_one_message_each(ranks: int) -> None:
    assert run_ranks(counts_messages_of_calls, ranks) == [[10, 10]] * ranks


def evaluates_alone(run: Run) -> None:
    run.wrap(nn.Linear(1, 1))
    data = run.loader(TensorDataset(torch.ones(8, 1)), batch_size=2)
    if run.rank == 1:
        list(data)
    run.mean(0, 1)


def test_loader_iterated_by_only_one_rank_is_an_error() -> None:
    for answer in run_ranks(evaluates_alone, 2, may_fail=True):
        assert answer.startswith("CollectiveMismatch: rank 1 has taken 4 more batches of run.loader than rank 0")


def goes_past(run: Run) -> None:
    """No gradients hold rank 1 back; it passes boundaries, and rank 0 is in a call."""
    if run.rank == 0:
        run.mean(0, 1)
    for _ in range(2000):
        run._collectives.step(NOTHING)
        time.sleep(0.01)


def test_different_calls_on_two_ranks_are_an_error() -> None:
    for answer in run_ranks(goes_past, 2, may_fail=True):
        assert answer.startswith(
            "CollectiveMismatch: the ranks make different calls: rank 0 at run.mean(), rank 1 at the next batch"
        )


def comes_late(run: Run) -> float:
    if run.rank == 1:
        time.sleep(2.5)
    return run.mean(run.rank, 1)


def test_late_rank_is_waited_for() -> None:
    assert run_ranks(comes_late, 2) == [0.5, 0.5]


def sync_threads() -> int:
    return sum(thread.name == "boundaries" for thread in threading.enumerate())


def ends(run: Run) -> tuple[int, int]:
    run.mean(0, 1)
    before = sync_threads()
    run.close()
    return before, sync_threads()


def test_sync_thread_ends_with_the_run() -> None:
    assert run_ranks(ends, 2) == [(1, 0), (1, 0)]


def goes_on_alone(run: Run) -> list[Stop]:
    """Rank 1 has ended, and rank 0 is told to stop after that."""
    run.mean(0, 1)
    if run.rank == 1:
        run.close()
        return []
    wait_until(lambda: run._collectives._store.check([step_sync.GONE]))
    return [run._collectives.step(Agreed(stop=Stop.END)).stop for _ in range(3)]


def test_rank_that_has_ended_is_not_waited_for() -> None:
    assert run_ranks(goes_on_alone, 2) == [[Stop.NO] * 3, []]


def trains_unrestored(run: Run) -> int:
    """A run that keeps nothing does not ask for checkpoints, however long it goes on."""
    run.checkpoints(every_minutes=1e-6)
    for _ in run.loader(TensorDataset(torch.ones(20, 1)), batch_size=2):
        pass
    return run._collectives._step_sync._round if run._collectives._step_sync is not None else -1


def test_run_without_restore_requests_no_checkpoints() -> None:
    assert run_ranks(trains_unrestored, 2) == [0, 0]


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([(3, 7), (3, 7)], False),
        ([(3, 7), (2, 7)], False),
        ([(3, 7), (2, 5)], False),
        ([(3, 7), (3, 9)], False),
        ([(3, 7), (2, 8)], True),
        ([(2, 8), (4, 9), (3, 7)], True),
        ([(2, 8), (4, 9), (3, 8)], False),
    ],
)
def test_rank_past_a_call_of_another_is_detected(places: list[tuple[int, int]], expected: bool) -> None:
    """Calls made and boundaries passed."""
    assert have_diverged([Place(calls, passed, Call.STEP) for calls, passed in places]) is expected


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (Place(3, 7, Call.END), Place(2, 7, Call.STEP, has_batch=True), True),
        # it may come to the end, too
        (Place(3, 7, Call.END), Place(2, 7, Call.STEP), False),
        # it has made the call already in which the other still is
        (Place(3, 7, Call.PASS), Place(3, 7, Call.STEP, has_batch=True), False),
        (Place(3, 8, Call.END), Place(2, 7, Call.STEP, has_batch=True), False),
    ],
)
def test_stream_end_while_another_rank_has_a_batch_is_detected(one: Place, other: Place, expected: bool) -> None:
    assert have_diverged([one, other]) is expected
