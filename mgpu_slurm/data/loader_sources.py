"""The sources of a loader's batches: a map-style dataset, or a stream.

A source knows the order of the samples and this rank's share of each global batch. The loader (`loaders`) decides where
a pass begins, and lets the run stop before each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.data.batches import GlobalBatches, ListedBatches, Share, batches_of, mixed
from mgpu_slurm.data.streams import Drawn, Stream, StreamBatch, as_it_is
from mgpu_slurm.data.workers import data_loader
from mgpu_slurm.rank.calls import Call


class Source(Protocol):
    """The batches of a loader."""

    size: int
    batch_size: int

    def __len__(self) -> int: ...

    order: int | None
    """A digest of the order of the epoch's samples, once the pass has a batch; None if the order follows from seed and
    epoch."""

    @property
    def name(self) -> str:
        """The name of the class that decides their order."""

    def begin(self, epoch: int, first: int) -> Iterator[Any]:
        """Begin an epoch at one of its batches, and return the iterator for `take`."""

    def is_over(self, number: int) -> bool:
        """Return whether it is known, without fetching it, that there is no batch of that number."""

    def take(self, batches: Iterator[Any], number: int) -> tuple[Share, Any]:
        """Return this rank's share and samples of a batch.

        Raises:
            Over: there is no batch of that number.
        """

    @property
    def last_place(self) -> int | None:
        """The last batch of a pass at which a run can stop; None if not known yet."""

    @property
    def is_for_one_pass(self) -> bool:
        """Whether a pass ends when another one begins."""


class Over(Exception):
    """A pass has no further batch."""


class Indexed:
    """Batches of a map-style dataset."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batches: GlobalBatches | ListedBatches,
        device: torch.device,
        is_same: Callable[[int], bool],
        **options: Any,
    ) -> None:
        """
        Args:
            is_same: returns whether a number is the same on all ranks; every rank must call it.
        """
        self.size, self.batch_size = batches.size, batches.batch_size
        self._batches = batches
        self._is_same = is_same
        self.order: int | None = None
        self.name = batches.name if isinstance(batches, ListedBatches) else type(dataset).__name__
        self._workers, self._loader = _with_own_numbers(dataset, device, batch_sampler=batches, **options)
        # persistent workers have only one iterator
        self.is_for_one_pass = self._loader.persistent_workers

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def last_place(self) -> int:
        return len(self) - 1

    def begin(self, epoch: int, first: int) -> Iterator[Any]:
        self._batches.begin(epoch, first)
        if isinstance(self._batches, ListedBatches):
            self.order = self._batches.digest()
            if not self._is_same(self.order):
                raise UserError(
                    "run.loader: the sampler lists other samples on other ranks: have it draw from Python's, NumPy's or"
                    " torch's own generators, or from an attribute `generator`, which are seeded alike"
                )
        # different for each rank, epoch and first batch, and reproducible
        self._workers.manual_seed(mixed(self._batches.seed, epoch, self._batches.rank, first))
        return zip(self._batches.shares(), self._loader, strict=True)

    def is_over(self, number: int) -> bool:
        return number >= len(self)

    def take(self, batches: Iterator[Any], number: int) -> tuple[Share, Any]:
        share_and_samples: tuple[Share, Any] = next(batches)
        return share_and_samples


class Streamed:
    """Batches of an iterable dataset."""

    size = 0
    is_for_one_pass = True

    def __init__(
        self,
        stream: Stream,
        device: torch.device,
        drawn: Drawn,
        together: Callable[[Call], None],
        take_batch: Callable[[], None],
        **options: Any,
    ) -> None:
        """
        Args:
            drawn: records each batch.
            together: waits until all ranks make a call, and compares what they have drawn.
            take_batch: called with each batch.
        """
        self.batch_size = stream.batch_size
        self._stream = stream
        self._drawn = drawn
        self._together = together
        self._take_batch = take_batch
        self._first = 0
        self.order: int | None = None
        self.name = type(stream.dataset).__name__
        self._workers, self._loader = _with_own_numbers(stream, device, batch_size=None, collate_fn=as_it_is, **options)
        self.last_place: int | None = None

    def __len__(self) -> int:
        if not hasattr(self._stream.dataset, "__len__"):
            raise TypeError(f"{type(self._stream.dataset).__name__} has no length: nobody knows its number of batches")
        return batches_of(len(self._stream.dataset), self.batch_size, self._stream.drop_last)

    def begin(self, epoch: int, first: int) -> Iterator[Any]:
        self._stream.begin(epoch, first)
        self._first = first
        self._workers.manual_seed(mixed(self._stream.seed, epoch, self._stream.rank, first))
        return iter(self._loader)

    def is_over(self, number: int) -> bool:
        return False

    def take(self, batches: Iterator[Any], number: int) -> tuple[Share, Any]:
        batch: StreamBatch | None = next(batches, None)
        self._drawn.add(self._stream.dataset, batch)
        if number == self._first or batch is None:
            self._together(Call.PASS if number == self._first else Call.END)
        if batch is None:
            # known from now on: a run can also stop after the last batch
            self.last_place = number
            raise Over
        if number == self._first:
            self.order = batch.order
        self._take_batch()
        return batch.share, batch.samples


def _with_own_numbers(
    dataset: Dataset[Any], device: torch.device, **options: Any
) -> tuple[torch.Generator, DataLoader[Any]]:
    """Return a generator that seeds the workers, and a loader, so that torch's global generator is left to the job."""
    generator = options.setdefault("generator", torch.Generator())
    return generator, data_loader(dataset, device, **options)
