"""Create the loaders and shards of a run, and split its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset

from mgpu_slurm.core import log_lines
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import counted
from mgpu_slurm.data.batching.batch_cutting import Accumulation, MicroBatchSize
from mgpu_slurm.data.batching.batch_weights import BatchWeights
from mgpu_slurm.data.evaluation import RunOfShard, Shard, StreamShard
from mgpu_slurm.data.loaders import Loader, RunOfLoader, make_loader
from mgpu_slurm.data.randomness import mixed
from mgpu_slurm.data.worker_choice import AUTO, with_workers
from mgpu_slurm.rank.communication.collectives import Collectives
from mgpu_slurm.training.loop_control import LoopControl
from mgpu_slurm.training.progress import Position
from mgpu_slurm.training.speed.instruments import Instruments
from mgpu_slurm.training.wrap import Models

Batch = TypeVar("Batch")


class RunData:
    """The data of one rank's run."""

    def __init__(
        self,
        data_rank: int,
        data_ranks: int,
        device: torch.device,
        position: Position,
        loop_control: LoopControl,
        collectives: Collectives,
        models: Models,
        batch_weights: BatchWeights,
        size: MicroBatchSize,
        instruments: Instruments,
        cores: int,
        alive: Callable[[], None],
    ) -> None:
        """
        Args:
            data_rank: index of this rank's part of each batch.
            data_ranks: number of these parts.
            cores: number of cores of this rank.
            alive: called with each batch of an evaluation.
        """
        self._data_rank = data_rank
        self._position = position
        self._loop_control = loop_control
        self._models = models
        self._instruments = instruments
        self._cores = cores
        self._evaluated_at, self._evaluations = -1, 0
        """The step of the last evaluation, and their number at it."""
        self._run_of_loader = RunOfLoader(
            data_rank,
            data_ranks,
            device,
            loop_control.before_batch,
            is_same=loop_control.is_same_everywhere,
            sync=loop_control.sync,
            drawn=loop_control.drawn,
            take_batch=collectives.take_batch,
            epoch=lambda: position.epoch,
            awaits_epochs=lambda: position.awaits_epochs,
            step=lambda: position.step,
            places=position.loaders,
            batch_weights=batch_weights,
            fetch_begins=instruments.gauges.fetch_begins,
            fetched=instruments.fetched,
        )
        self._run_of_shard = RunOfShard(
            data_rank,
            data_ranks,
            device,
            self._begin_evaluation,
            alive,
            sync=loop_control.sync,
            drawn=loop_control.drawn,
            keeps_step=lambda: models.are_sharded,
            batch_weights=batch_weights,
        )
        self.accumulation = Accumulation(batch_weights, data_ranks, size, models.without_exchange)

    def _begin_evaluation(self) -> int:
        """Begin an evaluation; return the seed of what its dataset draws."""
        self._instruments.gauges.evaluates()
        self._loop_control.begin_evaluation()
        self._models.broadcast_buffers()
        step = self._position.step
        self._evaluations = self._evaluations + 1 if step == self._evaluated_at else 0
        self._evaluated_at = step
        # -1: no epoch of a loader has it
        return mixed(self._loop_control.seed, -1, step, self._evaluations)

    def loader(
        self, dataset: Dataset[Any], batch_size: int | None, shuffle: bool, drop_last: bool, **options: Any
    ) -> Loader:
        """See `Run.loader`."""
        seed = self._loop_control.seed
        options = self._with_workers("run.loader", options, isinstance(dataset, IterableDataset))
        return make_loader(dataset, batch_size, shuffle, drop_last, seed, self._run_of_loader, **options)

    def _with_workers(self, call: str, options: dict[str, Any], is_stream: bool) -> dict[str, Any]:
        chosen = with_workers(call, options, self._cores, is_stream)
        if options.get("num_workers") == AUTO and self._data_rank == 0:
            of = counted(self._cores, "core")
            log_lines.say(f'{call}(num_workers="{AUTO}"): {counted(chosen["num_workers"], "worker")} on {of}')
        return chosen

    def shard(self, dataset: Dataset[Any], batch_size: int, **options: Any) -> Shard | StreamShard:
        """See `Run.shard`."""
        # persistent workers would serve one loop at a time
        options = {"persistent_workers": False} | options
        options = self._with_workers("run.shard", options, isinstance(dataset, IterableDataset))
        if isinstance(dataset, IterableDataset):
            return StreamShard(dataset, self._run_of_shard, batch_size, **options)
        return Shard(dataset, self._run_of_shard, batch_size=batch_size, **options)

    def micro_batches(self, batch: Batch, parts: int) -> Iterator[Batch]:
        """See `Run.accumulate`."""
        if parts < 1:
            raise UserError(f"run.accumulate: parts={parts}: expected at least 1")
        return self.accumulation.micro_batches(batch, parts)
