"""What samples draw is the same on any number of workers and ranks, and in a resumed run."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, StackDataset, Subset, TensorDataset, get_worker_info

from mgpu_slurm.core.errors import RunStopped
from mgpu_slurm.data.randomness import random_state
from mgpu_slurm.data.sample_seeds import Part, SeededReader
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks

SIZE, BATCH, EPOCHS = 22, 4, 2
"""The last batch has two samples."""

Row = list[float]
"""The number of a sample, and what was drawn for it from Python's, NumPy's and torch's generators."""


def drawn() -> Row:
    return [random.random(), np.random.rand(), torch.rand((), dtype=torch.float64).item()]


class Augmented(Dataset[Row]):
    """Draws another number of times for each sample."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Row:
        for _ in range(index):
            drawn()
        return [float(index), *drawn()]


class AtOnce(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Row]:
        return [self[index] for index in indices]


class AugmentedStream(IterableDataset[Row]):
    def __iter__(self) -> Iterator[Row]:
        for index in range(SIZE):
            yield [float(index), *drawn()]


def mixing(rows: list[Row]) -> torch.Tensor:
    """Return the rows, each with what was drawn for the batch."""
    return torch.cat([torch.tensor(rows, dtype=torch.float64), torch.tensor([drawn()] * len(rows))], dim=1)


def with_workers(workers: int) -> dict[str, Any]:
    # in a process that comes from a fork server, workers would come from another one, which imports torch again
    return {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}


def seen(run: Run, which: str, workers: int, stop_at: int | None = None, draws_before: int = 0) -> dict[str, Any]:
    """Return what each batch of a training was, on this rank."""
    run.seed(3)
    model = run.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"collate_fn": mixing, **with_workers(workers)}
    data = (
        run.loader(AugmentedStream(), BATCH, **options)
        if which == "stream"
        else run.loader(Augmented(), BATCH, shuffle=True, **options)
    )
    state = run.restore(model=model, optimizer=optimizer, data=data)
    rows: list[tuple[int, int, list[Row]]] = []
    dropouts = []
    with contextlib.suppress(RunStopped):
        for epoch in state.epochs(EPOCHS):
            for batch in data:
                run.backward(model(batch[:, :1].float()).mean(), batch)
                run.update(optimizer)
                dropouts.append(drawn())
                rows.append((epoch, data.batch, batch.tolist()))
                if run.step == stop_at:
                    run._loop_control.stop.asked = Stop.END
    return {"rows": rows, "dropouts": dropouts}


def samples_of(answers: list[dict[str, Any]], columns: int) -> dict[tuple[int, float], Row]:
    """Return what was drawn for each sample of each epoch, on any rank."""
    return {(epoch, row[0]): row[1:columns] for answer in answers for epoch, _, rows in answer["rows"] for row in rows}


@pytest.mark.parametrize("which", ["dataset", "stream"])
def test_any_number_of_workers_and_ranks_draws_the_same_also_when_resumed(which: str, tmp_path: Path) -> None:
    (alone,) = run_ranks(seen, 1, which, 0, folder=tmp_path / "whole")
    values = [value for _, _, rows in alone["rows"] for row in rows for value in row[1:4]]
    assert len(set(values)) == len(values) == 3 * SIZE * EPOCHS
    (begun,) = run_ranks(seen, 1, which, 3, 3, folder=tmp_path / "parts")
    (rest,) = run_ranks(seen, 1, which, 1, folder=tmp_path / "parts")
    # with what collate_fn draws, and what the job draws outside of its data
    assert begun["rows"] + rest["rows"] == alone["rows"]
    assert begun["dropouts"] + rest["dropouts"] == alone["dropouts"]
    ranks = run_ranks(seen, 2, which, 0, folder=tmp_path / "ranks")
    assert samples_of(ranks, 4) == samples_of([alone], 4)
    assert len({row[4] for answer in ranks for _, _, rows in answer["rows"] for row in rows}) == 2 * len(
        ranks[0]["rows"]
    )
    begun = run_ranks(seen, 1, which, 1, 3, folder=tmp_path / "grown")
    rest = run_ranks(seen, 2, which, 0, folder=tmp_path / "grown")
    assert samples_of([*begun, *rest], 4) == samples_of([alone], 4)


def reads_at_once(run: Run, workers: int) -> list[Any]:
    """Return what two passes drew. Workers that remain for both have a copy of the loader of the first one."""
    run.seed(3)
    options = {"persistent_workers": workers > 0, **with_workers(workers)}
    data = run.loader(AtOnce(), BATCH, collate_fn=mixing, **options)
    return [batch.tolist() for _ in range(2) for batch in data]


def test_dataset_that_reads_several_samples_at_once_draws_the_same_in_workers() -> None:
    (without,) = run_ranks(reads_at_once, 1, 0)
    (with_two,) = run_ranks(reads_at_once, 1, 2)
    assert with_two == without
    assert without[0] != without[6]


class Repeating(Dataset[float]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        return random.random()


def test_sample_repeated_by_a_sampler_draws_anew(run: Run) -> None:
    data = run.loader(Repeating(), 3, sampler=[0] * 6)
    assert len({number for batch in data for number in batch.tolist()}) == 6


def has_same_state(before: Any) -> bool:
    now = random_state(torch.device("cpu"))
    return bool(
        now.python == before.python
        and all(np.array_equal(one, other) for one, other in zip(now.numpy, before.numpy, strict=True))
        and torch.equal(now.torch, before.torch)
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda run: run.loader(Augmented(), BATCH, shuffle=True),
        lambda run: run.loader(AugmentedStream(), BATCH, collate_fn=mixing),
        lambda run: run.shard(Augmented(), BATCH),
        lambda run: run.shard(AugmentedStream(), BATCH, collate_fn=mixing),
    ],
)
def test_generators_of_the_job_are_left_alone(run: Run, make: Any) -> None:
    data = make(run)
    # a normal number that NumPy keeps for the next call belongs to the state
    np.random.randn()
    before = random_state(torch.device("cpu"))
    for _ in data:
        assert has_same_state(before)
    assert has_same_state(before)
    np.random.randn()
    assert not has_same_state(before)


class Failing(Augmented):
    def __getitem__(self, index: int) -> Row:
        row = super().__getitem__(index)
        if index == 3:
            raise ValueError("a damaged file")
        return row


@pytest.mark.parametrize("make", [lambda run: run.loader(Failing(), BATCH), lambda run: run.shard(Failing(), BATCH)])
def test_generators_of_the_job_are_left_alone_by_a_sample_that_fails(run: Run, make: Any) -> None:
    data = make(run)
    before = random_state(torch.device("cpu"))
    with pytest.raises(ValueError, match="a damaged file"):
        for _ in data:
            pass
    assert has_same_state(before)


def evaluated(run: Run, workers: int) -> list[list[Row]]:
    """Return what two passes at one step drew, and one at the next step."""
    run.seed(3)
    shard = run.shard(Augmented(), BATCH, collate_fn=torch.tensor, **with_workers(workers))
    passes = []
    for step in (1, 1, 2):
        run.step = step
        passes.append([row for batch in shard for row in batch.tolist()])
    return passes


def test_evaluation_draws_by_sample_and_anew_in_each_pass() -> None:
    (alone,) = run_ranks(evaluated, 1, 2)
    first, second = run_ranks(evaluated, 2, 0)
    assert [one + other for one, other in zip(first, second, strict=True)] == alone
    assert len({row[1] for rows in alone for row in rows}) == 3 * SIZE


class OwnGenerator(Augmented):
    """Seeds a generator of its own in each worker, as NumPy's documentation shows it."""

    numbers: np.random.Generator

    def __getitem__(self, index: int) -> Row:
        return [self.numbers.random()]


