"""Iterate over this rank's share of global batches: passes over a loader, and the boundaries at which a run may stop.

The batches come from a source (`loader_sources`), the position is kept in a place (`loader_positions`), and each batch
handed out is recorded, so that a loss can be weighted by it (`batch_weights`).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.data.batch_weights import BatchWeights
from mgpu_slurm.data.batches import GlobalBatches, ListedBatches, size_of
from mgpu_slurm.data.loader_positions import LoaderPlace, LoaderPlaces
from mgpu_slurm.data.loader_sources import Indexed, Over, Source, Streamed
from mgpu_slurm.data.nests import to_device
from mgpu_slurm.data.passes import Pass
from mgpu_slurm.data.streams import Drawn, Stream
from mgpu_slurm.rank.calls import Call


@dataclass(frozen=True)
class RunOfLoader:
    """The parts of a run that a loader uses."""

    rank: int
    world_size: int
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
    ranks = run.rank, run.world_size, seed
    if isinstance(dataset, IterableDataset):
        _check_stream(options)
    sampler, batch_sampler = options.pop("sampler", None), options.pop("batch_sampler", None)
    if batch_sampler is not None:
        if batch_size is not None or shuffle or drop_last or sampler is not None:
            raise UserError(
                "run.loader(batch_sampler=...): leave out batch_size, shuffle, drop_last and sampler, which it decides"
            )
        return _indexed(dataset, ListedBatches(batch_sampler, None, False, *ranks), run, options)
    if batch_size is None or batch_size < 1:
        raise UserError(f"batch_size={batch_size}: must be at least 1 (it is the total over all ranks)")
    if shuffle and (sampler is not None or isinstance(dataset, IterableDataset)):
        raise UserError("run.loader(shuffle=True): the order is that of the sampler or of the stream: shuffle there")
    if isinstance(dataset, IterableDataset):
        collate = options.pop("collate_fn", None) or default_collate
        stream = Stream(dataset, batch_size, drop_last, collate, *ranks)
        return Loader(Streamed(stream, run.device, run.drawn, run.sync, run.take_batch, **options), run)
    size = size_of(dataset)
    if drop_last and size < batch_size:
        raise UserError(f"drop_last leaves nothing of {size} samples with batch_size={batch_size}: lower one")
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
            raise UserError(f"run.loader({name}=...): a stream is read from its beginning in each pass: leave that out")


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
            place = place.beside()
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
        try:
            share, samples = self._source.take(batches, number)
        except Over:
            place.batch = before
            raise
        if place.batches == 1 and not place.continue_in(self._source.order):
            raise _in_other_order(self._source.name)
        return self._run.batch_weights.hand_out(passing, share, to_device(samples, self._run.device))

    def _warn_of_evaluation(self) -> None:
        """Warn, once in a run, of a loop that has counted a sample of another rank."""
        if self._run.batch_weights.has_warned:
            return
        self._run.batch_weights.has_warned = True
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
