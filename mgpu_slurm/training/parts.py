"""Create and connect the parts of one rank's run, and release them at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from mgpu_slurm.checkpoints.policy import Plan
from mgpu_slurm.checkpoints.state.train_state import Keeper
from mgpu_slurm.core import log_lines
from mgpu_slurm.data.batching.batch_cutting import MicroBatchSize
from mgpu_slurm.data.batching.batch_weights import BatchWeights
from mgpu_slurm.metrics.report_socket import JudgeCallback
from mgpu_slurm.metrics.reporter import Reporter
from mgpu_slurm.rank import rank_info
from mgpu_slurm.rank.communication.collectives import Collectives
from mgpu_slurm.rank.communication.step_sync import Call
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.signals import StopFlag
from mgpu_slurm.rank.watchdog import Watchdog
from mgpu_slurm.request.parallelism import Layout
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.training.loop_control import LoopControl
from mgpu_slurm.training.memory import shortage
from mgpu_slurm.training.memory.agreement import Agreement
from mgpu_slurm.training.memory.found_size import FoundSize, is_memory_error
from mgpu_slurm.training.memory.mistakes import Mistakes
from mgpu_slurm.training.memory.splitting import Splitter
from mgpu_slurm.training.parallel.pipeline import Hooks
from mgpu_slurm.training.parallel.precision import prepare
from mgpu_slurm.training.progress import Position
from mgpu_slurm.training.reporting import Reporting
from mgpu_slurm.training.restore import Restorer
from mgpu_slurm.training.run_data import RunData
from mgpu_slurm.training.speed.instruments import Instruments
from mgpu_slurm.training.step_counter import StepCounter
from mgpu_slurm.training.wrap import Models


class Parts:
    """The parts of one rank's run."""

    def __init__(
        self,
        facts: RankInfo,
        files: RunFolder,
        device: torch.device,
        devices: list[torch.device],
        attempt: int,
        stop: StopFlag,
        collectives: Collectives | None,
        judge: JudgeCallback | None,
        watchdog: Watchdog | None,
        layout: Layout,
    ) -> None:
        """See `Run`."""
        rank = facts.rank
        self._watchdog = watchdog
        self._device = device
        self._owns_collectives = collectives is None
        self.collectives = collectives or Collectives(facts)
        self.reporter = Reporter(files, attempt, rank_info.gpu_facts(device)) if rank == 0 else None
        self.position = Position()
        self.batch_weights = BatchWeights(layout.data)
        self.models = Models(rank, facts.world_size, layout, device, devices, self.batch_weights.note_inputs)
        self._mistakes = Mistakes(device, self.models, watches=rank == 0)
        self.size = MicroBatchSize()
        self.instruments = Instruments(
            facts, files, attempt, layout, device, devices, self.models, lambda: self.position.step
        )
        self.measure_step = self.instruments.step_done
        """Called at the end of each optimizer step."""
        self.found_size = FoundSize(self.size, layout, device, files, attempt, rank)
        self.keeper = Keeper(files, facts, attempt, self.models.wrapped, self.collectives, layout.first_ranks)
        self.loop_control = LoopControl(
            self.position, device, rank, layout, self.collectives, self.keeper, self.found_size, stop, self.alive
        )
        self.steps = StepCounter(self._step_done, prepare(layout.precision, device), self.models.stages_of)
        self.loop_control.scaler = self.steps.scaler
        self.loop_control.gradient_check = self.models.gradient_check
        self.restorer = Restorer(
            files,
            attempt,
            self.position,
            self.loop_control,
            self.collectives,
            self.keeper,
            self.found_size,
            self.steps,
            self.reporter,
        )
        self.reporting = Reporting(
            self.reporter,
            judge,
            self.position,
            self.loop_control,
            self.collectives,
            self.instruments,
            self.size,
        )
        self.data = RunData(
            layout.data_rank(rank),
            layout.data,
            device,
            self.position,
            self.loop_control,
            self.collectives,
            self.models,
            self.batch_weights,
            self.size,
            self.instruments,
            rank_info.own_cores(facts),
            self._evaluates,
        )
        self.splitter = Splitter(
            self.models,
            self.data.accumulation,
            Agreement(lambda is_out: self.loop_control.any_rank(is_out, Call.MEMORY), self.size),
            layout,
            device,
            self.found_size,
            self._report_shortage,
            is_alone=facts.world_size == 1,
        )
        if watchdog is not None:
            watchdog.watch(lambda: self.position.step)

    def alive(self) -> None:
        """Report that this rank makes progress."""
        if self._watchdog is not None:
            self._watchdog.alive()

    def _evaluates(self) -> None:
        self.alive()
        self._mistakes.evaluate_batch()

    def differentiated(self) -> None:
        """Record a backward pass."""
        self.loop_control.has_gradients = True
        self.alive()

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Time and record a backward pass in this block."""
        self.instruments.gauges.backward_begins()
        yield
        self.instruments.gauges.backward_ends()
        self.differentiated()

    @property
    def pipeline_hooks(self) -> Hooks:
        """What a pipeline uses of the run."""
        return Hooks(self.batch_weights.note_inputs, self.batch_weights.weight, self.differentiated, self.size)

    def note_failure(self, error: BaseException) -> None:
        """See `Run.note_failure`."""
        if is_memory_error(error):
            self._report_shortage(error)
        # an attempt that restored nothing would begin from scratch
        if self.loop_control.keeps:
            self.found_size.note_failure(error)

    def _report_shortage(self, error: BaseException) -> None:
        # it must not hide the error, whatever the job's objects do when they are looked at
        with suppress(Exception):
            log_lines.say(shortage.report(error, self.models.held(), self.models.optimizers, self._device))

    def _step_done(self) -> None:
        self.batch_weights.check_exchanged()
        self.size.current = 0
        self.position.step += 1
        self.loop_control.step_done()
        self.models.step_done()
        self._mistakes.step_done()
        self.alive()
        if self.reporter is not None:
            self.reporter.step_done(self.position.step)
        self.measure_step()

    def plan_saves(self, plan: Plan) -> None:
        """See `Run.checkpoints`."""
        self.loop_control.saver.plan = plan
        if self.reporter is not None and plan.best is not None and plan.direction is not None:
            self.reporter.choose_by(plan.best, plan.direction)

    def close(self, waits: bool) -> None:
        """See `Run.close`."""
        if self._watchdog is not None:
            self._watchdog.rest()
        self.steps.close()
        self._mistakes.close()
        self.instruments.close()
        if waits:
            self.loop_control.warn_of_lost_save()
        if self._owns_collectives:
            # the others may be waiting for this rank's message
            self.collectives.close()
        self.loop_control.saver.close(waits)
        if self.reporter is not None:
            self.reporter.close(self.position.step)
