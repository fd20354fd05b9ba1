"""Iterate over this rank's share of global batches: passes over a loader, and the boundaries at which a run may stop.

The batches come from a source: a map-style dataset, or a stream. A source knows the order of the samples, and this
rank's share of each global batch. The loader decides where a pass begins, keeps its position in a place
(`loader_positions`), and records each batch handed out, so that a loss can be weighted by it (`batch_weights`).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from mgpu_slurm.core import log_lines
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.data.batching.batch_weights import BatchWeights
from mgpu_slurm.data.batching.batches import GlobalBatches, ListedBatches, Share, batches_of, size_of
from mgpu_slurm.data.batching.passes import Pass
from mgpu_slurm.data.device_copies import on_device
from mgpu_slurm.data.loader_positions import LoaderPlace, LoaderPlaces
from mgpu_slurm.data.randomness import mixed
from mgpu_slurm.data.sample_seeds import SeededReader
from mgpu_slurm.data.streams import Drawn, Stream, StreamBatch
from mgpu_slurm.data.workers import data_loader
from mgpu_slurm.rank.communication.step_sync import Call


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
        """Return this rank's share and samples of a batch, on the device.

        Raises:
            Over: there is no batch of that number.
        """

    @property
    def last_place(self) -> int | None:
        """The last batch of a pass at which a run can stop; None if not known yet."""

    @property
    def workers(self) -> int:
        """The number of processes that read them."""

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
        self._device = device
        self._is_same = is_same
        self.order: int | None = None
        self.name = batches.name if isinstance(batches, ListedBatches) else type(dataset).__name__
        reader = SeededReader(dataset, options.pop("collate_fn", None) or default_collate)
        self._loader = data_loader(reader, device, sampler=batches, **options)
        self.workers = self._loader.num_workers
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
                    "run.loader: the sampler yields different samples on each rank: draw from Python's, NumPy's or"
                    " torch's global generators, or from an attribute `generator`, which are seeded alike"
                )
        # for `worker_init_fn`: different for each rank, epoch and first batch, and reproducible
        self._loader.generator.manual_seed(mixed(self._batches.seed, epoch, self._batches.data_rank, first))
        # unlike zip, map keeps no reference to a batch
        return map(_paired, self._batches.shares(), on_device(self._loader, self._device))

    def is_over(self, number: int) -> bool:
        return number >= len(self)

    def take(self, batches: Iterator[Any], number: int) -> tuple[Share, Any]:
        share_and_samples: tuple[Share, Any] = next(batches)
        return share_and_samples


def _paired(share: Share, samples: Any) -> tuple[Share, Any]:
    return share, samples


class Streamed:
    """Batches of an iterable dataset."""

    size = 0
    is_for_one_pass = True

    def __init__(
        self,
        stream: Stream,
        device: torch.device,
        drawn: Drawn,
        sync: Callable[[Call], None],
        take_batch: Callable[[], None],
        **options: Any,
    ) -> None:
        """
        Args:
            drawn: records each batch.
            sync: waits until all ranks make a call, and compares what they have drawn.
            take_batch: called with each batch.
        """
        self.batch_size = stream.batch_size
        self._stream = stream
        self._device = device
        self._drawn = drawn
        self._sync = sync
        self._take_batch = take_batch
        self._first = 0
        self.order: int | None = None
        self.name = type(stream.dataset).__name__
        self._loader = data_loader(stream, device, **options)
        self.workers = self._loader.num_workers
        self.last_place: int | None = None

    def __len__(self) -> int:
        if not hasattr(self._stream.dataset, "__len__"):
            raise TypeError(f"{type(self._stream.dataset).__name__} has no length, so its number of batches is unknown")
        return batches_of(len(self._stream.dataset), self.batch_size, self._stream.drop_last)

    def begin(self, epoch: int, first: int) -> Iterator[Any]:
        self._stream.begin(epoch, first)
        self._first = first
        self._loader.generator.manual_seed(mixed(self._stream.seed, epoch, self._stream.data_rank, first))
        return on_device(self._loader, self._device)

    def is_over(self, number: int) -> bool:
        return False

    def take(self, batches: Iterator[Any], number: int) -> tuple[Share, Any]:
        batch: StreamBatch | None = next(batches, None)
        self._drawn.add(self._stream.dataset, batch)
        if number == self._first or batch is None:
            self._sync(Call.PASS if number == self._first else Call.END)
        if batch is None:
            # known from now on: a run can also stop after the last batch
            self.last_place = number
            raise Over
        if number == self._first:
            self.order = batch.order
        self._take_batch()
        return batch.share, batch.samples


@dataclass(frozen=True)
class RunOfLoader:
    """The parts of a run that a loader uses."""

    data_rank: int
    """Index of this rank's part of each batch."""
    data_ranks: int
    """Number of these parts."""
    device: torch.device
    at_boundary: Callable[[Loader, LoaderPlace], None]
    """Called before each batch, with the place of the pass."""
    epoch: Callable[[], int | None]
    """Returns the epoch of `state.epochs`; None outside of it."""
    awaits_epochs: Callable[[], bool]
    """Returns whether the run was restored within a loop over it, and has not reached the loop yet."""
    step: Callable[[], int]
    is_same: Callable[[int], bool]
    """Returns whether a number is the same on all ranks; every rank must call it."""
    sync: Callable[[Call], None]
    """Waits until all ranks make a call, and compares what they have drawn from streams."""
    drawn: Drawn
    take_batch: Callable[[], None]
    """Called with each batch of a stream."""
    places: LoaderPlaces
    batch_weights: BatchWeights
    fetch_begins: Callable[[], Any]
    """Called when a batch is asked for."""
    fetched: Callable[[Any, int, bool, int, Any], None]
    """Called with each batch of a training loop: what `fetch_begins` returned, the loader's number of workers, whether
    it reads a stream, this rank's number of samples, the batch."""


