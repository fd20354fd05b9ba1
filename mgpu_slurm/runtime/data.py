"""Loaders that know their place: global batches shared out over ranks, no sample lost, none seen twice."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from mgpu_slurm.errors import UserError
from mgpu_slurm.runtime import workers
from mgpu_slurm.runtime.loader_places import LoaderPlace, LoaderPlaces
from mgpu_slurm.runtime.nests import Cutter, to_device
from mgpu_slurm.runtime.shares import Share, Shares, share_of


class GlobalBatches(Sampler[list[int]]):
    """This rank's indices of each global batch of one epoch, from a given batch on.

    The order of an epoch depends on seed and epoch alone: not on the world size, not on where a run was interrupted.
    """

    def __init__(
        self, size: int, batch_size: int, shuffle: bool, drop_last: bool, rank: int, world_size: int, seed: int
    ) -> None:
        self.size = size - size % batch_size if drop_last else size
        self._dataset_size = size
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0
        self.first_batch = 0

    def __len__(self) -> int:
        return -(-self.size // self.batch_size)

    def share(self, batch: int) -> Share:
        begin, end = share_of(self._batch_total(batch), self.rank, self.world_size)
        return Share(end - begin, self._batch_total(batch))

    def _batch_total(self, batch: int) -> int:
        return min(self.batch_size, self.size - batch * self.batch_size)

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.size))
        generator = torch.Generator().manual_seed(mixed(self.seed, self.epoch))
        return cast("list[int]", torch.randperm(self._dataset_size, generator=generator).tolist())

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for batch in range(self.first_batch, len(self)):
            start = batch * self.batch_size
            begin, end = share_of(self._batch_total(batch), self.rank, self.world_size)
            # the last batch may hold fewer samples than there are ranks; a rank without one computes on a stand-in
            # that weighs nothing, because all ranks have to take part in the gradient's all-reduce
            yield order[start + begin : start + end] or [order[start]]


def mixed(seed: int, *parts: int) -> int:
    """One seed of 63 bits from several numbers, different for different numbers in practice."""
    for part in parts:
        seed = seed * 1_000_003 + part
    return seed % 2**63


@dataclass(frozen=True)
class RunOfLoader:
    """What a loader has to do with its run."""

    device: torch.device
    at_boundary: Callable[[Loader], None]
    """Is called before each batch."""
    epoch: Callable[[], int | None]
    """That of `state.epochs`; None outside of it."""
    step: Callable[[], int]
    places: LoaderPlaces
    shares: Shares


class Loader:
    """Iterates this rank's share of global batches, each on the run's device.

    The start of each batch is the boundary at which a run stops or saves, so a loader knows its position.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: GlobalBatches,
        run: RunOfLoader,
        **options: Any,
    ) -> None:
        self._sampler = sampler
        self._run = run
        self.place = LoaderPlace(sampler.size, sampler.batch_size)
        run.places.add(self.place)
        # the workers' random streams; torch's global generator stays the job's own
        self._workers = options.setdefault("generator", torch.Generator())
        self._loader = data_loader(dataset, run.device, batch_sampler=sampler, **options)

    def __len__(self) -> int:
        """Steps per epoch, the same on every rank."""
        return len(self._sampler)

    @property
    def batch(self) -> int:
        """The number of the current batch in the epoch, from 0, also in an epoch that a restored run continues.
        `enumerate` counts from 0 there."""
        return self.place.batch

    def __iter__(self) -> Iterator[Any]:
        run, place, step = self._run, self.place, self._run.step()
        self._sampler.first_batch = first = place.begin_pass(run.epoch())
        self._sampler.epoch = place.epoch
        # different on each rank, in each epoch and for each part of one, and the same again when that is repeated
        self._workers.manual_seed(mixed(self._sampler.seed, self._sampler.epoch, self._sampler.rank, first))
        batches = iter(self._loader)
        try:
            with run.shares.passing() as passing:
                for batch in range(first, len(self)):
                    place.batch = batch
                    run.at_boundary(self)
                    share = self._sampler.share(batch)
                    # not kept here while the job has it
                    yield run.shares.hand_out(passing, share, to_device(next(batches), run.device))
                passing.ran_to_end = True
        finally:
            run.places.end_pass(place)
        if passing.has_unweighted_stand_in and run.step() == step:
            self._warn_of_evaluation()

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
        UserError: for an iterable dataset or an empty one; neither can be shared out over ranks by index.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserError(
            f"{type(dataset).__name__} has no length and index: run.loader and run.shard need a map-style dataset"
        )
    size = len(cast(Sized, dataset))
    if size == 0:
        raise UserError(f"{type(dataset).__name__} is empty: there is nothing to load")
    return size


class Shard:
    """This rank's part of a dataset for evaluation: no sample twice, none padded; batches on the run's device."""

    def __init__(
        self,
        dataset: Dataset[Any],
        rank: int,
        world_size: int,
        device: torch.device,
        before: Callable[[], None],
        on_batch: Callable[[], None],
        shares: Shares,
        keeps_step: Callable[[], bool],
        **options: Any,
    ) -> None:
        """
        Args:
            keeps_step: whether all ranks have to make the same number of batches.
        """
        size = size_of(dataset)
        begin, end = share_of(size, rank, world_size)
        self._dataset = dataset
        self._own = end - begin
        self._most = -(-size // world_size)
        """Samples of the rank that has most."""
        self._keeps_step = keeps_step
        self._cutter = Cutter()
        self._device = device
        self._before = before
        self._on_batch = on_batch
        self._shares = shares
        options.setdefault("generator", torch.Generator())
        self._loader = data_loader(Subset(dataset, range(begin, end)), device, **options)

    def __len__(self) -> int:
        return self._batches(self._most) if self._keeps_step() else len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._before()
        batches = self._as_many_as_others() if self._keeps_step() else self._loader
        with self._shares.passing() as passing:
            for samples in batches:
                self._on_batch()
                yield self._shares.hand_out(passing, None, to_device(samples, self._device))

    def _batches(self, samples: int) -> int:
        size = self._loader.batch_size
        assert size is not None
        return samples // size if self._loader.drop_last else -(-samples // size)

    def _as_many_as_others(self) -> Iterator[Any]:
        """Yield this rank's batches, and then some of zero rows until there are as many as on the rank with most."""
        yield from self._loader
        missing = self._batches(self._most) - self._batches(self._own)
        if missing:
            samples = self._loader.collate_fn([self._dataset[0]])
            empty = self._cutter.cut(samples, self._cutter.rows(samples, 1), 0, 0)
            yield from itertools.repeat(empty, missing)
