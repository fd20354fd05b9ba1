"""Everything that watches the speed of one rank's steps: what they take, what they compute, and traces of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mgpu_slurm.core import log_lines
from mgpu_slurm.rank import rank_info
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.request.parallelism import Layout
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.speed_records import Interval
from mgpu_slurm.training.speed.curves import Stragglers, curves
from mgpu_slurm.training.speed.data_waits import Fetch
from mgpu_slurm.training.speed.flops import FlopCount
from mgpu_slurm.training.speed.gauges import Gauges
from mgpu_slurm.training.speed.gpu_sampler import GpuSampler
from mgpu_slurm.training.speed.input_advice import InputAdvice
from mgpu_slurm.training.speed.profiling import profiling
from mgpu_slurm.training.wrap import Models


class Instruments:
    """The instruments of one rank. Rank 0 also says what they show, in the log."""

    def __init__(
        self,
        facts: RankInfo,
        files: RunFolder,
        attempt: int,
        layout: Layout,
        device: torch.device,
        devices: Sequence[torch.device],
        models: Models,
        step: Callable[[], int],
    ) -> None:
        """
        Args:
            devices: all devices of this rank.
            step: returns the number of steps that the run has done.
        """
        self._step = step
        self._layout = layout
        self._sampler = GpuSampler(devices)
        self.gauges = Gauges(device, self._sampler)
        self._flops = FlopCount(models, layout, device)
        self._profiling = profiling(facts, files, attempt)
        self._stragglers = Stragglers(layout)
        # once in a run: later attempts would repeat it
        is_first = facts.rank == 0 and attempt == 1
        cores, most = rank_info.own_cores(facts), rank_info.most_cores(facts)
        self._input_advice = InputAdvice(device, cores, most) if is_first else None

    def fetched(self, fetch: Fetch, workers: int, is_stream: bool, count: int, batch: object) -> None:
        """Record that a training loop got a batch; see `Gauges.fetched` and `InputAdvice.fetched`."""
        self.gauges.fetched(fetch, count, batch)
        if self._input_advice is not None:
            self._input_advice.fetched(fetch, workers, is_stream)
        if self._profiling is not None:
            self._profiling.fetched(self._step())

    def step_done(self) -> None:
        """Record the end of a step, which the run has counted."""
        self._flops.step_done(self.gauges.samples_of_step)
        if self._profiling is not None:
            self._profiling.step_done(self._step())
        if self._input_advice is not None and (sentence := self._input_advice.step_done()) is not None:
            log_lines.say(sentence)
        self.gauges.step_done()

    def curves(self, ranks: Sequence[Interval]) -> dict[str, float]:
        """Return figures of the steps since the last report, by name; name a rank that holds up the others."""
        if (sentence := self._stragglers.see(ranks)) is not None:
            log_lines.warn(sentence)
        found = curves(ranks, self._layout)
        if (utilization := self._flops.utilization(found.get("speed/samples_per_second", 0.0))) is not None:
            found["speed/mfu"] = utilization
        return found

    def close(self) -> None:
        """Stop watching."""
        self._flops.close()
        if self._profiling is not None:
            self._profiling.close()
        self._sampler.close()
