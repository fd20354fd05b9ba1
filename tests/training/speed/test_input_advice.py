"""Advice on loaders that keep the ranks waiting: what it says, and when."""

from __future__ import annotations

import contextlib
import io
import re
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from mgpu_slurm.training.run import Run
from mgpu_slurm.training.speed import input_advice
from mgpu_slurm.training.speed.input_advice import FIRST_STEPS, STEPS, InputAdvice, advice
from tests.ranks import run_ranks

LESS = "do less in the dataset, or do it once before the training"


@pytest.mark.parametrize(
    ("share", "workers", "cores", "most_cores", "fix"),
    [
        # without workers, loading takes as long as the step waits
        (0.31, 0, 8, 16, 'use num_workers="auto"'),
        (0.31, 0, 1, 16, 'use num_workers="auto" with --cpus-per-task 2'),
        (0.8, 0, 2, 16, 'use num_workers="auto" with --cpus-per-task 5'),
        (0.8, 0, 2, 4, f'use num_workers="auto" with --cpus-per-task 4, and {LESS}'),
        (0.5, 0, 1, 1, LESS),
        (1.0, 0, 8, 128, f'use num_workers="auto" with --cpus-per-task 17, and {LESS}'),
        # two workers are busy for the whole step
        (0.5, 2, 8, 16, "use num_workers=4"),
        (0.5, 2, 3, 16, "use num_workers=4 with --cpus-per-task 5"),
        (0.5, 7, 8, 8, LESS),
        (0.5, 12, 13, 64, f"use num_workers=16 with --cpus-per-task 17, and {LESS}"),
        (0.2, 16, 32, 64, LESS),
    ],
)
def test_advice_fits_the_loader_and_the_cores(
    share: float, workers: int, cores: int, most_cores: int, fix: str
) -> None:
    who = f"waits {share:.0%} of each step for data: {fix}"
    assert advice(share, workers, cores, most_cores, has_gpu=True) == f"the GPU {who}"
    assert advice(share, workers, cores, most_cores, has_gpu=False) == f"each rank {who}"


def test_more_workers_are_no_advice_for_a_stream() -> None:
    """Each reads all of it."""
    assert advice(0.8, 0, 2, 16, has_gpu=False, is_stream=True).endswith(f': use num_workers="auto", and {LESS}')
    assert advice(0.8, 1, 8, 16, has_gpu=False, is_stream=True).endswith(f": {LESS}")


class Clock:
    """The time, which steps and waits advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(input_advice.time, "perf_counter", lambda: self.now)

    def step(self, measured: InputAdvice, wait: float, compute: float) -> str | None:
        fetch = measured._waits.begin()
        self.now += wait
        measured.fetched(fetch, 0, False)
        self.now += compute
        return measured.step_done()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def on_cpu() -> InputAdvice:
    return InputAdvice(torch.device("cpu"), cores=8, most_cores=8)


def test_first_steps_do_not_count_and_advice_comes_once(clock: Clock) -> None:
    measured = on_cpu()
    waits = [10.0] * FIRST_STEPS + [0.03] * 3 * STEPS
    said = [clock.step(measured, wait, 0.07) for wait in waits]
    assert [number for number, sentence in enumerate(said, 1) if sentence] == [FIRST_STEPS + STEPS]
    assert 'each rank waits 30% of each step for data: use num_workers="auto"' in said


@pytest.mark.parametrize(
    ("wait", "compute"),
    [
        (0.009, 0.091),
        # a worker would not be faster
        (0.001, 0.001),
    ],
)
def test_fast_loader_gets_no_advice(clock: Clock, wait: float, compute: float) -> None:
    measured = on_cpu()
    assert [clock.step(measured, wait, compute) for _ in range(2 * STEPS)] == [None] * 2 * STEPS


class Event:
    """An event of a GPU that needs a while longer for what it was told than its rank."""

    def __init__(self, clock: Clock, lag: float) -> None:
        self._clock, self._lag = clock, lag
        self.at = 0.0

    def record(self) -> None:
        # it has nothing to do for the rest of the wait
        self.at = self._clock.now + self._lag
        self._lag = 0.0

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * max(0.0, later.at - self.at)


@pytest.mark.parametrize(
    ("lag", "said"), [(0.0, "the GPU waits 30% of"), (0.015, "the GPU waits 15% of"), (0.05, None)]
)
def test_busy_gpu_does_not_wait(clock: Clock, monkeypatch: pytest.MonkeyPatch, lag: float, said: str | None) -> None:
    lags: list[float] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(clock, lags.pop()))
    measured = InputAdvice(torch.device("cuda", 0), cores=8, most_cores=8)
    sentence = None
    for _ in range(FIRST_STEPS + STEPS):
        # before and after the wait
        lags[:] = [0.0, lag]
        sentence = clock.step(measured, 0.03, 0.07) or sentence
    assert sentence is None if said is None else (sentence or "").startswith(said)


class Slow(Dataset[tuple[torch.Tensor]]):
    def __len__(self) -> int:
        return 2 * (FIRST_STEPS + STEPS)

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        time.sleep(0.01)
        return (torch.ones(4),)


FAST = TensorDataset(torch.ones(len(Slow()), 4))


def train(run: Run, dataset: Dataset[Any], seconds_of_step: float = 0.0) -> list[str]:
    """Return what is printed in two epochs, each of as many steps as are looked at."""
    model: Any = run.wrap(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for _ in range(2):
            for (batch,) in run.loader(dataset, batch_size=2):
                time.sleep(seconds_of_step)
                run.backward(model(batch).mean())
                run.update(optimizer)
    return printed.getvalue().splitlines()


def test_real_training_is_advised_once_by_rank_0() -> None:
    (line,), others = run_ranks(train, 2, Slow())
    assert re.match(r"mgpu_slurm: each rank waits \d+% of each step for data: ", line)
    assert others == []


def test_real_training_with_a_fast_loader_is_not_advised() -> None:
    assert run_ranks(train, 1, FAST, 0.02) == [[]]
