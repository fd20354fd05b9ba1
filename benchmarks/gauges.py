"""What measuring where the time of a step goes costs, in CPU time."""

from __future__ import annotations

import time

import torch

from benchmarks.measure import interleave, median
from benchmarks.report import Row, Section
from mgpu_slurm.training.speed.gauges import Gauges

CALLS = 10_000
ROUNDS = 10
LIMIT = 200.0
"""Microseconds: 0.2% of a step of 100 ms."""


def run() -> Section:
    batch = (torch.zeros(32, 64, dtype=torch.long), torch.zeros(32))
    costs = interleave({"gauges": lambda: _cost(batch)}, ROUNDS)["gauges"]
    return Section("gauges", _ABOUT, [Row("CPU time of the gauges, a step", median(costs), "us", 2, LIMIT)], [])


def _cost(batch: object) -> float:
    """Return the CPU microseconds of a step, over `CALLS` steps with one batch and one backward pass."""
    gauges = Gauges(torch.device("cpu"))
    begun = time.process_time()
    for _ in range(CALLS):
        gauges.fetched(time.perf_counter(), 32, batch)
        gauges.backward_begins()
        gauges.backward_ends()
        gauges.step_done()
    return (time.process_time() - begun) / CALLS * 1e6


_ABOUT = (
    f"What a step calls to measure the curves of a run, {CALLS:,} times. The target is 0.2% of a step of 100 ms. On a"
    " GPU, marks of time are CUDA events; that was not measured."
)