def make_loader(
    dataset: Dataset[Any],
    batch_size: int | None,
    shuffle: bool,
    drop_last: bool,
    seed: int,
    run: RunOfLoader,
    **options: Any,
) -> Loader:
    """Return a loader over any kind of dataset; see `Run.loader`.

    Raises:
        UserError: the arguments are invalid, or contradict each other.
    """
    ranks = run.data_rank, run.data_ranks, seed
    if isinstance(dataset, IterableDataset):
        _check_stream(options)
    sampler, batch_sampler = options.pop("sampler", None), options.pop("batch_sampler", None)
    if batch_sampler is not None:
        if batch_size is not None or shuffle or drop_last or sampler is not None:
            raise UserError(
                "run.loader(batch_sampler=...): it decides batch_size, shuffle, drop_last and sampler: leave them out"
            )
        return _indexed(dataset, ListedBatches(batch_sampler, None, False, *ranks), run, options)
    if batch_size is None or batch_size < 1:
        raise UserError(f"batch_size={batch_size}: must be at least 1 (it is the total over all ranks)")
    if shuffle and (sampler is not None or isinstance(dataset, IterableDataset)):
        raise UserError("run.loader(shuffle=True): the sampler or stream decides the order: shuffle there")
    if isinstance(dataset, IterableDataset):
        collate = options.pop("collate_fn", None) or default_collate
        stream = Stream(dataset, batch_size, drop_last, collate, *ranks)
        return Loader(Streamed(stream, run.device, run.drawn, run.sync, run.take_batch, **options), run)
    size = size_of(dataset)
    if drop_last and size < batch_size:
        raise UserError(f"drop_last leaves nothing of {size} samples with batch_size={batch_size}: lower batch_size")
    if sampler is not None:
        return _indexed(dataset, ListedBatches(sampler, batch_size, drop_last, *ranks), run, options)
    return _indexed(dataset, GlobalBatches(size, batch_size, shuffle, drop_last, *ranks), run, options)


def _indexed(
    dataset: Dataset[Any], batches: GlobalBatches | ListedBatches, run: RunOfLoader, options: Mapping[str, object]
) -> Loader:
    return Loader(Indexed(dataset, batches, run.device, run.is_same, **options), run)


