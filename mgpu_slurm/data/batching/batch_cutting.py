"""Cut a batch between its samples: into micro-batches, or down to zero rows.

Nothing declares which dimension or list of a nest runs over the samples. So first a plan is made, which states for each
part of the batch whether it is cut; then the batch is cut by it, or refused (see `Cutter`). `Accumulation` makes the
same number of micro-batches on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.data.batching.batch_weights import BatchWeights
from mgpu_slurm.data.batching.batches import Share
from mgpu_slurm.data.batching.nests import ARRAYS, CONSTANTS, children_of, leaves_of, rebuilt

_FIX = "stack the samples, or give the fields by name in a dictionary"


class _Cut(Enum):
    """How a part of a batch is cut."""

    NOT = "the same for all samples"
    ROWS = "an entry for each sample"
    SAMPLES = "a list of samples, each a tensor or a container"


class _Fields(NamedTuple):
    """A container whose children are cut."""

    children: list[_Plan]
    is_unclear: bool
    """Whether it may also be a list of samples."""


_Plan: TypeAlias = "_Cut | _Fields"


class _Unfit(Exception):
    """A batch does not have that many samples, or cannot be cut; the message states why."""


class Cutter:
    """Cuts batches between samples.

    A list may hold samples (images of different sizes, texts) or fields (images and labels). Lengths and first
    dimensions show which, unless a list has as many entries as the batch has samples, and each entry as many rows.
    Then the rest of the batch decides, or what earlier batches had in that place.
    """

    def __init__(self) -> None:
        self._holds_samples: dict[tuple[int, ...], bool] = {}
        """Whether lists hold samples, if that was certain, by their place in the nest: child indices at each level."""

    def rows(self, samples: Any, expected: int | None = None) -> int:
        """Return the number of samples in a batch.

        Args:
            expected: number requested by its loader; a collate function may drop some.

        Raises:
            UserError: the batch cannot be cut between samples.
        """
        problem = "nothing in it has an entry for each sample"
        for rows in [expected or 0, *_possible_rows(samples)]:
            try:
                plan = self._plan(samples, rows) if rows else _Cut.NOT
            except _Unfit as error:
                problem = str(error)
                continue
            if isinstance(plan, _Fields) and rows != expected and _may_be_samples(samples):
                problem = f"a list in it has {len(samples)} entries, which may be samples or fields: {_FIX}"
                break
            if plan is not _Cut.NOT:
                return rows
        raise UserError(f"a batch of type {type(samples).__name__} cannot be split between samples: {problem}")

    def cut(self, samples: Any, rows: int, begin: int, end: int) -> Any:
        """Return the samples from `begin` to `end` of a batch of `rows` samples, as returned by `rows`."""
        return _cut(samples, self._plan(samples, rows), slice(begin, end))

    def split(self, samples: Any, rows: int, parts: int) -> list[tuple[Any, float]]:
        """Return `parts` micro-batches, whose sizes differ by at most one, each with its fraction of the samples. If
        there are fewer samples than parts, some are a single sample whose fraction is 0."""
        plan = self._plan(samples, rows)
        edges = [rows * part // parts for part in range(parts + 1)]
        return [
            (_cut(samples, plan, slice(begin, max(end, begin + 1))), (end - begin) / rows)
            for begin, end in itertools.pairwise(edges)
        ]

    def _plan(self, samples: Any, rows: int) -> _Plan:
        plan = _plan(samples, rows)
        return self._cleared(plan, (), rows, _holds_samples(plan), holds_fields=not _may_be_samples(samples))

    def _cleared(
        self, plan: _Plan, place: tuple[int, ...], rows: int, is_transposed: bool, holds_fields: bool = False
    ) -> _Plan:
        """Resolve unclear containers of a plan.

        Args:
            is_transposed: whether the batch has lists of samples; its collate function then makes them of all fields.
            holds_fields: whether this is the whole batch, which counts as a list of fields if nothing else decides.
        """
        if not isinstance(plan, _Fields):
            if plan is _Cut.SAMPLES:
                self._holds_samples[place] = True
            return plan
        if not plan.is_unclear:
            self._holds_samples[place] = False
        elif self._holds_samples.get(place, is_transposed):
            return _Cut.SAMPLES
        elif not holds_fields and place not in self._holds_samples:
            raise _Unfit(
                f"a list in it has {rows} entries with {rows} rows each, which may be samples or fields: {_FIX}"
            )
        children = [self._cleared(child, (*place, i), rows, is_transposed) for i, child in enumerate(plan.children)]
        return _Fields(children, is_unclear=False)


def _plan(part: Any, rows: int) -> _Plan:
    """Return the plan for a part of a batch.

    Raises:
        _Unfit: the part does not have that many samples, or is of a type that cannot be cut.
    """
    if isinstance(part, CONSTANTS):
        return _Cut.NOT
    if isinstance(part, torch.Tensor) and (part.is_nested or part.layout is not torch.strided):
        raise _Unfit(f"a {'nested' if part.is_nested else 'sparse'} tensor has no rows to cut: make it dense")
    if isinstance(part, ARRAYS):
        if part.ndim and part.shape[0] != rows:
            raise _Unfit(f"{type(part).__name__} of shape {[*part.shape]} in a batch of {rows} samples")
        return _Cut.ROWS if part.ndim else _Cut.NOT
    children = children_of(part)
    if children is None or isinstance(part, PackedSequence):
        raise _Unfit(f"{type(part).__name__} is not a tensor, array, tuple, list, mapping or dataclass")
    has_as_many = type(part) in (tuple, list) and len(children) == rows
    may_hold_samples = has_as_many and len({*map(_kind, children)}) == 1
    try:
        plans = [_plan(child, rows) for child in children]
    except _Unfit:
        if may_hold_samples:
            return _Cut.SAMPLES
        raise
    if all(plan is _Cut.NOT for plan in plans):
        return _Cut.ROWS if has_as_many else _Cut.NOT
    return _Fields(plans, is_unclear=may_hold_samples)


def _kind(part: Any) -> tuple[object, ...]:
    """Return the properties that a field has in common in all samples."""
    return type(part), *((part.ndim, part.dtype) if isinstance(part, ARRAYS) else ())


def _holds_samples(plan: _Plan) -> bool:
    return any(map(_holds_samples, plan.children)) if isinstance(plan, _Fields) else plan is _Cut.SAMPLES


def _possible_rows(samples: Any) -> Iterator[int]:
    """Yield the numbers of samples that a batch may have, the likeliest first."""
    if isinstance(samples, ARRAYS) and samples.ndim:
        # a nested tensor has a size, but no shape
        yield samples.size(0) if isinstance(samples, torch.Tensor) else len(samples)
    children = children_of(samples)
    if type(samples) is list and children and all(map(_is_image, children)):
        yield len(samples)
    for child in children or ():
        if type(child) is tuple and child and all(map(_is_image, child)):
            yield len(child)
        yield from _possible_rows(child)
        if type(child) in (tuple, list):
            yield len(child)
    # a tuple holds fields, unless it is a field itself
    if type(samples) is list:
        yield len(samples)


def _may_be_samples(batch: Any) -> bool:
    """Return whether a batch is a list that may hold samples as well as fields: images, or several tuples, mappings or
    dataclasses of the same form that contain tensors."""
    if type(batch) is not list or not batch:
        return False
    if all(map(_is_image, batch)):
        return True
    if len(batch) == 1:
        # as NVIDIA DALI returns the fields for each GPU
        return False
    has_rows = any(isinstance(leaf, ARRAYS) and leaf.ndim for leaf in leaves_of(batch))
    return has_rows and len(forms := {*map(_form, batch)}) == 1 and None not in forms


def _form(part: Any) -> tuple[object, ...] | None:
    """Return the form that containers share if each may be a sample; None for a tensor, a list or anything else."""
    children = children_of(part)
    if children is None or type(part) is list:
        return None
    return type(part), *(part if isinstance(part, Mapping) else (len(children),))


def _is_image(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.ndim == 3 and part.shape[0] in (1, 3, 4)


def _cut(part: Any, plan: _Plan, which: slice) -> Any:
    if isinstance(plan, _Fields):
        children = children_of(part)
        assert children is not None
        return rebuilt(part, [_cut(child, of, which) for child, of in zip(children, plan.children, strict=True)])
    return part if plan is _Cut.NOT else part[which]


Batch = TypeVar("Batch")


@dataclass
class MicroBatchSize:
    """How many samples each rank computes at once."""

    limit: int | None = None
    """As many as fit into memory; None if that is not known."""
    current: int = 0
    """The largest number on any rank in the step under way; 0 if its batch is not split by this package."""
    parts: int = 1
    """Number of micro-batches of the newest batch that was split."""


class Accumulation:
    """Splits one rank's batches."""

    def __init__(
        self,
        batch_weights: BatchWeights,
        data_ranks: int,
        size: MicroBatchSize,
        without_exchange: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """
        Args:
            without_exchange: returns a context in which models keep their gradients to themselves: all micro-batches
                but the last.
        """
        self._batch_weights = batch_weights
        self._data_ranks = data_ranks
        self._size = size
        self._without_exchange = without_exchange
        self._cutter = Cutter()

    def micro_batches(self, batch: Batch, parts: int) -> Iterator[Batch]:
        """Yield micro-batches, each weighted by its share of the samples."""
        with closing(self.with_fractions(batch, parts)) as pieces:
            for piece, _ in pieces:
                yield piece

    def with_fractions(self, batch: Batch, parts: int) -> Generator[tuple[Batch, float], None, None]:
        """Yield micro-batches, each with its fraction of this rank's samples; more than `parts` if fewer samples fit
        into memory at once."""
        with self._batch_weights.splitting(batch) as split:
            rows = self._rows(batch, split.shares)
            # the others' shares may be unknown
            largest = max(map(self._largest_part, split.shares), default=rows)
            if self._size.limit is not None:
                parts = max(parts, -(-largest // self._size.limit))
            parts = self._common(parts, rows, split.shares)
            self._size.current, self._size.parts = -(-largest // parts), parts
            pieces = self._cutter.split(batch, rows, parts)
            have_losses = set()
            for number, (piece, split.part) in enumerate(pieces, 1):
                split.is_at_last = number == len(pieces)
                with nullcontext() if split.is_at_last else self._without_exchange():
                    uses, losses = self._batch_weights.uses, self._batch_weights.losses
                    yield piece, split.part
                    self._batch_weights.check_innermost(split)
                    if uses == self._batch_weights.uses and torch.is_grad_enabled() and not split.is_at_last:
                        raise UserError(
                            "run.accumulate: a micro-batch was fetched before the previous one was used: iterate over"
                            " it directly, not over a list of it; to skip a micro-batch, multiply its loss by 0"
                        )
                    have_losses.add(self._batch_weights.losses > losses)
                    if len(have_losses) > 1:
                        raise UserError(
                            "run.accumulate: some micro-batches have no run.backward, but ranks exchange gradients once"
                            " for all of them: to skip a micro-batch, multiply its loss by 0"
                        )

    def _rows(self, batch: object, shares: set[Share]) -> int:
        counts = {max(share.count, 1) for share in shares}
        try:
            return self._cutter.rows(batch, counts.pop() if len(counts) == 1 else None)
        except UserError as error:
            raise UserError(f"run.accumulate: {error}") from None

    def _common(self, parts: int, rows: int, shares: set[Share]) -> int:
        """Return the common number of parts of all ranks: a sharded model exchanges its weights in each."""
        if self._data_ranks == 1:
            return min(parts, rows)
        if not shares:
            # the numbers of samples on the other ranks are unknown
            return parts
        return min(parts, *map(self._largest_part, shares))

    def _largest_part(self, share: Share) -> int:
        """Return the largest number of samples that a rank has of a global batch."""
        return -(-share.total // self._data_ranks)
