"""Seed the random numbers that a dataset and `collate_fn` draw, sample by sample.

What a sample draws depends on the seed of the run, the epoch, and its place in the epoch: not on the number of workers
or ranks, on what was fetched ahead, or on where a run was interrupted. Python's, NumPy's and torch's generators on the
CPU are seeded; a generator that the dataset owns is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch.utils.data import Dataset, StackDataset, Subset, TensorDataset, default_collate, get_worker_info

from mgpu_slurm.data.randomness import kept, mixed, seed_cpu

_64_BITS = 2**64 - 1


class Part(NamedTuple):
    """A rank's part of a batch."""

    indices: Sequence[int]
    places: Sequence[int]
    """The place of each sample in the global batch, which decides with `seed` what is drawn for it."""
    seed: int
    """The same on all ranks, and different for each batch of a run."""


class SeededReader(Dataset[Any]):
    """Reads and collates parts of batches."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self._collate = collate
        self._reads_at_once = _reads_at_once(dataset)
        self._draws_nothing = _draws_nothing(dataset) and collate is default_collate

    def __getitem__(self, part: Part) -> Any:
        if self._draws_nothing:
            return self._collate([self.dataset[index] for index in part.indices])
        with apart_from_job():
            samples = self._samples(part)
            seed_collate(part.seed, part.places[0])
            return self._collate(samples)

    def _samples(self, part: Part) -> list[Any]:
        if self._reads_at_once:
            _seed(part.seed, part.places[0])
            samples: list[Any] = self.dataset.__getitems__(part.indices)  # type: ignore[attr-defined]
            return samples
        samples = []
        for index, place in zip(part.indices, part.places, strict=True):
            _seed(part.seed, place)
            samples.append(self.dataset[index])
        return samples


def apart_from_job() -> AbstractContextManager[None]:
    """Return a context that keeps the draws within it from the job, whose generators are those of this process unless
    it is a loader's worker."""
    return kept() if get_worker_info() is None else nullcontext()


def seed_collate(seed: int, first_place: int) -> None:
    """Seed the generators for `collate_fn`.

    Args:
        seed: that of the batch.
        first_place: the place of the rank's first sample in the global batch.
    """
    _seed(seed, -1 - first_place)


def _seed(seed: int, place: int) -> None:
    seed_cpu(_scrambled(mixed(seed, place)))


def _scrambled(number: int) -> int:
    """Return 64 bits of which each depends on all bits of a number: generators keep 32 of them, and start similarly
    from similar seeds. This is the output function of SplitMix64."""
    number = (number + 0x9E3779B97F4A7C15) & _64_BITS
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return number ^ (number >> 31)


def _reads_at_once(dataset: Any) -> bool:
    """Return whether a dataset reads several samples in one call, so that they cannot be seeded one by one."""
    # these only forward the call
    if type(dataset) is Subset:
        return _reads_at_once(dataset.dataset)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return any(map(_reads_at_once, parts.values() if isinstance(parts, dict) else parts))
    return callable(getattr(dataset, "__getitems__", None))


def _draws_nothing(dataset: Any) -> bool:
    """Return whether a dataset of tensors draws no numbers: seeding would take longer than reading them."""
    return _draws_nothing(dataset.dataset) if type(dataset) is Subset else type(dataset) is TensorDataset
