"""The run of a job whose speed is measured: it saves nothing, and ends after some optimizer steps."""

from __future__ import annotations

from typing import Any, SupportsIndex

import torch

from mgpu_slurm.core import retry
from mgpu_slurm.core.errors import RunMeasured, UserError
from mgpu_slurm.core.files import write_json
from mgpu_slurm.core.formatting import counted
from mgpu_slurm.rank.communication.step_sync import Call
from mgpu_slurm.request.spec import Measurement
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.speed_records import Interval, SpeedRecord
from mgpu_slurm.training.restore import State
from mgpu_slurm.training.run import Run

FEW = 3
"""Number of steps that are enough if the job takes no more."""


class MeasuredRun(Run):
    """A run that ends with `RunMeasured` at the same step on all ranks, and leaves `speed.json`."""

    def __init__(self, measurement: Measurement, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._measurement = measurement
        self._taken = 0
        """Number of optimizer steps."""
        self._measured = Interval()
        """Those after the warm-up, until the last report."""
        self._is_over = False
        self._parts.measure_step = self._step_done

    def restore(self, **objects: Any) -> State:
        """Do what `Run.restore` does, but keep nothing: checkpoints would only take time."""
        state = super().restore(**objects)
        self._loop_control.keeps = False
        return state

    def report(self, progress: SupportsIndex, **metrics: Any) -> None:
        """Do what `Run.report` does, without curves of the steps: those are measured together."""
        self._measured += self._parts.instruments.gauges.take()
        super().report(progress, **metrics)

    def finish(self) -> None:
        """Do what `Run.finish` does, and write down what was measured if the job had fewer steps."""
        super().finish()
        if not self._is_over:
            self._write()

    def _step_done(self) -> None:
        self._taken += 1
        warm_up, last = self._measurement.warm_up, self._measurement.last_step
        if self._taken in (warm_up, last):
            # a GPU may be many steps behind
            self._synchronize()
        self._parts.instruments.step_done()
        if self._taken == warm_up:
            self._parts.instruments.gauges.take()
            self._measured = Interval()
        if self._taken >= last:
            if not self._is_over:
                self._write()
            raise RunMeasured(f"measured {counted(self._measurement.steps, 'step')}: stopped at step {self.step}")

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _write(self) -> None:
        """Exchange what the ranks have measured, and write it on rank 0. Every rank must call it.

        Raises:
            UserError: there were too few steps, or none with a batch of `run.loader`.
        """
        self._is_over = True
        self._synchronize()
        own = self._measured + self._parts.instruments.gauges.take()
        ranks = [Interval(*each) for each in self._loop_control.gather(Call.MEASURE, own.numbers())]
        self._check(ranks)
        if self.is_main:
            file = RunFolder(self.folder).speed
            record = SpeedRecord(warm_up=self._measurement.warm_up, ranks=ranks).to_json()
            retry.for_the_disk(lambda: write_json(file, record), file)

    def _check(self, ranks: list[Interval]) -> None:
        measurement = self._measurement
        if self._taken == 0:
            raise UserError("no step was measured: the job takes none by run.update or a torch optimizer")
        if self._taken < measurement.warm_up + min(FEW, measurement.steps):
            raise UserError(
                f"the job ended after {counted(self._taken, 'step')}, of which {measurement.warm_up} are for warm-up:"
                " give it more data or epochs, or a smaller --warm-up"
            )
        if not any(rank.samples for rank in ranks):
            raise UserError("no step was measured: the job's batches do not come from run.loader")
