"""Sample how busy the GPUs of a rank are, by NVML, in a thread of its own."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from mgpu_slurm.rank import rank_info
from mgpu_slurm.training.speed import nvml

SECONDS = 10.0
"""Between two samples; NVML averages the utilization over the last second or less."""
FIRST_SECONDS = 1.0
"""Before the first one."""

CLOSE_SECONDS = 5.0
"""To wait for the last sample at the end."""


@dataclass(frozen=True)
class GpuSample:
    """The GPUs of a rank; all zero if nothing is known."""

    utilization: float = 0.0
    """Part of the time in which a kernel runs, as a mean over the GPUs."""
    power: float = 0.0
    """Watts of all of them."""
    memory: float = 0.0
    """Bytes used on the fullest one, by all of its processes."""


def summary(samples: Sequence[GpuSample]) -> GpuSample:
    """Return the mean utilization and power of samples, and the peak of the memory."""
    return GpuSample(
        statistics.fmean(each.utilization for each in samples),
        statistics.fmean(each.power for each in samples),
        max(each.memory for each in samples),
    )


class GpuSampler:
    """Samples the GPUs of one rank. What fails is left out: no training ends because of it."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._samples: list[GpuSample] = []
        self._last = GpuSample()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        identities = {each for device in devices if (each := rank_info.gpu_identity(device)) is not None}
        if identities:
            self._thread = threading.Thread(target=self._serve, args=(identities,), name="gpus", daemon=True)
            self._thread.start()

    def take(self) -> GpuSample:
        """Return the means since the last call, and the peak of the memory; without a new sample, the last ones."""
        taken, self._samples = self._samples, []
        self._last = summary(taken) if taken else self._last
        return self._last

    def close(self) -> None:
        """Stop the thread."""
        self._is_closed.set()
        if self._thread is not None:
            # a GPU that is lost may never answer
            self._thread.join(CLOSE_SECONDS)

    def _serve(self, identities: set[str]) -> None:
        # NVML may be missing, or lose a GPU at any time
        with suppress(Exception):
            library = nvml.load()
            found = list(nvml.handles(library, identities))
            wait = FIRST_SECONDS
            while found and not self._is_closed.wait(wait):
                sample = _sample(library, found)
                self._samples.append(sample)
                wait = SECONDS


def _sample(library: Any, found: Sequence[Any]) -> GpuSample:
    """Return the present values; 0 for what a kind of GPU does not report."""

    def known(read: Any, value: Any) -> list[float]:
        values = []
        for handle in found:
            with suppress(library.NVMLError):
                values.append(float(value(read(handle))))
        return values

    used = known(library.nvmlDeviceGetUtilizationRates, lambda rates: rates.gpu / 100)
    power = known(library.nvmlDeviceGetPowerUsage, lambda milliwatts: milliwatts / 1000)
    memory = known(library.nvmlDeviceGetMemoryInfo, lambda info: info.used)
    return GpuSample(statistics.fmean(used or [0.0]), sum(power), max(memory, default=0.0))