def seed_own(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.numbers = np.random.default_rng(info.seed)


def initialized(run: Run) -> list[float]:
    data = run.loader(OwnGenerator(), BATCH, worker_init_fn=seed_own, **with_workers(1))
    return [number for batch in data for number in batch[0].tolist()]


def test_worker_init_gets_the_dataset_of_the_job() -> None:
    (numbers,) = run_ranks(initialized, 1)
    assert len(set(numbers)) == SIZE


def test_forwarding_datasets_are_read_sample_by_sample() -> None:
    """A dataset that reads several at once can be seeded only once for all."""
    part = Part([4, 5, 6], [0, 1, 2], seed=7)
    plain = SeededReader(Augmented(), list)[part]
    assert SeededReader(Subset(Augmented(), range(SIZE)), list)[part] == plain
    stacked = SeededReader(StackDataset(Augmented(), TensorDataset(torch.arange(SIZE))), list)[part]
    assert [row for row, _ in stacked] == plain
    assert SeededReader(AtOnce(), list)[part] != plain
    assert SeededReader(Subset(AtOnce(), range(SIZE)), list)[part] == SeededReader(AtOnce(), list)[part]


class Cached(Augmented):
    """Draws only when it reads a sample for the first time, which differs between workers."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}

    def __getitem__(self, index: int) -> Row:
        if index not in self.rows:
            self.rows[index] = super().__getitem__(index)
        return self.rows[index]


def test_draws_of_collate_do_not_follow_from_those_of_samples() -> None:
    reader, part = SeededReader(Cached(), mixing), Part([4, 5, 6], [0, 1, 2], seed=7)
    assert torch.equal(reader[part], reader[part])
