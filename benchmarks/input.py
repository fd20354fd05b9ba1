"""What seeding each sample costs, in CPU time of the process that reads it."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from torch.utils.data import Dataset

from benchmarks.measure import difference, interleave, median
from benchmarks.report import Row, Section
from mgpu_slurm.data.sample_seeds import Part, SeededReader

BATCH = 256
ROUNDS = 40
BATCHES = 20
"""In each measurement."""
LIMIT = 20.0
"""Microseconds: 1% of a sample that takes 2 ms to decode and transform."""


class Numbers(Dataset[int]):
    """As cheap to read as a dataset can be."""

    def __len__(self) -> int:
        return BATCH

    def __getitem__(self, index: int) -> int:
        return index


def run() -> Section:
    cases = {"one": partial(_cost, 1), "batch": partial(_cost, BATCH), "plain": _plain_cost}
    costs = interleave(cases, ROUNDS)
    # a batch costs as much as its samples, and a constant for the generators of the job and for collate_fn
    per_sample = [(batch - one) / (BATCH - 1) for batch, one in zip(costs["batch"], costs["one"], strict=True)]
    constant = [one - sample for one, sample in zip(costs["one"], per_sample, strict=True)]
    plain = [cost / BATCH for cost in costs["plain"]]
    rows = [
        Row("CPU time of the seeds of a sample", difference(per_sample, plain), "us", 2, LIMIT),
        Row("CPU time for each batch besides, without workers", median(constant), "us", 0),
    ]
    return Section("input", _ABOUT, rows, [])


def _cost(size: int) -> float:
    """Return the CPU microseconds of a batch of `size` samples."""
    reader, part = SeededReader(Numbers(), len), Part(range(size), range(size), seed=1)
    begun = time.process_time()
    for _ in range(BATCHES):
        reader[part]
    return (time.process_time() - begun) / BATCHES * 1e6


def _plain_cost() -> float:
    dataset: Any = Numbers()
    begun = time.process_time()
    for _ in range(BATCHES):
        len([dataset[index] for index in range(BATCH)])
    return (time.process_time() - begun) / BATCHES * 1e6


_ABOUT = (
    f"Python's, NumPy's and torch's generators are seeded before each sample, {BATCH} in a batch. Without workers, the"
    " generators of the job are restored after each batch; workers need not do that. A `TensorDataset` is not seeded."
)
