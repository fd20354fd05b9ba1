"""The gradient is that of the mean over the global batch, whatever else a loop iterates; or an error names the fix."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mgpu_slurm.errors import UserError
from mgpu_slurm.runtime.run import Run
from mgpu_slurm.runtime.shares import Handed, Share, Shares
from tests.runtime.ranks import run_ranks

VALUES = torch.tensor([1.0, 2.0, 25.0, 8.0, 16.0], dtype=torch.float64).unsqueeze(1)
"""In batches of three on two ranks, of which the first one has 1 of 3 samples and then 1 of 2."""

MEANS = [28 / 3, 12.0]
"""Of the values of each batch, and so the gradients of the mean of `weight * value`."""


class Graph:
    """A batch without tensors that could be found in it."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device))


class Job:
    """What the loops below have in common."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.model = run.wrap(nn.Linear(1, 1, bias=False, dtype=torch.float64))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.found: list[float] = []

    def data(self, batch_size: int = 3, values: torch.Tensor = VALUES) -> Any:
        return self.run.loader(TensorDataset(values), batch_size=batch_size)

    def step(self, *batches: torch.Tensor, of: torch.Tensor | None = None) -> None:
        """Differentiate the sum of the means of batches."""
        self.run.backward(sum((self.model(batch).mean() for batch in batches), start=torch.zeros(())), of)
        self.update()

    def update(self) -> None:
        (weight,) = self.model.parameters()
        assert weight.grad is not None
        self.found.append(weight.grad.item())
        self.run.update(self.optimizer)


def plain(job: Job) -> None:
    for (batch,) in job.data():
        job.step(batch)


def shard_inside(job: Job) -> None:
    for (batch,) in job.data():
        list(job.run.shard(TensorDataset(VALUES), batch_size=1))
        job.step(batch)


def loader_inside(job: Job) -> None:
    """With gradients on, and its last batch still in a variable."""
    for (batch,) in job.data():
        for (_other,) in job.data(2):
            pass
        job.step(batch)


def loader_inside_left_by_break(job: Job) -> None:
    held = job.data(2)
    for (batch,) in job.data():
        for (_other,) in held:
            break
        job.step(batch)


@torch.no_grad()
def _evaluates(batches: Iterator[Any]) -> None:
    next(batches)


def held_evaluation(job: Job) -> None:
    held = itertools.chain.from_iterable(job.data(1) for _ in range(4))
    for (batch,) in job.data():
        _evaluates(held)
        job.step(batch)


def left_by_break(job: Job) -> None:
    for (batch,) in job.data():
        job.step(batch)
        break
    for (_other,) in job.data(2):
        break
    for (batch,) in job.data(values=VALUES[3:]):
        job.step(batch)


def nested(job: Job) -> None:
    """Of which the outer one is over one batch that all ranks share out evenly."""
    for (outer,) in job.data(2, VALUES[:2]):
        for (batch,) in job.data(4, VALUES[:4]):
            job.step(batch)
        job.step(outer)


def zipped_alike(job: Job) -> None:
    for (a,), (b,) in zip(job.data(), job.data(), strict=True):
        job.step(a, b)


def zipped(job: Job) -> None:
    for (a,), (b,) in zip(job.data(), job.data(2), strict=False):
        job.step(a, b)


def zipped_and_named(job: Job) -> None:
    for (a,), (b,) in zip(job.data(), job.data(2), strict=False):
        job.step(a, of=a)
        job.step(b, of=b[:1])


def by_hand(job: Job) -> None:
    batches = iter(job.data())
    (batch,) = next(batches)
    job.step(batch)
    (batch,) = next(batches)
    job.step(batch)


def always_the_first(job: Job) -> None:
    (batch,) = next(iter(job.data()))
    for _ in range(2):
        job.step(batch)


def sample_for_a_picture(job: Job) -> None:
    _sample = next(iter(job.data()))
    plain(job)


def fetched_ahead_and_named(job: Job) -> None:
    batches = iter(job.data())
    (batch,) = next(batches)
    for (following,) in batches:
        job.step(batch, of=batch)
        batch = following
    job.step(batch, of=batch)


def fetched_ahead_and_changed(job: Job) -> None:
    batches = (batch.float().double() for (batch,) in job.data())
    batch = next(batches)
    for following in batches:
        job.step(batch)
        batch = following
    job.step(batch)


def kept_in_a_list(job: Job) -> None:
    for (batch,) in list(job.data()):
        job.step(batch)


def kept_in_a_list_and_changed(job: Job) -> None:
    for batch in [batch * 2 for (batch,) in job.data()]:
        job.step(batch)


def preloaded_in_another_form(job: Job) -> None:
    train = [batch * 2 for (batch,) in job.data()]
    _test = [batch * 2 for (batch,) in job.run.shard(TensorDataset(VALUES), batch_size=2)]
    _others = [batch * 2 for (batch,) in job.data(2, VALUES[:4])]
    for batch in train:
        job.step(batch)


def used_after_the_loop(job: Job) -> None:
    """An evenly shared batch is weighted alike; this is one of three samples."""
    for (batch,) in job.data(values=VALUES[:3]):
        job.step(batch)
    job.step(batch)


def owned_by_the_dataset(job: Job) -> None:
    """The same tensors in each epoch, in the first and in the last batch in turn."""
    own = [*VALUES]
    data = job.run.loader(own, 3, shuffle=True, collate_fn=list)  # type: ignore[arg-type]
    for _ in range(4):
        for batch in data:
            for micro in job.run.accumulate(batch, 2):
                job.run.backward(job.model(torch.stack(micro)).mean())
            job.update()
            job.step(torch.stack(batch), of=batch)
            # the weight is that of the same batch in both
            job.found[-2:] = [job.found[-2] - job.found[-1]]


def of_arrays_and_objects(job: Job) -> None:
    data = TensorDataset(VALUES)
    arrays = job.run.loader(data, 3, collate_fn=lambda rows: np.stack([row.numpy() for (row,) in rows]))
    graphs = job.run.loader(data, 2, collate_fn=lambda rows: Graph(torch.stack([row for (row,) in rows])))
    sparse = job.run.loader(data, 4, collate_fn=lambda rows: torch.stack([row for (row,) in rows]).to_sparse())
    for a, b, c in zip(arrays, graphs, sparse, strict=False):
        job.step(torch.as_tensor(a), of=a)
        job.step(torch.as_tensor(a), of=torch.as_tensor(a)[:1])
        job.step(b.nodes, of=b)
        job.step(c.to_dense(), of=c)


def kept_beside_the_loop(job: Job) -> None:
    kept = list(job.data(2))
    for (batch,) in job.data():
        job.step(batch, *kept[0])


def kept_alike(job: Job) -> None:
    for (batch,) in list(job.data(3, torch.cat([VALUES[:3]] * 2))):
        job.step(batch)


def summed_over_batches(job: Job) -> None:
    losses = [job.model(batch).square().mean() for (batch,) in job.data()]
    job.run.backward(torch.stack(losses).sum())


def skipped(job: Job) -> None:
    for number, (batch,) in enumerate(job.data(3, torch.cat([VALUES[:3], VALUES]))):
        if number != 1:
            job.step(batch)


def own_data(job: Job) -> None:
    plain(job)
    _evaluates(iter(job.data()))
    # as many on each rank
    own = VALUES[2 * job.run.rank :][:2]
    job.step(own)


def named_after_a_change(job: Job) -> None:
    for (batch,) in job.data():
        job.step(batch, of=batch * 2)


def micro_batches(job: Job) -> None:
    """Of the first of two loaders, with an evaluation among them."""
    for (batch,), _ in zip(job.data(), job.data(2), strict=False):
        for micro in job.run.accumulate(batch, 2):
            list(job.data(2))
            job.run.backward(job.model(micro).mean())
        job.update()


def micro_batches_left(job: Job) -> None:
    (batch,) = next(iter(job.data()))
    held = job.run.accumulate(batch, 2)
    job.run.backward(job.model(next(held)).mean())
    plain(job)


def fetched_among_micro_batches(job: Job) -> None:
    others = iter(job.data(2))
    for (batch,) in job.data():
        for micro in job.run.accumulate(batch, 2):
            (other,) = next(others)
            job.run.backward(job.model(micro).mean(), micro)
            job.run.backward(job.model(other).mean())


def alternating_micro_batches(job: Job) -> None:
    for (a,), (b,) in zip(job.data(), job.data(), strict=True):
        for of_a, of_b in zip(job.run.accumulate(a, 2), job.run.accumulate(b, 2), strict=True):
            job.run.backward((job.model(of_a) + job.model(of_b)).mean())


def metered(job: Job) -> None:
    meter, inner = job.run.meter("value"), job.run.meter("of the evaluation")
    for (batch,) in job.data():
        list(job.run.shard(TensorDataset(VALUES)))
        list(job.data(2))
        meter.add(batch.mean())
        with torch.no_grad():
            for _micro in job.run.accumulate(batch, 2):
                for (other,) in job.data(4):
                    inner.add(other.mean())
    job.found += [meter.mean(), inner.mean()]


def metered_over_a_shard(job: Job) -> None:
    meter = job.run.meter("of a shard")
    for _ in job.data():
        for (other,) in job.run.shard(TensorDataset(VALUES)):
            meter.add(other.mean())


def metered_over_two(job: Job) -> None:
    meter = job.run.meter("other")
    for (a,), _ in zip(job.data(2), job.data(5), strict=False):
        meter.add(a.mean())


AMBIGUOUS = r"UserError: run.backward: several batches may be meant .*name the one .* run.backward\(loss, images\)"

LOOPS: dict[Callable[[Job], None], list[float] | str] = {
    plain: MEANS,
    shard_inside: MEANS,
    loader_inside: MEANS,
    loader_inside_left_by_break: MEANS,
    held_evaluation: MEANS,
    left_by_break: MEANS,
    nested: [9.0, 1.5],
    zipped_alike: [2 * mean for mean in MEANS],
    zipped: AMBIGUOUS,
    zipped_and_named: [MEANS[0], 1.5, MEANS[1], 16.5],
    by_hand: MEANS,
    always_the_first: MEANS[:1] * 2,
    sample_for_a_picture: MEANS,
    fetched_ahead_and_named: MEANS,
    fetched_ahead_and_changed: AMBIGUOUS,
    kept_in_a_list: AMBIGUOUS,
    kept_in_a_list_and_changed: AMBIGUOUS,
    preloaded_in_another_form: AMBIGUOUS,
    used_after_the_loop: AMBIGUOUS + r".* for data of your own, call loss.backward\(\)",
    owned_by_the_dataset: [0.0] * 8,
    of_arrays_and_objects: [MEANS[0], MEANS[0], 1.5, 9.0, MEANS[1], MEANS[1], 16.5, 16.0],
    kept_beside_the_loop: AMBIGUOUS,
    kept_alike: MEANS[:1] * 2,
    summed_over_batches: AMBIGUOUS,
    skipped: MEANS,
    own_data: [*MEANS, (1 + 2 + 25 + 8) / 4],
    named_after_a_change: "UserError: run.backward.loss, batch.: no tensor of this batch is as run.loader has",
    micro_batches: MEANS,
    micro_batches_left: "UserError: run.backward: a batch was fetched .* or that loop was left .*close the iterator",
    fetched_among_micro_batches: "UserError: run.backward: a batch was fetched within a loop over run.accumulate",
    alternating_micro_batches: "UserError: run.accumulate: two loops over it alternate",
    metered: [VALUES.mean().item()] * 2,
    metered_over_a_shard: "UserError: meter.add: not in a batch of run.loader: say of how many samples",
    metered_over_two: "UserError: meter.add: several batches may be meant .* specify the number of samples as `count`",
}


def all_loops(run: Run) -> list[list[float] | str]:
    answers: list[list[float] | str] = []
    for loop in LOOPS:
        job = Job(run)
        try:
            loop(job)
            answers.append(job.found)
        except UserError as error:
            answers.append(f"UserError: {error}")
    return answers


def test_the_gradient_is_that_of_the_batch_or_an_error_names_the_fix() -> None:
    for answers in run_ranks(all_loops, 2):
        assert isinstance(answers, list), answers
        wrong = {}
        for (loop, expected), found in zip(LOOPS.items(), answers, strict=True):
            if isinstance(expected, str) or isinstance(found, str):
                is_right = (
                    isinstance(expected, str) and isinstance(found, str) and re.search(expected, found) is not None
                )
            else:
                is_right = found == pytest.approx(expected)
            if not is_right:
                wrong[loop.__name__] = found
        assert wrong == {}


def test_batches_that_the_job_keeps_cost_nothing_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    is_alive = Handed.is_alive

    def counted(handed: Handed) -> bool:
        nonlocal looks
        looks += 1
        return is_alive(handed)

    monkeypatch.setattr(Handed, "is_alive", counted)
    shares, kept = Shares(2), []
    for _ in range(3):
        with shares.passing() as passing:
            for _ in range(1000):
                kept.append(shares.hand_out(passing, Share(1, 2), torch.ones(1)))
                assert shares.weight() == 1.0
    assert looks < 5 * len(kept)
