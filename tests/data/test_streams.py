"""Streams and samplers of a job's own: each sample once, the same batches on any ranks, and continued exactly."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from mgpu_slurm.core.errors import RunStopped, UserError
from mgpu_slurm.data.streams import Drawn, digest
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks

SIZE, BATCH, EPOCHS = 21, 5, 2
"""The last batch has one sample, so that a rank has none."""


class Stream(IterableDataset[int]):
    """Splits its samples among workers, as torch's documentation shows it."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(first, SIZE, step)


class Shuffled(IterableDataset[int]):
    """Draws its order from Python's and torch's generators as it goes."""

    def __iter__(self) -> Iterator[int]:
        numbers = torch.randperm(SIZE).tolist()
        while numbers:
            yield numbers.pop(random.randrange(len(numbers)))


class ByRank(IterableDataset[int]):
    """Gives each rank another stream."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        yield from range(self.rank, SIZE)


class DrawingCollate:
    """Augments with numbers of the process."""

    def __call__(self, samples: list[int]) -> torch.Tensor:
        return torch.stack([torch.tensor(samples).double(), torch.rand(len(samples)).double()], dim=1)


DATA = TensorDataset(torch.arange(SIZE))

LOADERS: dict[str, Callable[[Run], Any]] = {
    "stream": lambda run: run.loader(Stream(), BATCH),
    "shuffled stream": lambda run: run.loader(Shuffled(), BATCH),
    "sampler": lambda run: run.loader(DATA, BATCH, sampler=RandomSampler(DATA)),
    "batch sampler": lambda run: run.loader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA, generator=torch.Generator()), BATCH, drop_last=False)
    ),
}


def trains(run: Run, which: str, stop_at: int | None = None) -> dict[str, Any]:
    run.seed(3)
    torch.manual_seed(0)
    model = run.wrap(nn.Linear(1, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = LOADERS[which](run)
    meter = run.meter("mean")
    state = run.restore(model=model, optimizer=optimizer, data=data)
    seen: list[tuple[int, int, list[int]]] = []
    means = []
    torch.manual_seed(run.rank)
    try:
        for epoch in state.epochs(EPOCHS):
            for batch in data:
                numbers = batch[0] if isinstance(batch, list) else batch
                run.backward(model(numbers.double().unsqueeze(1)).square().mean())
                run.update(optimizer)
                meter.add(numbers.double().mean())
                seen.append((epoch, data.batch, numbers.tolist()))
                if len(seen) == stop_at:
                    run._loop_control.stop.asked = Stop.END
            means.append(meter.mean())
    except RunStopped:
        pass
    return {
        "seen": seen,
        "means": means,
        "weights": [each.item() for each in model.parameters()],
        # which no stream and no sampler draws from
        "next number": torch.rand(()).item(),
    }


@pytest.mark.parametrize("which", LOADERS)
def test_one_and_two_ranks_see_the_same_batches_and_resume_exactly(which: str, tmp_path: Path) -> None:
    (alone,) = run_ranks(trains, 1, which)
    assert [sorted(n for of, _, numbers in alone["seen"] if of == epoch for n in numbers) for epoch in (1, 2)] == [
        list(range(SIZE))
    ] * EPOCHS
    is_shuffled = which != "stream"
    assert (alone["seen"][0][2] != alone["seen"][5][2]) == is_shuffled
    whole = run_ranks(trains, 2, which, folder=tmp_path / "whole")
    for answer in whole:
        assert answer["weights"] == pytest.approx(alone["weights"], rel=1e-12)
        assert answer["means"] == pytest.approx(alone["means"])
    for (_, _, one), (_, _, first), (_, _, second) in zip(
        alone["seen"], whole[0]["seen"], whole[1]["seen"], strict=True
    ):
        # the first rank has none of the last batch of one sample
        assert one == (second if len(one) == 1 else first + second)
    begun = run_ranks(trains, 2, which, 3, folder=tmp_path / "parts")
    rest = run_ranks(trains, 2, which, folder=tmp_path / "parts")
    for answer, first, second in zip(whole, begun, rest, strict=True):
        # the ranks stop together, at most a batch later
        assert 3 <= len(first["seen"]) <= 4
        assert first["seen"] + second["seen"] == answer["seen"]
        assert second["weights"] == answer["weights"]
        assert second["next number"] == answer["next number"]


def test_stop_after_the_last_batch_of_a_stream_loses_nothing(tmp_path: Path) -> None:
    (whole,) = run_ranks(trains, 1, "stream", folder=tmp_path / "whole")
    (begun,) = run_ranks(trains, 1, "stream", 5, folder=tmp_path / "parts")
    (rest,) = run_ranks(trains, 1, "stream", folder=tmp_path / "parts")
    assert len(begun["seen"]) == 5
    assert begun["seen"] + rest["seen"] == whole["seen"]
    assert begun["means"] + rest["means"] == whole["means"]


def drawn_by_collate(run: Run) -> list[list[float]]:
    run.seed(5)
    return [batch.tolist() for batch in run.loader(Shuffled(), BATCH, collate_fn=DrawingCollate(), drop_last=True)]


def test_collate_draws_differ_by_rank_without_changing_the_stream() -> None:
    first, second = run_ranks(drawn_by_collate, 2)
    assert len(first) == len(second) == SIZE // BATCH
    assert len({number for batch in [*first, *second] for number, _ in batch}) == SIZE // BATCH * BATCH
    assert len({draw for batch in [*first, *second] for _, draw in batch}) == SIZE // BATCH * BATCH


def in_workers(run: Run) -> list[list[list[int]]]:
    """Passes without workers, and with them, one of which continues in the middle."""
    alone, together = run.loader(Shuffled(), BATCH), run.loader(Shuffled(), BATCH, num_workers=2)
    passes = [[batch.tolist() for batch in alone], [batch.tolist() for batch in together]]
    together.place.first_batch, together.place.passes = 3, 0
    passes.append([batch.tolist() for batch in together])
    shard = run.shard(Stream(), batch_size=4, num_workers=2)
    return [*passes, [batch.tolist() for batch in shard]]


def test_workers_read_the_same_stream() -> None:
    ((alone, together, continued, shard),) = run_ranks(in_workers, 1)
    assert together == alone
    assert continued == alone[3:]
    assert shard == [list(range(begin, min(begin + 4, SIZE))) for begin in range(0, SIZE, 4)]


def evaluated(run: Run) -> tuple[list[int], float]:
    seen = [int(number) for batch in run.shard(Stream(), batch_size=2) for number in batch]
    return seen, run.mean(sum(seen), len(seen))


def test_shard_of_a_stream_has_no_duplicate_samples() -> None:
    answers = run_ranks(evaluated, 2)
    assert sorted(number for seen, _ in answers for number in seen) == list(range(SIZE))
    assert [mean for _, mean in answers] == [sum(range(SIZE)) / SIZE] * 2


def refused(run: Run) -> list[str]:
    said = []
    drawn_anywhere = WeightedRandomSampler([1.0] * 8, 8, generator=None)
    drawn_anywhere.generator = None
    for make in (
        lambda: list(run.loader(ByRank(run.rank), BATCH)),
        lambda: list(run.shard(ByRank(run.rank))),
        lambda: list(run.loader(DATA, BATCH, sampler=[run.rank] * 4)),
        lambda: run.loader(DATA, BATCH, sampler=DistributedSampler(DATA)),
        lambda: len(list(run.loader(DATA, 4, sampler=drawn_anywhere))),
    ):
        try:
            said.append(str(make()))
        except UserError as error:
            said.append(str(error))
    return said


def test_data_that_differs_between_ranks_is_named_in_the_error() -> None:
    for of_stream, of_shard, of_sampler, of_distributed, of_weighted in run_ranks(refused, 2):
        assert "ByRank yields different samples on rank 1 than on rank 0: it must yield all" in of_stream
        assert of_shard == of_stream
        assert "the sampler yields different samples on each rank" in of_sampler
        assert "DistributedSampler yields one rank's part" in of_distributed
        assert of_weighted == "2"


class Sample:
    """Of a type that nobody knows."""

    def __init__(self, number: int) -> None:
        self.number = number


class SplitSamples(IterableDataset[Sample]):
    """Gives each rank its part, all of the same length."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Sample]:
        yield from map(Sample, range(self.rank, 20, 2))


