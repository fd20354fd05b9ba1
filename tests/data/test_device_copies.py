"""Batches are copied to a GPU one ahead: none is lost, and an error is raised where its batch is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import Dataset, TensorDataset

from mgpu_slurm.core.errors import RunStopped
from mgpu_slurm.data import loaders
from mgpu_slurm.data.device_copies import on_device, one_ahead
from mgpu_slurm.rank import rank_info
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.signals import Stop, StopFlag
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks

SIZE, BATCH, EPOCHS = 20, 4, 2


def sender(events: list[str]) -> Callable[[Any], Callable[[], Any]]:
    """Return a `send` that only records what happens."""

    def send(batch: Any) -> Callable[[], Any]:
        events.append(f"send {batch}")

        def receive() -> Any:
            events.append(f"receive {batch}")
            return batch

        return receive

    return send


def failing_after(batches: int) -> Iterator[int]:
    yield from range(batches)
    raise ValueError("the data is broken")


class TestOneAhead:
    def test_next_batch_is_sent_before_this_one_is_received(self) -> None:
        events: list[str] = []
        for batch in one_ahead(iter(range(3)), sender(events)):
            events.append(f"use {batch}")
        assert events == [
            *("send 0", "send 1", "receive 0", "use 0"),
            *("send 2", "receive 1", "use 1"),
            *("receive 2", "use 2"),
        ]

    @pytest.mark.parametrize("size", [0, 1])
    def test_short_passes_end(self, size: int) -> None:
        assert [*one_ahead(iter(range(size)), sender([]))] == [*range(size)]

    @pytest.mark.parametrize("size", [0, 1, 3])
    def test_error_is_raised_where_its_batch_is_asked_for(self, size: int) -> None:
        batches = one_ahead(failing_after(size), sender([]))
        assert [next(batches) for _ in range(size)] == [*range(size)]
        with pytest.raises(ValueError, match="the data is broken"):
            next(batches)

    def test_batch_is_freed_when_the_job_drops_it(self) -> None:
        freed = []

        class Batch:
            def __del__(self) -> None:
                freed.append(self)

        def batches() -> Iterator[Batch]:
            for _ in range(3):
                yield Batch()

        def send(batch: Batch) -> Callable[[], Batch]:
            return [batch].pop

        received = one_ahead(batches(), send)
        next(received)
        assert len(freed) == 1


def sends_ahead(batches: Iterable[Any], _: torch.device) -> Iterator[Any]:
    return one_ahead(iter(batches), lambda batch: lambda: batch)


def seen(run: Run, is_ahead: bool, stop_at: int | None = None) -> list[tuple[int, int, list[int]]]:
    if is_ahead:
        loaders.on_device = sends_ahead
    run.seed(3)
    model = run.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = run.loader(TensorDataset(torch.arange(SIZE)), BATCH, shuffle=True)
    found = []
    with contextlib.suppress(RunStopped):
        for epoch in run.restore(model=model, optimizer=optimizer, data=data).epochs(EPOCHS):
            for (batch,) in data:
                run.backward(model(batch[:, None].float()).mean(), batch)
                run.update(optimizer)
                found.append((epoch, data.batch, batch.tolist()))
                if run.step == stop_at:
                    run._loop_control.stop.asked = Stop.END
    return found


@pytest.mark.parametrize("stop_at", [3, 4, 5])
def test_stopped_run_continues_with_the_batch_that_it_had_not_used(stop_at: int, tmp_path: Path) -> None:
    """Also in the last batches of a pass, of which none is ahead."""
    (whole,) = run_ranks(seen, 1, False, folder=tmp_path / "whole")
    (begun,) = run_ranks(seen, 1, True, stop_at, folder=tmp_path / "parts")
    (rest,) = run_ranks(seen, 1, True, folder=tmp_path / "parts")
    assert len(begun) == stop_at
    assert begun + rest == whole


class Broken(Dataset[int]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        if index == 2 * BATCH:
            raise ValueError("the data is broken")
        return index


def fails(run: Run) -> tuple[list[list[int]], str]:
    loaders.on_device = sends_ahead
    found: list[list[int]] = []
    try:
        for batch in run.loader(Broken(), BATCH):
            found.append(batch.tolist())
    except ValueError as error:
        return found, str(error)
    return found, ""


def test_batches_before_a_broken_one_are_used() -> None:
    assert run_ranks(fails, 1) == [([[0, 1, 2, 3], [4, 5, 6, 7]], "the data is broken")]


def test_nothing_is_read_ahead_on_a_cpu() -> None:
    fetched = []
    batches = on_device((fetched.append(number) or number for number in range(3)), torch.device("cpu"))
    assert (next(batches), fetched) == (0, [0])


# -- on a GPU


@pytest.fixture
def gpu_run(tmp_path: Path) -> Iterator[Run]:
    run = Run(RankInfo(), tmp_path, rank_info.choose_device(RankInfo()), 1, StopFlag())
    yield run
    run.close()


class Large(Dataset[torch.Tensor]):
    """Each sample has its number in each place."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 << 18,), float(index))


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_memory_of_a_batch_is_not_reused_while_it_is_computed_with(gpu_run: Run, workers: int) -> None:
    data = gpu_run.loader(Large(), batch_size=8, num_workers=workers)
    busy = torch.randn(2048, 2048, device=gpu_run.device)
    sums = []
    for batch in data:
        assert batch.device == gpu_run.device
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        # computed long after the loop has dropped the batch
        sums.append((batch + busy[0, 0] * 0).double().mean(dim=1))
        del batch
    assert torch.cat(sums).tolist() == [float(index) for index in range(256)]


