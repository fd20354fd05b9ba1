"""Report metrics: write them, choose the best checkpoint by them, and ask whether the trial is pruned."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import SupportsIndex

from mgpu_slurm.core import log_lines
from mgpu_slurm.core.errors import TrialPruned, UserError
from mgpu_slurm.data.batching.batch_cutting import MicroBatchSize
from mgpu_slurm.metrics.report_socket import JudgeCallback, Verdict
from mgpu_slurm.metrics.reporter import Reporter, as_numbers
from mgpu_slurm.rank.communication.collectives import Collectives
from mgpu_slurm.rank.communication.step_sync import Call
from mgpu_slurm.run_folder.speed_records import Interval
from mgpu_slurm.training.loop_control import LoopControl
from mgpu_slurm.training.progress import Position
from mgpu_slurm.training.speed.instruments import Instruments


class Reporting:
    """One rank's part in the reports of a run."""

    def __init__(
        self,
        reporter: Reporter | None,
        judge: JudgeCallback | None,
        position: Position,
        loop_control: LoopControl,
        collectives: Collectives,
        instruments: Instruments,
        size: MicroBatchSize,
    ) -> None:
        """
        Args:
            reporter: writes what is reported, on rank 0.
            judge: decides after each report whether the trial of a sweep continues.
            instruments: measure this rank's steps.
            size: the most samples that this rank computes at once.
        """
        self._instruments = instruments
        self._size = size
        self._reporter = reporter
        self._judge = judge
        self._position = position
        self._loop_control = loop_control
        self._collectives = collectives

    def report(
        self, progress: SupportsIndex, metrics: Mapping[str, object], total: SupportsIndex | None = None
    ) -> None:
        """See `Run.report`."""
        try:
            progress = operator.index(progress)
        except TypeError:
            raise UserError(f"run.report({progress!r}): progress must be an integer, such as the epoch") from None
        try:
            total = None if total is None else operator.index(total)
        except TypeError:
            raise UserError(
                f"run.report(total={total!r}): total must be an integer, the progress at the end: give a metric"
                " another name"
            ) from None
        position, saver = self._position, self._loop_control.saver
        numbers = as_numbers(metrics)
        if self._reporter is not None and self._loop_control.keeps and saver.hear_report(position.step, numbers):
            self._loop_control.save_wanted = True
        own = self._instruments.gauges.take().numbers()
        ranks = [Interval(*each) for each in self._loop_control.gather(Call.REPORT, own)]
        if progress <= position.progress:
            raise UserError(
                f"report(progress={progress}): progress must increase, starting at 1 (last value: {position.progress})"
            )
        position.progress, position.metrics = progress, numbers
        if self._reporter is not None:
            if total is not None:
                self._reporter.expect(total)
            self._reporter.report(progress, position.step, numbers, self._curves(ranks))
        if self._judge is not None:
            self._obey(self._judge)
        self._loop_control.reported()

    def _curves(self, ranks: Sequence[Interval]) -> dict[str, float]:
        found = self._instruments.curves(ranks)
        return found | {"memory/micro_batch": float(self._size.limit)} if found and self._size.limit else found

    def _obey(self, judge: JudgeCallback) -> None:
        """Ask on rank 0 what becomes of the trial, and end it on all ranks if it is pruned."""
        progress, metrics = self._position.progress, self._position.metrics
        verdict = Verdict(**self._collectives.broadcast_from_rank0(lambda: asdict(judge(progress, metrics))))
        if verdict.pauses:
            self._loop_control.pause()
        if verdict.saves and self._loop_control.keeps:
            self._loop_control.save_wanted = True
        reason = verdict.prune_reason
        if reason is not None:
            log_lines.say(f"{reason}: stopped at progress {self._position.progress}")
            self._loop_control.saver.finish()
            raise TrialPruned(reason)