class DifferentLater(IterableDataset[int]):
    """Gives each rank the same first batch, and then others."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        yield from range(BATCH)
        yield from range(100 * (1 + self.rank), 100 * (1 + self.rank) + 3 * BATCH)


class ShorterOnRank1(IterableDataset[int]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        yield from range(SIZE if self.rank == 0 else 2 * BATCH)


def numbers_of(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([each.number if isinstance(each, Sample) else each for each in samples])


def trains_on(run: Run, dataset: type[Any], batches: int | None, exchanges_gradients: bool) -> None:
    """
    Args:
        batches: after which the loop is left; None for none.
    """
    model = nn.Linear(1, 1)
    if exchanges_gradients:
        model = run.wrap(model)
    for _ in run.restore(model=model).epochs(1):
        for number, batch in enumerate(run.loader(dataset(run.rank), BATCH, collate_fn=numbers_of)):
            run.backward(model(batch.float().unsqueeze(1)).mean())
            if number == batches:
                break


@pytest.mark.parametrize(
    ("dataset", "batches"), [(SplitSamples, None), (DifferentLater, None), (DifferentLater, 2), (ShorterOnRank1, None)]
)
def test_stream_that_differs_between_ranks_is_rejected(dataset: type[Any], batches: int | None) -> None:
    refused = f"UserError: {dataset.__name__} yields different samples on rank 1 than on rank 0: it must yield all"
    # what a rank says that has waited for a slow one at the end of a stream
    waited = "UserError: the ranks make different calls: rank 0 at the next batch of a loader, rank 1 at the end of a"
    for answer in run_ranks(trains_on, 2, dataset, batches, False, may_fail=True):
        assert answer.startswith((refused, waited) if dataset is ShorterOnRank1 else refused)


class KeptSamples(IterableDataset[Sample]):
    """Gives the same objects in each pass."""

    def __init__(self) -> None:
        self.samples = [*map(Sample, range(SIZE))]

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)


def changing_collate(samples: list[Sample]) -> torch.Tensor:
    for sample in samples:
        sample.number += 100
    return numbers_of(samples)


def changes_its_samples(run: Run) -> list[int]:
    loader = run.loader(KeptSamples(), BATCH, collate_fn=changing_collate)
    return [number for batch in loader for number in batch.tolist()]


def test_samples_modified_by_collate_are_not_compared() -> None:
    first, second = run_ranks(changes_its_samples, 2)
    assert len(first) + len(second) == SIZE + 1


def test_all_differing_ranks_are_named() -> None:
    drawn = Drawn()
    drawn.add(ShorterOnRank1(0), None)
    with pytest.raises(UserError, match=r"^ShorterOnRank1 yields different samples on ranks 1,3-4 than on rank 0: "):
        drawn.check([5, 6, 5, 7, 6])


def test_stream_ending_early_on_one_rank_is_reported() -> None:
    _, answer = run_ranks(trains_on, 2, ShorterOnRank1, None, True, may_fail=True)
    assert answer.startswith(
        "UserError: the ranks make different calls: rank 0 at the next batch of a loader, rank 1 at the end of a"
        " stream. A stream must yield all of its samples in the same order on each rank"
    )


def with_parts(*parts: Any) -> Sample:
    """A sample that refers to itself."""
    sample = Sample(0)
    sample.__dict__.update(parts=parts, of=sample)
    return sample


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (lambda: Sample(1), lambda: Sample(1), lambda: Sample(2)),
        # these two are in each other's way, and stay in the order in which they came
        (lambda: with_parts({0, 8}), lambda: with_parts({8, 0}), lambda: with_parts({0, 16})),
        (lambda: {0, 8}, lambda: {8, 0}, lambda: {0, 16}),
        (
            lambda: with_parts(torch.arange(3)),
            lambda: with_parts(torch.arange(3)),
            lambda: with_parts(torch.arange(1, 4)),
        ),
        (
            lambda: np.array([Sample(1)], dtype=object),
            lambda: np.array([Sample(1)], dtype=object),
            lambda: np.array([Sample(2)], dtype=object),
        ),
        # no function without a name can be pickled
        (lambda: with_parts(lambda: 1), lambda: with_parts(lambda: 2), lambda: iter([])),
    ],
)
def test_digest_depends_on_the_contents_of_an_object(
    one: Callable[[], Any], same: Callable[[], Any], other: Callable[[], Any]
) -> None:
    first = one()
    assert digest(first) == digest(same())
    assert digest(first) != digest(other())


class OwnNumbers:
    """Numbers of its own, which a new process draws from the beginning."""

    def __init__(self, is_seeded: bool) -> None:
        self.numbers = random.Random(0)
        if is_seeded:
            self.set_epoch = self.numbers.seed

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers.sample(range(SIZE), SIZE))


class OwnStream(IterableDataset[int]):
    def __init__(self, is_seeded: bool) -> None:
        self.own = OwnNumbers(is_seeded)
        if is_seeded:
            self.set_epoch = self.own.set_epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.own)


OWN: dict[str, Callable[[Run, bool], Any]] = {
    "stream": lambda run, is_seeded: run.loader(OwnStream(is_seeded), BATCH),
    "sampler": lambda run, is_seeded: run.loader(DATA, BATCH, sampler=OwnNumbers(is_seeded)),
}


def draws_its_own(
    run: Run, which: str, is_seeded: bool, drives: bool, stop_at: int | None = None
) -> list[list[int]] | str:
    """
    Args:
        drives: whether the loader is the one that the run restores, or another one.
        stop_at: after so many batches; None for not at all.
    """
    data = OWN[which](run, is_seeded)
    driver = data if drives else run.loader(DATA, BATCH)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    seen: list[list[int]] = []
    if stop_at == 0:
        run._loop_control.stop.asked = Stop.END
    try:
        for _ in run.restore(data=driver, optimizer=optimizer).epochs(EPOCHS):
            for batch, *_ in zip(data, strict=True) if drives else zip(data, driver, strict=True):
                optimizer.step()
                seen.append((batch[0] if isinstance(batch, list) else batch).tolist())
                if len(seen) == stop_at:
                    run._loop_control.stop.asked = Stop.END
    except RunStopped:
        pass
    except UserError as error:
        return str(error)
    return seen


@pytest.mark.parametrize("drives", [True, False])
@pytest.mark.parametrize("which", OWN)
def test_different_sample_order_after_a_restart_is_rejected(which: str, drives: bool, tmp_path: Path) -> None:
    """In the second epoch, which a new process would begin like the first."""
    seeded, own = tmp_path / "seeded", tmp_path / "own"
    (whole,) = run_ranks(draws_its_own, 1, which, True, drives, folder=tmp_path / "whole")
    (begun,) = run_ranks(draws_its_own, 1, which, True, drives, 7, folder=seeded)
    (rest,) = run_ranks(draws_its_own, 1, which, True, drives, folder=seeded)
    assert len(begun) == 7
    assert begun + rest == whole
    run_ranks(draws_its_own, 1, which, False, drives, 7, folder=own)
    # stopped again before it has a batch
    assert run_ranks(draws_its_own, 1, which, False, drives, 0, folder=own) == [[]]
    (refused,) = run_ranks(draws_its_own, 1, which, False, drives, folder=own, may_fail=True)
    name = "OwnStream" if which == "stream" else "OwnNumbers"
    assert f"run.loader: {name} yields different samples than before the restart, or in a different order" in refused


class Growing:
    """A batch sampler that has a batch more in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 1 + self.epoch

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([2 * number, 2 * number + 1] for number in range(len(self)))