def collate_of_all_kinds(samples: list[int]) -> dict[str, Any]:
    rows = torch.tensor(samples)
    return {
        "rows": rows,
        "texts": [str(sample) for sample in samples],
        "packed": pack_sequence([rows.float()]),
        "sparse": rows.float().to_sparse(),
        "nested": [rows, (rows, 3)],
    }


@pytest.mark.gpu
def test_all_kinds_of_batches_are_copied(gpu_run: Run) -> None:
    data = gpu_run.loader(Broken(), BATCH, collate_fn=collate_of_all_kinds, pin_memory=False, sampler=range(4))
    (batch,) = data
    packed: PackedSequence = batch["packed"]
    for tensor in (batch["rows"], packed.data, batch["sparse"].to_dense(), batch["nested"][0], batch["nested"][1][0]):
        assert tensor.device == gpu_run.device
        assert tensor.tolist() == [0, 1, 2, 3]
    assert batch["texts"] == ["0", "1", "2", "3"]


@pytest.mark.gpu
def test_dataset_on_the_gpu_is_not_copied(gpu_run: Run) -> None:
    dataset = TensorDataset(torch.arange(SIZE, device=gpu_run.device))
    data = gpu_run.loader(dataset, BATCH, pin_memory=False)
    assert [number for (batch,) in data for number in batch.tolist()] == [*range(SIZE)]


@pytest.mark.gpu
def test_next_batch_is_copied_while_a_step_computes(gpu_run: Run) -> None:
    busy = torch.randn(4096, 4096, device=gpu_run.device)
    batches = on_device(iter([torch.ones(1 << 20).pin_memory() for _ in range(3)]), gpu_run.device)
    next(batches)
    torch.cuda.synchronize()
    side = torch.cuda.Event()
    for _ in range(200):
        busy = (busy @ busy).clamp(-1, 1)
    computed = torch.cuda.Event()
    computed.record()
    next(batches)
    # the copy of the third batch was begun after all of that, on another stream
    from mgpu_slurm.data.device_copies import _side_stream

    side.record(_side_stream(gpu_run.device))
    side.synchronize()
    assert not computed.query()
