"""Split a rank's batch into micro-batches, the same number on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.data.batch_cutting import Cutter
from mgpu_slurm.data.batch_weights import BatchWeights
from mgpu_slurm.data.batches import Share

Batch = TypeVar("Batch")


class Accumulation:
    """Splits one rank's batches."""

    def __init__(self, batch_weights: BatchWeights, world_size: int, models: Sequence[DistributedDataParallel]) -> None:
        """
        Args:
            models: models that exchange gradients only with the last micro-batch.
        """
        self._batch_weights = batch_weights
        self._world_size = world_size
        self._models = models
        self._cutter = Cutter()

    def micro_batches(self, batch: Batch, parts: int) -> Iterator[Batch]:
        """Yield micro-batches, each weighted by its share of the samples."""
        with self._batch_weights.splitting(batch) as split:
            shares = {each.share for each in split.handed if each.share is not None}
            rows = self._rows(batch, shares)
            pieces = self._cutter.split(batch, rows, self._common(parts, rows, shares))
            have_losses = set()
            for number, (piece, split.part) in enumerate(pieces, 1):
                split.is_at_last = number == len(pieces)
                with ExitStack() as stack:
                    if not split.is_at_last:
                        for model in self._models:
                            stack.enter_context(model.no_sync())
                    uses, losses = self._batch_weights.uses, self._batch_weights.losses
                    yield piece
                    self._batch_weights.check_innermost(split)
                    if uses == self._batch_weights.uses and torch.is_grad_enabled() and not split.is_at_last:
                        raise UserError(
                            "run.accumulate: a micro-batch was fetched before the one before it was used: iterate over"
                            " it directly, not over a list of it, and multiply the loss of one that you leave out by 0"
                        )
                    have_losses.add(self._batch_weights.losses > losses)
                    if len(have_losses) > 1:
                        raise UserError(
                            "run.accumulate: a micro-batch without run.backward among others: ranks exchange their"
                            " gradients with the last one, and each has samples of its own: to leave one out, multiply"
                            " its loss by 0"
                        )

    def _rows(self, batch: object, shares: set[Share]) -> int:
        counts = {max(share.count, 1) for share in shares}
        try:
            return self._cutter.rows(batch, counts.pop() if len(counts) == 1 else None)
        except UserError as error:
            raise UserError(f"run.accumulate: {error}") from None

    def _common(self, parts: int, rows: int, shares: set[Share]) -> int:
        """Return the common number of parts of all ranks: a sharded model exchanges its weights in each."""
        if self._world_size == 1:
            return min(parts, rows)
        if not shares:
            # the numbers of samples on the other ranks are unknown
            return parts
        return min(parts, *(-(-share.total // self._world_size) for share in shares))
