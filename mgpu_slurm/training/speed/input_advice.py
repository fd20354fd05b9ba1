"""Advise, once in a run, on loaders that keep the ranks waiting."""

from __future__ import annotations

import math
import time

import torch

from mgpu_slurm.data.worker_choice import AUTO, MOST_WORKERS
from mgpu_slurm.training.speed.data_waits import DataWaits, Fetch

FIRST_STEPS = 10
"""Steps that are not measured: workers start, and a GPU warms up."""
STEPS = 40
"""Steps that are measured."""
LEAST_SHARE = 0.1
"""Part of a step for which a rank has to wait."""
LEAST_SECONDS = 2e-3
"""Seconds of a step for which it has to wait: to fetch a batch from a worker takes that long on a busy machine."""


def advice(share: float, workers: int, cores: int, most_cores: int, has_gpu: bool, is_stream: bool = False) -> str:
    """Return a sentence that states how long each step waits for data, and what would help.

    Args:
        share: part of a step for which this rank waits.
        workers: number of workers of its loader.
        cores: number of cores of this rank.
        most_cores: number that it may request.
        is_stream: whether each worker reads the whole dataset.
    """
    # a batch takes n workers the whole step, or the rank itself the wait; it should take the rest of the step
    needed = math.ceil(round((workers or share) / max(1 - share, 0.01), 6))
    within = min(needed + 1, 2 if is_stream else MOST_WORKERS + 1, max(most_cores, cores))
    fixes = []
    if within - 1 > workers:
        with_cores = f" with --cpus-per-task {within}" if within > cores else ""
        number = within - 1 if workers else f'"{AUTO}"'
        fixes.append(f"use num_workers={number}{with_cores}")
    if within <= needed:
        fixes.append("do less in the dataset, or do it once before the training")
    who = "the GPU waits" if has_gpu else "each rank waits"
    return f"{who} {share:.0%} of each step for data: {', and '.join(fixes)}"


class InputAdvice:
    """Measures how long one rank waits for its data in the first steps."""

    def __init__(self, device: torch.device, cores: int, most_cores: int) -> None:
        """
        Args:
            cores: number of cores of this rank.
            most_cores: number that it may request.
        """
        self._device = device
        self._cores, self._most_cores = cores, most_cores
        self._steps = 0
        self._begun = 0.0
        self._waits = DataWaits(device)
        self._longest, self._workers, self._is_stream = 0.0, 0, False
        """The longest wait for a batch, and the number of workers of that loader, and whether it reads a stream."""

    def fetched(self, fetch: Fetch, workers: int, is_stream: bool) -> None:
        """Record that a training loop got a batch.

        Args:
            workers: number of workers of the loader.
            is_stream: whether each of them reads the whole dataset.
        """
        if not FIRST_STEPS <= self._steps < FIRST_STEPS + STEPS:
            return
        self._waits.end(fetch)
        waited = time.perf_counter() - fetch.begun
        if waited > self._longest:
            self._longest, self._workers, self._is_stream = waited, workers, is_stream

    def step_done(self) -> str | None:
        """Record the end of a step; return the advice after the last one that is measured, if it waits for long."""
        self._steps += 1
        if self._steps == FIRST_STEPS:
            self._begun = time.perf_counter()
        return self._advice() if self._steps == FIRST_STEPS + STEPS else None

    def _advice(self) -> str | None:
        seconds = time.perf_counter() - self._begun
        waited = self._waits.take()
        if waited < max(LEAST_SHARE * seconds, LEAST_SECONDS * STEPS):
            return None
        has_gpu = self._device.type == "cuda"
        return advice(waited / seconds, self._workers, self._cores, self._most_cores, has_gpu, self._is_stream)