def _check_stream(options: Mapping[str, object]) -> None:
    for name in ("sampler", "batch_sampler", "persistent_workers"):
        if options.get(name):
            raise UserError(f"run.loader({name}=...): a stream is read from the start in each pass: leave this out")


class Loader:
    """Iterates over this rank's share of global batches, on the run's device.

    A run stops or saves at the beginning of a batch, so a loader knows its position.
    """

    def __init__(self, source: Source, run: RunOfLoader) -> None:
        self._source = source
        self._run = run
        self.place = LoaderPlace(source.size, source.batch_size)
        run.places.add(self.place)
        self._newest: object = None
        """The pass that began last, even if it runs next to another one."""

    def __len__(self) -> int:
        """Steps per epoch, the same on every rank."""
        return len(self._source)

    @property
    def batch(self) -> int:
        """The number of the current batch in the epoch, from 0. In an epoch that a resumed run continues, `enumerate`
        restarts from 0, but this does not."""
        return self.place.batch

    @property
    def last_place(self) -> int | None:
        """The last batch of a pass at which a run can stop; None if not known yet."""
        return self._source.last_place

    def __iter__(self) -> Iterator[Any]:
        run, place, step = self._run, self.place, self._run.step()
        is_evaluation = place.is_in_pass and not torch.is_grad_enabled()
        # it is continued by the loop in which it was saved, not by a look at batches before that loop
        is_look = run.awaits_epochs() and not place.is_outside
        if is_evaluation or is_look:
            place = place.detached()
        first = place.begin_pass(run.epoch(), step)
        own = self._newest = place.current
        batches, ran_to_end = self._source.begin(place.epoch, first), False
        try:
            with (
                run.batch_weights.passing(place.signature, None if is_evaluation else self.place) as passing,
                suppress(Over),
            ):
                for number in itertools.count(first):
                    if own is not (self._newest if self._source.is_for_one_pass else place.current):
                        raise _overtaken()
                    # no reference is kept here while the job has it
                    yield self._next(batches, number, place, passing)
            passing.ran_to_end = ran_to_end = True
        finally:
            run.places.end_pass(place, own, ran_to_end, run.epoch())
        # a job that keeps its batches may use them later
        if passing.has_unweighted_stand_in and run.step() == step and not passing.keeps_unused():
            self._warn_of_evaluation()

    def _next(self, batches: Iterator[Any], number: int, place: LoaderPlace, passing: Pass) -> Any:
        if self._source.is_over(number):
            raise Over
        before = place.batch
        place.come_to(number)
        self._run.at_boundary(self, place)
        fetch = self._run.fetch_begins()
        try:
            share, batch = self._source.take(batches, number)
        except Over:
            place.batch = before
            raise
        if place.batches == 1 and not place.continue_in(self._source.order):
            raise _in_other_order(self._source.name)
        if torch.is_grad_enabled():
            is_stream = isinstance(self._source, Streamed)
            self._run.fetched(fetch, self._source.workers, is_stream, share.count, batch)
        return self._run.batch_weights.hand_out(passing, share, batch)

    def _warn_of_evaluation(self) -> None:
        """Warn, once in a run, of a loop that has counted a sample of another rank."""
        if self._run.batch_weights.has_warned:
            return
        self._run.batch_weights.has_warned = True
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_globals["__name__"].startswith("mgpu_slurm."):
            frame = frame.f_back
        log_lines.warn(
            f"{frame.f_code.co_filename}:{frame.f_lineno}: an evaluation with run.loader counts a"
            " sample twice if there are fewer samples in a batch than ranks: use run.shard(dataset, batch_size) instead"
        )


def _in_other_order(name: str) -> UserError:
    return UserError(
        f"run.loader: {name} yields different samples than before the restart, or in a different order: draw from"
        " Python's, NumPy's or torch's global generators, which are seeded for each epoch, or seed its own generator"
        " in set_epoch(epoch)"
    )


def _overtaken() -> UserError:
    return UserError(
        "run.loader: a loop continues after its body has started another loop over the same loader: create a second"
        " run.loader for the inner loop"
    )