class GrowingAsItGoes(Growing):
    """One that decides on its length only when it is iterated."""

    def set_epoch(self, epoch: int) -> None:
        pass

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch += 1
        return super().__iter__()


def grows(run: Run, stop_at: int | None = None) -> list[tuple[int, int, list[int]]]:
    data = run.loader(DATA, batch_sampler=Growing())
    seen: list[tuple[int, int, list[int]]] = []
    try:
        for epoch in run.restore(data=data).epochs(4):
            for (numbers,) in data:
                seen.append((epoch, len(data), numbers.tolist()))
                if len(seen) == stop_at:
                    run._loop_control.stop.asked = Stop.END
    except RunStopped:
        pass
    return seen


def test_sampler_whose_length_changes_per_epoch_loses_no_batch(tmp_path: Path) -> None:
    (whole,) = run_ranks(grows, 1, folder=tmp_path / "whole")
    assert whole == [
        (epoch, 1 + epoch, [2 * number, 2 * number + 1]) for epoch in range(1, 5) for number in range(1 + epoch)
    ]
    (begun,) = run_ranks(grows, 1, 7, folder=tmp_path / "parts")
    (rest,) = run_ranks(grows, 1, folder=tmp_path / "parts")
    assert len(begun) == 7
    assert begun + rest == whole


def evaluates_in_the_loop(run: Run) -> list[tuple[list[int], int]]:
    data = run.loader(DATA, batch_sampler=Growing())
    seen = []
    for _ in range(2):
        for (numbers,) in data:
            with torch.no_grad():
                seen.append((numbers.tolist(), len(list(data))))
    return seen


def test_evaluation_inside_the_loop_keeps_the_epoch_length() -> None:
    (seen,) = run_ranks(evaluates_in_the_loop, 1)
    assert seen == [([2 * number, 2 * number + 1], length) for length in (2, 3) for number in range(length)]


def test_sampler_whose_length_changes_on_iteration_is_rejected(run: Run) -> None:
    with pytest.raises(UserError, match="the length of GrowingAsItGoes changed from 1 to 2 when it was iterated"):
        list(run.loader(DATA, batch_sampler=GrowingAsItGoes()))
