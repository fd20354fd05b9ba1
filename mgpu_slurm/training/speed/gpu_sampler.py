"""Sample how busy the GPUs of a rank are, by NVML, in a thread of its own."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mgpu_slurm.core import node_gpus
from mgpu_slurm.job.sampling.sampler_thread import SamplerThread
from mgpu_slurm.rank import rank_info


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


class GpuSampler(SamplerThread):
    """Samples the GPUs of one rank for its curves; `job.sampling.node_sampler` samples those of its node."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__("gpus")
        self._samples: list[GpuSample] = []
        self._last = GpuSample()
        self._identities = {each for device in devices if (each := rank_info.gpu_identity(device)) is not None}
        self._library: Any = None
        self._found: list[Any] = []
        if self._identities:
            self.start()

    def take(self) -> GpuSample:
        """Return the means since the last call, and the peak of the memory; without a new sample, the last ones."""
        taken, self._samples = self._samples, []
        self._last = summary(taken) if taken else self._last
        return self._last

    def prepare(self) -> bool:
        # NVML may be missing, or lose a GPU at any time
        self._library = node_gpus.load()
        self._found = list(node_gpus.handles(self._library, self._identities))
        return bool(self._found)

    def look(self) -> None:
        readings = [node_gpus.read(self._library, handle) for handle in self._found]
        used = [each.utilization for each in readings if each.utilization is not None]
        power = [each.watts for each in readings if each.watts is not None]
        memory = [float(each.memory) for each in readings if each.memory is not None]
        # 0 for what a kind of GPU does not report
        self._samples.append(GpuSample(statistics.fmean(used or [0.0]), sum(power), max(memory, default=0.0)))
