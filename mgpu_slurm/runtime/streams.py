"""Streaming data: every rank and every worker reads the same stream, and keeps its samples of each global batch.

So the batches are the same on any number of ranks and workers, each rank knows when the stream ends, and a position is
a number of batches. What is expensive belongs in `collate_fn`, which sees a rank's own samples only.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from mgpu_slurm.errors import UserError
from mgpu_slurm.runtime.batches import mixed
from mgpu_slurm.runtime.nests import CONSTANTS, children_of
from mgpu_slurm.runtime.passes import Share, share_of
from mgpu_slurm.runtime.randomness import RandomNumbers


class StreamBatch(NamedTuple):
    """This rank's part of a global batch."""

    share: Share
    digest: int
    """Of all samples of the first batch of a pass: ranks that read other streams have another one."""
    samples: Any


class Stream(IterableDataset[StreamBatch]):
    """This rank's parts of the global batches of a dataset that can only be iterated; one without a sample gets another
    one's, that counts nothing."""

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int,
        drop_last: bool,
        collate: Callable[[list[Any]], Any],
        rank: int,
        world_size: int,
        seed: int,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank = rank
        self.seed = seed
        self.drop_last = drop_last
        self._collate = collate
        self._world_size = world_size
        self._epoch = 0
        self._first = 0

    def begin(self, epoch: int, first: int) -> None:
        """Begin an epoch at one of its batches."""
        self._epoch, self._first = epoch, first
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def check_same(self, batch: StreamBatch | None, is_same: Callable[[int], bool]) -> None:
        """
        Args:
            batch: the first of a pass; None if there is none.
            is_same: whether a number is the same on all ranks, each of which makes the call.

        Raises:
            UserError: the ranks read different streams.
        """
        if not is_same(batch.digest if batch is not None else 0):
            raise UserError(
                f"{type(self.dataset).__name__} gives other samples on other ranks: have it give all of them in the"
                " same order on each rank; run.loader and run.shard share them out"
            )

    def __iter__(self) -> Iterator[StreamBatch]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for number, samples in enumerate(self._global_batches()):
            # the loader asks one worker after the other
            if number >= self._first and (number - self._first) % workers == worker:
                begin, end = share_of(len(samples), self.rank, self._world_size)
                own = self._collate(samples[begin:end] or samples[:1])
                share = Share(end - begin, len(samples))
                yield StreamBatch(share, digest(samples) if number == self._first else 0, own)

    def _global_batches(self) -> Iterator[list[Any]]:
        # a stream that shuffles by Python's, NumPy's or torch's numbers is the same on all ranks
        numbers = RandomNumbers(mixed(self.seed, self._epoch))
        with numbers.drawn(), _as_only_worker():
            stream = iter(self.dataset)
        while True:
            with numbers.drawn(), _as_only_worker():
                samples = list(itertools.islice(stream, self.batch_size))
            if not samples or (self.drop_last and len(samples) < self.batch_size):
                return
            yield samples


@contextmanager
def _as_only_worker() -> Iterator[None]:
    """Have the dataset give all of its samples: many give a part of them to each worker."""
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def digest(samples: Any) -> int:
    """Return a number that tells other samples from these."""
    if isinstance(samples, torch.Tensor):
        return zlib.crc32(samples.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(samples, np.ndarray):
        return zlib.crc32(samples.tobytes())
    if isinstance(samples, CONSTANTS):
        return zlib.crc32(repr(samples).encode())
    children = children_of(samples)
    parts = [type(samples).__name__, *map(digest, children or ())]
    return zlib.crc32(repr(parts).encode())


def as_it_is(batch: Any) -> Any:
    """Return what a stream gives, which is a batch already; workers that are spawned need the function by its name."""
    return batch
