"""Measure where the time of a rank's steps goes, without any code of the job."""

from __future__ import annotations

import time
from typing import Any

import torch

from mgpu_slurm.data.batching.nests import children_of
from mgpu_slurm.run_folder.speed_records import Interval
from mgpu_slurm.training.speed.data_waits import DataWaits, Fetch, Spans, event
from mgpu_slurm.training.speed.gpu_sampler import GpuSampler


class Gauges:
    """Times the steps of one rank. A GPU computes later than it is told to, so it marks the times by itself."""

    def __init__(self, device: torch.device, sampler: GpuSampler | None = None) -> None:
        """
        Args:
            sampler: looks at the rank's GPUs.
        """
        self._device = device
        self._sampler = sampler
        self._now = Interval()
        self.samples_of_step = 0
        """Number of this rank's samples in the current step."""
        self._begun: float | None = None
        """When the current step began; None between a step and the next batch."""
        self._ended: float | None = None
        """When the step before ended; None if the time since then belongs to no step."""
        self._last: Any = None
        """The end of the pass, or of the fetch, before."""
        self._waits = DataWaits(device)
        self._forward = Spans(device)
        self._backward = Spans(device)
        self._row = _Row(device)

    def fetch_begins(self) -> Fetch:
        """Record that a loop over a loader asks for a batch."""
        return self._waits.begin()

    def fetched(self, fetch: Fetch, count: int, batch: Any) -> None:
        """Record that it got the batch.

        Args:
            count: number of samples that this rank has of it.
        """
        if self._begun is None:
            # on a GPU, the time of a step passes where the job reads its loss
            self._begun = fetch.begun if self._ended is None else self._ended
            self._row.begin(fetch.told)
        self._waits.end(fetch)
        self._now.samples += count
        self.samples_of_step += count
        self._now.tokens += _tokens_in(batch)
        self._last = self._forward.mark()

    def backward_begins(self) -> None:
        """Record the end of a forward pass."""
        now = self._forward.mark()
        if self._last is not None:
            self._forward.add(self._last, now)
        self._last = now

    def backward_ends(self) -> None:
        """Record the end of a backward pass."""
        begun, self._last = self._last, self._backward.mark()
        self._backward.add(begun, self._last)

    def step_done(self) -> None:
        """Record the end of a step."""
        now = time.perf_counter()
        # without a run.loader, a step begins with the end of the one before
        begun = self._ended if self._begun is None else self._begun
        if begun is not None:
            self._now.seconds += now - begun
            self._now.steps += 1
            self._row.step_done(now - begun)
        self._begun, self._last, self._ended, self.samples_of_step = None, None, now, 0

    def evaluates(self) -> None:
        """Record that the time since the last step belongs to an evaluation, or a report."""
        self._now.seconds += self._row.end()
        self._ended = None

    def take(self) -> Interval:
        """Return what was measured since the last call."""
        self.evaluates()
        taken, self._now = self._now, Interval()
        taken.waited, taken.forward, taken.backward = self._waits.take(), self._forward.take(), self._backward.take()
        if self._device.type == "cuda":
            taken.allocated = torch.cuda.max_memory_allocated(self._device)
            taken.reserved = torch.cuda.max_memory_reserved(self._device)
        if self._sampler is not None:
            gpus = self._sampler.take()
            taken.gpu_utilization, taken.gpu_power, taken.gpu_memory = gpus.utilization, gpus.power, gpus.memory
        return taken


class _Row:
    """Steps that follow each other. At their end, a GPU may still compute what it was told to."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._begun: Any = None
        self._ended: Any = None
        self._seconds = 0.0
        """Seconds of these steps until this rank had told the GPU what to compute."""

    def begin(self, told: Any) -> None:
        """Record the beginning of a step.

        Args:
            told: mark of this moment.
        """
        if self._begun is None:
            self._begun = told

    def step_done(self, seconds: float) -> None:
        """Record the end of a step, and how long it took."""
        if self._is_gpu:
            self._ended = event()
            # without a run.loader, it is not known when the first step began
            self.begin(self._ended)
            self._seconds += seconds

    def end(self) -> float:
        """Return how many seconds the GPU took longer than was recorded; waits for the GPU."""
        begun, ended, seconds = self._begun, self._ended, self._seconds
        self._begun, self._ended, self._seconds = None, None, 0.0
        if ended is None:
            return 0.0
        ended.synchronize()
        return max(0.0, float(begun.elapsed_time(ended)) / 1e3 - seconds)


def _tokens_in(batch: Any) -> int:
    """Return the number of tokens if the first tensor of a batch holds texts as rows of integers; else 0."""
    while (children := children_of(batch)) is not None:
        if not children:
            return 0
        batch = children[0]
    if isinstance(batch, torch.Tensor) and batch.dim() == 2 and not batch.dtype.is_floating_point:
        return batch.numel()
    return 0
