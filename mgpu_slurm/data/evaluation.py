"""Divide datasets among ranks for evaluation, without repeated or padded samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from mgpu_slurm.data.batching.batch_cutting import Cutter
from mgpu_slurm.data.batching.batch_weights import BatchWeights
from mgpu_slurm.data.batching.batches import batches_of, share_of, size_of
from mgpu_slurm.data.device_copies import on_device
from mgpu_slurm.data.sample_seeds import Part, SeededReader
from mgpu_slurm.data.streams import Drawn, Stream, StreamBatch
from mgpu_slurm.data.workers import data_loader
from mgpu_slurm.rank.communication.step_sync import Call


@dataclass(frozen=True)
class RunOfShard:
    """The parts of a run that an evaluation uses."""

    data_rank: int
    """Index of this rank's part of each batch."""
    data_ranks: int
    """Number of these parts."""
    device: torch.device
    begin: Callable[[], int]
    """Called before each pass, on all ranks; returns the seed of what is drawn in it."""
    alive: Callable[[], None]
    keeps_step: Callable[[], bool]
    """Returns whether all ranks must iterate over the same number of batches."""
    sync: Callable[[Call], None]
    """Waits until all ranks make a call, and compares what they have drawn from streams."""
    drawn: Drawn
    batch_weights: BatchWeights

    def evaluated(self, batches: Callable[[int], Iterable[Any]]) -> Iterator[Any]:
        """Yield the batches of a pass on the device.

        Args:
            batches: returns them for a seed.
        """
        seed = self.begin()
        with self.batch_weights.passing() as passing:
            for samples in on_device(batches(seed), self.device):
                self.alive()
                yield self.batch_weights.hand_out(passing, None, samples)


class _Parts(Sampler[Part]):
    """The batches of one rank's part of a dataset."""

    def __init__(self, own: range, batch_size: int, **options: Any) -> None:
        """
        Args:
            own: indices of the samples.
            options: those of a DataLoader that decide which samples make a batch.
        """
        self._own = own
        self.lists: DataLoader[Any] = DataLoader(cast("Dataset[Any]", own), batch_size, **options)
        self.seed = 0

    def __len__(self) -> int:
        return len(self.lists)

    def __iter__(self) -> Iterator[Part]:
        for batch in self.lists.batch_sampler or ():
            indices = [self._own[index] for index in batch]
            # a sample's place is that in the dataset, whatever the number of ranks
            yield Part(indices, indices, self.seed)


class Shard:
    """This rank's part of a dataset for evaluation: no sample repeated or padded; batches are on the run's device."""

    def __init__(self, dataset: Dataset[Any], run: RunOfShard, batch_size: int, **options: Any) -> None:
        size = size_of(dataset)
        begin, end = share_of(size, run.data_rank, run.data_ranks)
        self._own = end - begin
        self._most = -(-size // run.data_ranks)
        """The largest number of samples on a rank."""
        self._run = run
        self._cutter = Cutter()
        self._reader = SeededReader(dataset, options.pop("collate_fn", None) or default_collate)
        order = {name: options.pop(name) for name in _ORDER_OPTIONS if name in options}
        options.setdefault("generator", torch.Generator())
        self._parts = _Parts(range(begin, end), batch_size, generator=options["generator"], **order)
        self._loader = data_loader(self._reader, run.device, sampler=self._parts, **options)

    def __len__(self) -> int:
        return self._batches(self._most) if self._run.keeps_step() else len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._run.evaluated(self._begun)

    def _begun(self, seed: int) -> Iterator[Any]:
        self._parts.seed = seed
        return self._as_many_as_others() if self._run.keeps_step() else iter(self._loader)

    def _batches(self, samples: int) -> int:
        lists = self._parts.lists
        assert lists.batch_size is not None
        return batches_of(samples, lists.batch_size, lists.drop_last)

    def _as_many_as_others(self) -> Iterator[Any]:
        """Yield this rank's batches, then batches of zero rows until there are as many as on the rank with most."""
        yield from self._loader
        missing = self._batches(self._most) - self._batches(self._own)
        if missing:
            samples = self._reader[Part([0], [0], self._parts.seed)]
            empty = self._cutter.cut(samples, self._cutter.rows(samples, 1), 0, 0)
            yield from itertools.repeat(empty, missing)


_ORDER_OPTIONS = ("shuffle", "sampler", "batch_sampler", "drop_last")


class StreamShard:
    """This rank's part of an iterable dataset for evaluation, like `Shard`."""

    def __init__(self, dataset: IterableDataset[Any], run: RunOfShard, batch_size: int, **options: Any) -> None:
        collate = options.pop("collate_fn", None) or default_collate
        self._run = run
        self._cutter = Cutter()
        self._stream = Stream(
            dataset, batch_size * run.data_ranks, False, collate, run.data_rank, run.data_ranks, seed=0
        )
        self._loader = data_loader(self._stream, run.device, **options)

    def __iter__(self) -> Iterator[Any]:
        return self._run.evaluated(self._begun)

    def _begun(self, seed: int) -> Iterator[Any]:
        self._stream.collate_seed = seed
        return filter(_is_there, map(self._own, self._checked()))

    def _checked(self) -> Iterator[StreamBatch]:
        batches = iter(self._loader)
        first = next(batches, None)
        # ranks may leave the loop at different batches, so only the first batch can be compared
        self._run.drawn.add(self._stream.dataset, first)
        self._run.sync(Call.PASS)
        return itertools.chain([first], batches) if first is not None else batches

    def _own(self, batch: StreamBatch) -> Any:
        """Return this rank's samples of a batch; if it has none, zero rows, or `_NOTHING` to skip the batch."""
        if batch.share.count:
            return batch.samples
        if not self._run.keeps_step():
            return _NOTHING
        return self._cutter.cut(batch.samples, self._cutter.rows(batch.samples, 1), 0, 0)


_NOTHING = object()


def _is_there(samples: object) -> bool:
    return samples is not _NOTHING
