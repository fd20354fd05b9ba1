"""Streaming data: every rank and every worker reads the same stream, and keeps its samples of each global batch.

So the batches are the same on any number of ranks and workers, each rank knows when the stream ends, and a position is
a number of batches. Expensive work belongs in `collate_fn`, which sees only a rank's own samples.
"""

from __future__ import annotations

import io
import itertools
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.hostlist import ranges
from mgpu_slurm.data.batching.batches import Share, share_of
from mgpu_slurm.data.batching.nests import CONSTANTS, children_of
from mgpu_slurm.data.randomness import RandomNumbers, mixed
from mgpu_slurm.data.sample_seeds import apart_from_job, seed_collate
from mgpu_slurm.rank.torch_adapter import as_only_worker


class StreamBatch(NamedTuple):
    """This rank's part of a global batch."""

    share: Share
    order: int
    """In the first batch of a pass, the digest of all samples of the epoch's first batch; else 0."""
    digest: int
    """The digest of the last sample of the global batch. Digests of all samples would be slow, and different streams
    hardly have the same last sample in every batch."""
    samples: Any


class Stream(IterableDataset[StreamBatch]):
    """This rank's parts of the global batches of an iterable dataset. A rank without a sample gets another rank's, with
    weight 0."""

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int,
        drop_last: bool,
        collate: Callable[[list[Any]], Any],
        data_rank: int,
        data_ranks: int,
        seed: int,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.data_rank = data_rank
        self.seed = seed
        self.drop_last = drop_last
        self._collate = collate
        self._data_ranks = data_ranks
        self._epoch = 0
        self._first = 0
        self.collate_seed = seed

    def begin(self, epoch: int, first: int) -> None:
        """Begin an epoch at one of its batches."""
        self._epoch, self._first = epoch, first
        self.collate_seed = mixed(self.seed, epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[StreamBatch]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        order = 0
        for number, samples in enumerate(self._global_batches()):
            # before `collate_fn`, which may change a rank's own samples; by the worker that yields the first batch
            if number == 0 and worker == 0:
                order = digest(samples)
            # the loader asks the workers in turn
            if number >= self._first and (number - self._first) % workers == worker:
                digest_of_last = digest([len(samples), samples[-1]])
                begin, end = share_of(len(samples), self.data_rank, self._data_ranks)
                with apart_from_job():
                    seed_collate(mixed(self.collate_seed, number), begin)
                    own = self._collate(samples[begin:end] or samples[:1])
                share = Share(end - begin, len(samples))
                yield StreamBatch(share, order if number == self._first else 0, digest_of_last, own)

    def _global_batches(self) -> Iterator[list[Any]]:
        # a stream that shuffles with Python's, NumPy's or torch's generators is then the same on all ranks
        numbers = RandomNumbers(mixed(self.seed, self._epoch))
        with numbers.drawn(), as_only_worker():
            stream = iter(self.dataset)
        while True:
            with numbers.drawn(), as_only_worker():
                samples = list(itertools.islice(stream, self.batch_size))
            if not samples or (self.drop_last and len(samples) < self.batch_size):
                return
            yield samples


class Drawn:
    """A digest of what this rank has drawn from all streams so far, for comparison with the other ranks."""

    def __init__(self) -> None:
        self.digest = 0
        self._names: set[str] = set()

    def add(self, dataset: IterableDataset[Any], batch: StreamBatch | None) -> None:
        """Record a batch.

        Args:
            batch: None at the end of the stream.
        """
        self._names.add(type(dataset).__name__)
        self.digest = zlib.crc32(repr((self.digest, batch and (batch.order, batch.digest))).encode())

    def check(self, digests: Sequence[float]) -> None:
        """Check that all ranks have drawn the same.

        Args:
            digests: digests of all ranks.

        Raises:
            UserError: the ranks read different streams.
        """
        differing = [rank for rank, each in enumerate(digests) if each != digests[0]]
        if differing:
            where = f"rank{'s' * (len(differing) > 1)} {ranges(differing)}"
            raise UserError(
                f"{' or '.join(sorted(self._names))} yields different samples on {where} than on rank 0: it must yield"
                " all samples in the same order on each rank; run.loader and run.shard distribute them"
            )


def digest(samples: Any) -> int:
    """Return a digest of samples."""
    if isinstance(samples, torch.Tensor):
        return zlib.crc32(samples.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(samples, np.ndarray) and not samples.dtype.hasobject:
        return zlib.crc32(samples.tobytes())
    if isinstance(samples, CONSTANTS):
        return zlib.crc32(repr(samples).encode())
    return zlib.crc32(repr([type(samples).__name__, *_digests_of_parts(samples)]).encode())


def _digests_of_parts(samples: Any) -> list[int]:
    if isinstance(samples, (set, frozenset)):
        # their order differs in each process
        return sorted(map(digest, samples))
    children = samples.reshape(-1).tolist() if isinstance(samples, np.ndarray) else children_of(samples)
    return [_digest_of_pickle(samples)] if children is None else [*map(digest, children)]


class _Pickler(pickle.Pickler):
    """Pickles equal objects to the same bytes in each process: a plain pickle of a tensor contains an address, and that
    of a set depends on its current order."""

    def persistent_id(self, part: Any) -> int | None:
        return digest(part) if isinstance(part, (torch.Tensor, np.ndarray, set, frozenset)) else None


def _digest_of_pickle(sample: Any) -> int:
    """Return the digest of a sample's pickle; 0 if it cannot be pickled, so that only its type is compared."""
    pickled = io.BytesIO()
    try:
        # a fixed protocol: a run may be resumed with another Python version
        _Pickler(pickled, protocol=5).dump(sample)
    except Exception:
        return 0
    return zlib.crc32(pickled.getvalue())
