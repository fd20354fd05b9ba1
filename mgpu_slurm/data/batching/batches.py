"""Divide the samples of each global batch among ranks: no sample is lost or seen twice."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import Dataset, Sampler

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.data.randomness import RandomNumbers, mixed
from mgpu_slurm.data.sample_seeds import Part


@dataclass(frozen=True)
class Share:
    """The size of this rank's part of a global batch."""

    count: int
    """Samples that count; 0 if the rank only computes on a stand-in sample to keep in step with the others."""
    total: int
    """Samples of the global batch."""

    def weight(self, data_ranks: int) -> float:
        """Return the factor of this rank's gradient in the sum over all ranks, which is divided by their number."""
        return self.count * data_ranks / self.total


def share_of(total: int, data_rank: int, data_ranks: int) -> tuple[int, int]:
    """Return begin and end of the rank's share of `total` samples; shares differ by at most one sample."""
    return total * data_rank // data_ranks, total * (data_rank + 1) // data_ranks


def batches_of(samples: int, batch_size: int, drop_last: bool) -> int:
    """Return the number of batches; the last one may be smaller, unless it is dropped."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


def size_of(dataset: Dataset[Any]) -> int:
    """Return the number of samples of a dataset.

    Raises:
        UserError: it is empty, or not a map-style dataset.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserError(
            f"{type(dataset).__name__} has no __len__ and __getitem__: run.loader and run.shard need a map-style"
            " dataset or a torch.utils.data.IterableDataset, which they can iterate again in each pass"
        )
    size = len(cast(Sized, dataset))
    if size == 0:
        raise UserError(f"{type(dataset).__name__} is empty: there is nothing to load")
    return size


def _share(total: int, data_rank: int, data_ranks: int) -> Share:
    begin, end = share_of(total, data_rank, data_ranks)
    return Share(end - begin, total)


def _part(batch: Sequence[int], data_rank: int, data_ranks: int, seed: int) -> Part:
    """Return a rank's part of a global batch.

    It may hold fewer samples than there are ranks; a rank without one computes on a stand-in of weight 0, because all
    ranks must take part in the gradient's all-reduce.
    """
    begin, end = share_of(len(batch), data_rank, data_ranks)
    places = range(begin, end) or range(1)
    return Part(batch[places.start : places.stop], places, seed)


class GlobalBatches(Sampler[Part]):
    """This rank's parts of the global batches of an epoch, from a given batch on.

    The order depends only on seed and epoch, not on the world size or on where a run was interrupted.
    """

    def __init__(
        self, size: int, batch_size: int, shuffle: bool, drop_last: bool, data_rank: int, data_ranks: int, seed: int
    ) -> None:
        self.size = size - size % batch_size if drop_last else size
        self._dataset_size = size
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.data_rank = data_rank
        self.data_ranks = data_ranks
        self.seed = seed
        self.epoch = 0
        self.first_batch = 0

    def begin(self, epoch: int, first: int) -> None:
        """Begin an epoch at one of its batches."""
        self.epoch, self.first_batch = epoch, first

    def __len__(self) -> int:
        return -(-self.size // self.batch_size)

    def shares(self) -> Iterator[Share]:
        """Return this rank's shares of the batches, from that on at which the epoch has begun."""
        totals = map(self._batch_total, range(self.first_batch, len(self)))
        return (_share(total, self.data_rank, self.data_ranks) for total in totals)

    def _batch_total(self, batch: int) -> int:
        return min(self.batch_size, self.size - batch * self.batch_size)

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.size))
        generator = torch.Generator().manual_seed(mixed(self.seed, self.epoch))
        return cast("list[int]", torch.randperm(self._dataset_size, generator=generator).tolist())

    def __iter__(self) -> Iterator[Part]:
        order = self._order()
        for number in range(self.first_batch, len(self)):
            start = number * self.batch_size
            batch = order[start : start + self._batch_total(number)]
            yield _part(batch, self.data_rank, self.data_ranks, mixed(self.seed, self.epoch, number))


class ListedBatches(Sampler[Part]):
    """This rank's parts of the global batches listed by the job's own sampler.

    The sampler draws from generators seeded from seed and epoch, identically on all ranks, and lists a whole epoch.
    """

    def __init__(
        self, sampler: Any, batch_size: int | None, drop_last: bool, data_rank: int, data_ranks: int, seed: int
    ) -> None:
        """
        Args:
            batch_size: None if the sampler yields batches.
        """
        name = "sampler" if batch_size else "batch_sampler"
        if getattr(sampler, "num_replicas", 1) > 1:
            raise UserError(
                f"run.loader({name}=...): {type(sampler).__name__} yields one rank's part: pass a sampler of the whole"
                " dataset, which run.loader distributes"
            )
        if not hasattr(sampler, "__len__"):
            raise UserError(f"run.loader({name}=...): {type(sampler).__name__} has no __len__: a pass needs an end")
        self._sampler = sampler
        self.name = type(sampler).__name__
        self.size = len(sampler)
        self.batch_size = batch_size or 0
        self._drop_last = drop_last
        self.data_rank = data_rank
        self._data_ranks = data_ranks
        self.seed = seed
        self._epoch = 0
        self._first = 0
        self._lists: list[list[int]] = []

    def __len__(self) -> int:
        return batches_of(self.size, self.batch_size, self._drop_last) if self.batch_size else self.size

    def begin(self, epoch: int, first: int) -> None:
        """List the batches of an epoch, and begin at one of them."""
        self._epoch, self._first = epoch, first
        seed = mixed(self.seed, epoch)
        samplers: list[Any] = [self._sampler, getattr(self._sampler, "sampler", None)]
        for each in samplers:
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
            if isinstance(generator := getattr(each, "generator", None), torch.Generator):
                generator.manual_seed(seed)
        # the length in this epoch
        self.size = len(self._sampler)
        with RandomNumbers(seed).drawn():
            drawn = list(itertools.islice(self._sampler, self.size))
        if len(self._sampler) != self.size:
            raise UserError(
                f"run.loader: the length of {type(self._sampler).__name__} changed from {self.size} to"
                f" {len(self._sampler)} when it was iterated: set its length in set_epoch(epoch)"
            )
        if self.batch_size:
            drawn = [drawn[begin : begin + self.batch_size] for begin in range(0, len(drawn), self.batch_size)]
        self._lists = [[int(index) for index in batch] for batch in drawn[: len(self)]]
        if len(self._lists) < len(self) or not all(self._lists):
            raise UserError(
                f"run.loader: {type(self._sampler).__name__} has a length of {self.size}, but yielded {len(drawn)}"
                f" batches, the smallest of {min(map(len, self._lists), default=0)} samples"
            )

    def digest(self) -> int:
        """Return a digest of the lists."""
        return zlib.crc32(str(self._lists).encode())

    def shares(self) -> Iterator[Share]:
        """Return this rank's shares of the batches, from that on at which the epoch has begun."""
        return (_share(len(batch), self.data_rank, self._data_ranks) for batch in self._lists[self._first :])

    def __iter__(self) -> Iterator[Part]:
        # an evaluation within this pass lists anew
        lists, epoch = self._lists, self._epoch
        for number in range(self._first, len(lists)):
            seed = mixed(self.seed, epoch, number)
            yield _part(lists[number], self.data_rank, self._data_ranks, seed)
