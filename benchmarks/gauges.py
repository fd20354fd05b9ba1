"""What measuring where the time of a step goes costs, and what looking for mistakes that cost memory does."""

from __future__ import annotations

import time
from unittest.mock import Mock

import torch
from torch.nn.functional import cross_entropy

from benchmarks.measure import interleave, median
from benchmarks.report import Row, Section
from mgpu_slurm import import_torchvision
from mgpu_slurm.training.memory.mistakes import FIRST, LOOK_SECONDS, STEPS, Mistakes
from mgpu_slurm.training.speed.gauges import Gauges

CALLS = 10_000
ROUNDS = 10
LIMIT = 200.0
"""Microseconds: 0.2% of a step of 100 ms."""
CPU = torch.device("cpu")


def run() -> Section:
    batch = (torch.zeros(32, 64, dtype=torch.long), torch.zeros(32))
    torch.set_num_threads(1)
    found = interleave({"gauges": lambda: _cost(batch), "looks": _looks}, ROUNDS)
    looks = median(found["looks"]).scaled(1e3)
    rows = [
        Row("CPU time of the gauges, a step", median(found["gauges"]), "us", 2, LIMIT),
        Row("wall time of a look for mistakes, the longer of two", looks, "ms", 1, LOOK_SECONDS * 1e3),
    ]
    return Section("gauges", _ABOUT, rows, [])


def _cost(batch: object) -> float:
    """Return the CPU microseconds of a step, over `CALLS` steps with one batch and one backward pass."""
    gauges = Gauges(CPU)
    begun = time.process_time()
    for _ in range(CALLS):
        gauges.fetched(gauges.fetch_begins(), 32, batch)
        gauges.backward_begins()
        gauges.backward_ends()
        gauges.step_done()
    return (time.process_time() - begun) / CALLS * 1e6


def _looks() -> float:
    """Return the seconds of the longer one of the two looks in a training of a ResNet-50."""
    model = import_torchvision().models.resnet50()
    optimizer = torch.optim.AdamW(model.parameters())
    images, labels = torch.randn(4, 3, 32, 32), torch.randint(1000, (4,))
    mistakes = Mistakes(CPU, Mock(held=lambda: [model]), watches=True)
    # what jobs keep: numbers of each step, and the newest outputs
    losses: list[float] = []
    outputs: list[torch.Tensor] = []
    seconds = []
    for _ in range(FIRST + STEPS):
        scores = model(images)
        loss = cross_entropy(scores, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        outputs = [*outputs[-9:], scores.detach()]
        begun = time.perf_counter()
        mistakes.step_done()
        seconds.append(time.perf_counter() - begun)
    return max(seconds[FIRST - 1], seconds[-1])


_ABOUT = (
    f"What a step calls to measure the curves of a run, {CALLS:,} times. The target is 0.2% of a step of 100 ms. On a"
    f" GPU, marks of time are CUDA events; that was not measured. After steps {FIRST} and {FIRST + STEPS} of an"
    " attempt, the variables of the job are looked at, here of a training of a ResNet-50 with AdamW, on one thread."
)
