"""A sweep's worker on each rank: it trains trial after trial, without leaving its nodes or its process group.

Only rank 0 uses the study. An error in a trial ends that trial; if the ranks may be out of step after it, all of them
end and are restarted in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from mgpu_slurm.core import log_lines, retry
from mgpu_slurm.core.errors import RunStopped
from mgpu_slurm.core.files import write_json
from mgpu_slurm.job import output
from mgpu_slurm.rank.communication.collectives import Collectives
from mgpu_slurm.rank.communication.step_sync import Agreed, Call
from mgpu_slurm.rank.rank_info import Rank
from mgpu_slurm.rank.signals import Stop, StopFlag
from mgpu_slurm.request import target
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.records import now
from mgpu_slurm.sweeps.client.messages import (
    RAISED_TOGETHER,
    Assignment,
    BrokenWorker,
    Ending,
    Leave,
    SweepFailed,
    as_plain,
    from_plain,
    undisturbed,
)
from mgpu_slurm.sweeps.client.study_client import StudyClient
from mgpu_slurm.sweeps.worker.command_trials import CommandTrainer
from mgpu_slurm.sweeps.worker.function_trials import FAILED_EXIT_CODE, FunctionTrainer
from mgpu_slurm.sweeps.worker.process_reset import Reset, ResourceUsage, growth, keep_freed_memory
from mgpu_slurm.training import entry


class Trainer(Protocol):
    """The interface for training trials on one rank."""

    def train(self, order: Assignment, folder: RunFolder) -> Ending:
        """Train a trial until it ends or pauses, and return how it ended."""


def serve(rank: Rank, stop: StopFlag) -> None:
    """Train trial after trial on this rank, until there is nothing to do."""
    # classes that a study names by import path are imported from the run's code too
    target.use_snapshot(rank.folder.code / rank.spec.workdir)
    # a CUDA context here would take GPU memory from the commands
    own_device = torch.device("cpu") if rank.spec.target.is_command else None
    with entry.joined(rank, own_device) as device, closing(Collectives(rank.facts, RAISED_TOGETHER)) as collectives:
        client = _client(rank, collectives)
        trainer: Trainer
        if rank.spec.target.is_command:
            trainer = CommandTrainer(rank, stop, collectives, client)
        else:
            trainer = FunctionTrainer(rank, stop, device, collectives, client)
        with entry.reporting_errors(rank):
            WorkerRank(rank, stop, collectives, client, trainer).serve()


def _client(rank: Rank, collectives: Collectives) -> StudyClient | None:
    """Return the study client on rank 0, None on others; if it fails, all ranks raise the error."""
    made: list[StudyClient] = []

    def make() -> None:
        keep_freed_memory()
        client = StudyClient(rank.folder, rank.spec, rank.attempt, rank.process)
        client.settle()
        made.append(client)

    collectives.broadcast_from_rank0(make)
    return made[0] if made else None


class WorkerRank:
    """One rank of a worker."""

    def __init__(
        self, rank: Rank, stop: StopFlag, collectives: Collectives, client: StudyClient | None, trainer: Trainer
    ) -> None:
        self._rank = rank
        self._stop = stop
        self._collectives = collectives
        self._client = client
        self._trainer = trainer
        self._reset = Reset()
        self._held: ResourceUsage | None = None

    def serve(self) -> None:
        """Train trials until there is nothing to do.

        Raises:
            RunStopped: the worker has to leave its nodes.
            SweepFailed: the sweep cannot continue.
            BrokenWorker: this worker cannot continue.
        """
        try:
            while True:
                order = self._next()
                if isinstance(order, Leave):
                    self._leave(order)
                    return
                ending = self._train(order)
                self._told(ending.tell)
                if ending.leave is not None:
                    self._leave(ending.leave)
                self._reset.apply()
                if too_much := self._too_much():
                    # the unfinished mark still exists, so the ranks are restarted in place
                    log_lines.say(f"trials have left {too_much}: restarting the ranks")
                    self._told(lambda own: own.let_go())
                    return
        except (SweepFailed, BrokenWorker):
            self._mark_finished()
            raise

    def _next(self) -> Assignment | Leave:
        order = None
        while order is None:
            order = self._ask()
        return order

    def _ask(self) -> Assignment | Leave | None:
        agreed = self._collectives.sync(Call.TRIAL, Agreed(stop=self._stop.due))
        return from_plain(self._told(lambda own: as_plain(own.next(agreed.stop))))

    def _train(self, order: Assignment) -> Ending:
        sweep = RunFolder(self._rank.folder.group.path.with_name(order.study))
        folder = sweep.of_trial(order.number)
        folder = folder if order.seed is None else folder.of_seed(order.seed)
        retry.for_the_disk(lambda: folder.logs.mkdir(parents=True, exist_ok=True), folder.logs)
        with self._logging_to(folder.rank_log(order.attempt, self._rank.facts.rank)):
            if self._client is not None:
                retry.for_the_disk(self._unfinished.touch, self._unfinished)
            return self._trainer.train(order, folder)

    def _told(self, ask: Callable[[StudyClient], Any]) -> Any:
        """Call rank 0's client and return its answer on every rank.

        Raises:
            WorkerFinished: the study cannot be reached, or these ranks must not continue.
        """

        def ask_it() -> Any:
            client = self._client
            assert client is not None
            return undisturbed(lambda: ask(client))

        return self._collectives.broadcast_from_rank0(ask_it)

    def _leave(self, order: Leave) -> None:
        log_lines.say(order.reason)
        self._mark_finished()
        if self._client is not None and not order.exit_code:
            self._client.dismiss()
            record = {"run": self._rank.folder.run, "result": {"trials": self._client.ended}, "ended": now()}
            result = self._rank.folder.result
            retry.for_the_disk(lambda: write_json(result, record), result)
        if order.exit_code == FAILED_EXIT_CODE:
            raise SweepFailed(order.reason)
        if order.exit_code:
            raise RunStopped(order.exit_code, order.reason)

    @property
    def _unfinished(self) -> Path:
        return self._rank.folder.unfinished(self._rank.attempt, self._rank.process)

    def _mark_finished(self) -> None:
        """Remove the unfinished mark, so that the ranks are not restarted in place."""
        if self._client is not None:
            self._unfinished.unlink(missing_ok=True)

    @contextmanager
    def _logging_to(self, log: Path) -> Iterator[None]:
        """Send output to the trial's log."""
        output.send_to(log)
        try:
            yield
        finally:
            output.send_to(self._rank.folder.rank_log(self._rank.attempt, self._rank.number_in_logs))

    def _too_much(self) -> str | None:
        """Return what trials have left on any rank beyond the limits; None after the first, which loads shared code."""
        own = growth(self._held, ResourceUsage.now()) if self._held is not None else None
        if self._held is None:
            self._held = ResourceUsage.now()
        agreed = self._collectives.sync(Call.TRIAL, Agreed(stop=self._stop.due, failed=own is not None))
        if agreed.stop is not Stop.NO:
            # new ranks would not know of the stop
            return None
        return own or ("too much on other ranks" if agreed.failed else None)
