"""Loaders that know their place: global batches shared out over ranks, no sample lost, none seen twice."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.data import workers
from mgpu_slurm.data.batch_weights import Shares
from mgpu_slurm.data.batches import GlobalBatches, ListedBatches, batches_of, mixed
from mgpu_slurm.data.loader_positions import LoaderPlace, LoaderPlaces
from mgpu_slurm.data.nests import to_device
from mgpu_slurm.data.passes import Pass, Share
from mgpu_slurm.data.streams import Drawn, Stream, StreamBatch, as_it_is
from mgpu_slurm.rank.calls import Call


@dataclass(frozen=True)
class RunOfLoader:
    """What a loader has to do with its run."""

    rank: int
    world_size: int
    device: torch.device
    at_boundary: Callable[[Loader, LoaderPlace], None]
    """Is called before each batch, with the place of the pass."""
    epoch: Callable[[], int | None]
    """That of `state.epochs`; None outside of it."""
    awaits_epochs: Callable[[], bool]
    """Whether the run was restored in a loop over that, and has not come to the loop yet."""
    step: Callable[[], int]
    is_same: Callable[[int], bool]
    """Whether a number is the same on all ranks, each of which makes the call."""
    sync: Callable[[Call], None]
    """Has all ranks make a call, and compares what they have drawn from streams."""
    drawn: Drawn
    take_batch: Callable[[], None]
    """Is called with each batch of a stream."""
    places: LoaderPlaces
    shares: Shares


class Source(Protocol):
    """The batches of a loader."""

    size: int
    batch_size: int

    def __len__(self) -> int: ...

    order: int | None
    """Tells the samples of the epoch from those in another order, once the pass has a batch; None if they follow from
    seed and epoch."""

    @property
    def name(self) -> str:
        """That of the class which decides their order."""

    def begin(self, epoch: int, first: int) -> Iterator[Any]:
        """Begin an epoch at one of its batches, and return what `take` takes."""

    def is_over(self, number: int) -> bool:
        """Return whether it is known before the batch is asked for that there is none of that number."""

    def take(self, batches: Iterator[Any], number: int) -> tuple[Share, Any]:
        """Return this rank's share and samples of a batch.

        Raises:
            Over: there is none of that number.
        """

    @property
    def last_place(self) -> int | None:
        """At which batch of a pass a run can stop last; None if that is not known yet."""

    @property
    def is_for_one_pass(self) -> bool:
        """Whether a pass ends when another one begins."""


class Over(Exception):
    """A pass has no further batch."""


class Indexed:
    """Batches of a map-style dataset."""

    def __init__(
        self, dataset: Dataset[Any], batches: GlobalBatches | ListedBatches, run: RunOfLoader, **options: Any
    ) -> None:
        self.size, self.batch_size = batches.size, batches.batch_size
        self._batches = batches
        self._run = run
        self.order: int | None = None
        self.name = batches.name if isinstance(batches, ListedBatches) else type(dataset).__name__
        self._workers, self._loader = _with_own_numbers(dataset, run.device, batch_sampler=batches, **options)
        # these have one iterator
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
            if not self._run.is_same(self.order):
                raise UserError(
                    "run.loader: the sampler lists other samples on other ranks: have it draw from Python's, NumPy's or"
                    " torch's own generators, or from an attribute `generator`, which are seeded alike"
                )
        # different on each rank, in each epoch and for each part of one, and the same again when that is repeated
        self._workers.manual_seed(mixed(self._batches.seed, epoch, self._batches.rank, first))
        return zip(self._batches.shares(), self._loader, strict=True)

    def is_over(self, number: int) -> bool:
        return number >= len(self)

    def take(self, batches: Iterator[Any], number: int) -> tuple[Share, Any]:
        share_and_samples: tuple[Share, Any] = next(batches)
        return share_and_samples


class Streamed:
    """Batches of a dataset that can only be iterated."""

    size = 0
    is_for_one_pass = True

    def __init__(self, stream: Stream, run: RunOfLoader, **options: Any) -> None:
        self.batch_size = stream.batch_size
        self._stream = stream
        self._run = run
        self._first = 0
        self.order: int | None = None
        self.name = type(stream.dataset).__name__
        self._workers, self._loader = _with_own_numbers(
            stream, run.device, batch_size=None, collate_fn=as_it_is, **options
        )
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
        self._run.drawn.add(self._stream.dataset, batch)
        if number == self._first or batch is None:
            self._run.sync(Call.PASS if number == self._first else Call.END)
        if batch is None:
            # known from now on: a run can stop behind the last batch, too
            self.last_place = number
            raise Over
        if number == self._first:
            self.order = batch.order
        self._run.take_batch()
        return batch.share, batch.samples


def _with_own_numbers(
    dataset: Dataset[Any], device: torch.device, **options: Any
) -> tuple[torch.Generator, DataLoader[Any]]:
    """Return the generator that seeds workers, and a loader: torch's global generator stays the job's own."""
    generator = options.setdefault("generator", torch.Generator())
    return generator, data_loader(dataset, device, **options)


def make_loader(
    dataset: Dataset[Any],
    batch_size: int | None,
    shuffle: bool,
    drop_last: bool,
    seed: int,
    run: RunOfLoader,
    **options: Any,
) -> Loader:
    """Return a loader over any kind of dataset, see `Run.loader`.

    Raises:
        UserError: arguments that contradict each other.
    """
    ranks = run.rank, run.world_size, seed
    if isinstance(dataset, IterableDataset):
        _check_stream(options)
    sampler, batch_sampler = options.pop("sampler", None), options.pop("batch_sampler", None)
    if batch_sampler is not None:
        if batch_size is not None or shuffle or drop_last or sampler is not None:
            raise UserError(
                "run.loader(batch_sampler=...): leave out batch_size, shuffle, drop_last and sampler, which it decides"
            )
        listed = ListedBatches(batch_sampler, None, False, *ranks)
        return Loader(Indexed(dataset, listed, run, **options), run)
    if batch_size is None or batch_size < 1:
        raise UserError(f"batch_size={batch_size}: expected at least 1 sample for all ranks together")
    if shuffle and (sampler is not None or isinstance(dataset, IterableDataset)):
        raise UserError("run.loader(shuffle=True): the order is that of the sampler or of the stream: shuffle there")
    if isinstance(dataset, IterableDataset):
        collate = options.pop("collate_fn", None) or default_collate
        return Loader(Streamed(Stream(dataset, batch_size, drop_last, collate, *ranks), run, **options), run)
    size = size_of(dataset)
    if drop_last and size < batch_size:
        raise UserError(f"drop_last leaves nothing of {size} samples with batch_size={batch_size}: lower one")
    if sampler is not None:
        return Loader(Indexed(dataset, ListedBatches(sampler, batch_size, drop_last, *ranks), run, **options), run)
    return Loader(Indexed(dataset, GlobalBatches(size, batch_size, shuffle, drop_last, *ranks), run, **options), run)


def _check_stream(options: Mapping[str, Any]) -> None:
    for name in ("sampler", "batch_sampler", "persistent_workers"):
        if options.get(name):
            raise UserError(f"run.loader({name}=...): a stream is read from its beginning in each pass: leave that out")


class Loader:
    """Iterates this rank's share of global batches, each on the run's device.

    The start of each batch is the boundary at which a run stops or saves, so a loader knows its position.
    """

    def __init__(self, source: Source, run: RunOfLoader) -> None:
        self._source = source
        self._run = run
        self.place = LoaderPlace(source.size, source.batch_size)
        run.places.add(self.place)
        self._newest: object = None
        """The pass that began last, also beside another one."""

    def __len__(self) -> int:
        """Steps per epoch, the same on every rank."""
        return len(self._source)

    @property
    def batch(self) -> int:
        """The number of the current batch in the epoch, from 0, also in an epoch that a restored run continues.
        `enumerate` counts from 0 there."""
        return self.place.batch

    @property
    def last_place(self) -> int | None:
        """At which batch of a pass a run can stop last; None if that is not known yet."""
        return self._source.last_place

    def __iter__(self) -> Iterator[Any]:
        run, place, step = self._run, self.place, self._run.step()
        is_evaluation = place.is_in_pass and not torch.is_grad_enabled()
        # the loop in which it was saved continues it, and not a look before that
        is_look = run.awaits_epochs() and not place.is_outside
        if is_evaluation or is_look:
            place = place.beside()
        first = place.begin_pass(run.epoch(), step)
        own = self._newest = place.current
        batches, ran_to_end = self._source.begin(place.epoch, first), False
        try:
            with (
                run.shares.passing(place.signature, None if is_evaluation else self.place) as passing,
                suppress(Over),
            ):
                for number in itertools.count(first):
                    if own is not (self._newest if self._source.is_for_one_pass else place.current):
                        raise _overtaken()
                    # not kept here while the job has it
                    yield self._next(batches, number, place, passing)
            passing.ran_to_end = ran_to_end = True
        finally:
            run.places.end_pass(place, own, ran_to_end, run.epoch())
        # a job that keeps its batches uses them later
        if passing.has_unweighted_stand_in and run.step() == step and not passing.keeps_unused():
            self._warn_of_evaluation()

    def _next(self, batches: Iterator[Any], number: int, place: LoaderPlace, passing: Pass) -> Any:
        if self._source.is_over(number):
            raise Over
        before = place.batch
        place.come_to(number)
        self._run.at_boundary(self, place)
        try:
            share, samples = self._source.take(batches, number)
        except Over:
            place.batch = before
            raise
        if place.batches == 1 and not place.continue_in(self._source.order):
            raise _in_other_order(self._source.name)
        return self._run.shares.hand_out(passing, share, to_device(samples, self._run.device))

    def _warn_of_evaluation(self) -> None:
        """Name, once in a run, the loop that has counted a sample of another rank."""
        if self._run.shares.has_warned:
            return
        self._run.shares.has_warned = True
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_globals["__name__"].startswith("mgpu_slurm."):
            frame = frame.f_back
        print(
            f"mgpu_slurm: WARNING: {frame.f_code.co_filename}:{frame.f_lineno}: an evaluation with run.loader counts a"
            " sample twice if there are fewer in a batch than ranks: use run.shard(dataset, batch_size) instead",
            flush=True,
        )


def _in_other_order(name: str) -> UserError:
    return UserError(
        f"run.loader: {name} gives other samples than before the restart, or in another order: have it draw from"
        " Python's, NumPy's or torch's own generators, which are seeded for each epoch, or seed a generator of its own"
        " in set_epoch(epoch)"
    )


def _overtaken() -> UserError:
    return UserError(
        "run.loader: a loop over it continues after another one over the same has begun in its body: make a second"
        " run.loader for that"
    )


def data_loader(dataset: Dataset[Any], device: torch.device, **options: Any) -> DataLoader[Any]:
    """Return a DataLoader whose workers ignore the run's signals, and end when their rank ends them."""
    # module-level functions, because workers that are spawned get them pickled
    options["worker_init_fn"] = functools.partial(workers.set_up, options.get("worker_init_fn"))
    options.setdefault("pin_memory", device.type == "cuda")
    return _DataLoader(dataset, **options)


class _DataLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        if not self.num_workers:
            return super().__iter__()
        with workers.being_started(self.multiprocessing_context):
            return super().__iter__()


def size_of(dataset: Dataset[Any]) -> int:
    """The number of samples.

    Raises:
        UserError: it is empty, or no dataset.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserError(
            f"{type(dataset).__name__} has no length and index: run.loader and run.shard need a map-style dataset, or a"
            " torch.utils.data.IterableDataset, which they can iterate again in each pass"
        )
    size = len(cast(Sized, dataset))
    if size == 0:
        raise UserError(f"{type(dataset).__name__} is empty: there is nothing to load")
    return size
