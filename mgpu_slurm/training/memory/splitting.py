"""Compute the gradients of a batch in as few parts as fit into memory."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Hashable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mgpu_slurm.core import log_lines
from mgpu_slurm.data import randomness
from mgpu_slurm.data.batching.batch_cutting import Accumulation
from mgpu_slurm.data.randomness import RandomState
from mgpu_slurm.rank import torch_adapter, wrapper_adapter
from mgpu_slurm.request.parallelism import Layout
from mgpu_slurm.training.memory.agreement import Agreement, RanOutElsewhere
from mgpu_slurm.training.memory.found_size import FoundSize, is_memory_error
from mgpu_slurm.training.memory.sharded_exchanges import begin_anew, parts_of, roots_of
from mgpu_slurm.training.wrap import Models

LossOf = Callable[..., Tensor]
"""Returns the mean loss of a part of a batch."""


@dataclass
class _Before:
    """What a failed pass changes, as it was before."""

    random: RandomState
    buffers: list[Tensor]


class Splitter:
    """Computes a batch in parts of a size that fits, and all of it again in smaller ones if memory runs out."""

    def __init__(
        self,
        models: Models,
        accumulation: Accumulation,
        agreement: Agreement,
        layout: Layout,
        device: torch.device,
        found: FoundSize,
        report: Callable[[BaseException], None],
        is_alone: bool,
    ) -> None:
        """
        Args:
            found: halves the parts.
            report: called with an error after which no smaller parts can be tried, while all is still held.
            is_alone: whether the run has one rank.
        """
        self._models = models
        self._accumulation = accumulation
        self._agreement = agreement
        self._layout = layout
        self._device = device
        self._found = found
        self._report = report
        self._is_alone = is_alone

    def gradients(
        self, loss_of: LossOf, batch: tuple[Any, ...], backward: Callable[[Tensor], None], in_step: bool
    ) -> Tensor:
        """See `Run.gradients`.

        Args:
            backward: backpropagates the loss of a part.
            in_step: whether parameters have gradients of this step already, which a failed pass would spoil.
        """
        # those of a `backward` that the run does not know of, too
        in_step = in_step or any(parameter.grad is not None for parameter in self._models.trained())
        recovers = not in_step and self._can_recover()
        agrees = recovers and not self._is_alone
        while True:
            before = self._remember() if recovers else None
            with self._agreement.during_pass(self._kind_of(loss_of)) if agrees else nullcontext():
                loss = self._attempt(loss_of, batch, backward, recovers)
            if loss is not None:
                if agrees:
                    self._agreement.settle(time.perf_counter())
                return loss
            assert before is not None
            self._undo(before)
            self._found.halve()
            self._agreement.start_over()

    def _can_recover(self) -> bool:
        """Return whether all ranks can repeat a step in which one of them runs out of memory."""
        if self._is_alone:
            return True
        if self._agreement.is_quiet:
            return False
        if self._layout.tensor > 1 or self._layout.pipeline > 1:
            # their exchanges, in the middle of layers, cannot be checked
            return False
        return self._agreement.watch([*self._models.exchanges, *self._models.sharded])

    def _attempt(
        self, loss_of: LossOf, batch: tuple[Any, ...], backward: Callable[[Tensor], None], recovers: bool
    ) -> Tensor | None:
        """Return the mean loss of the batch; None if a rank has run out of memory."""
        try:
            loss = self._pass(loss_of, batch, backward)
        except RanOutElsewhere as error:
            # what its frames hold is what there is no room for
            traceback.clear_frames(error.__traceback__)
            return None
        except Exception as error:
            if not recovers or not is_memory_error(error):
                raise
            can_leave = self._is_alone or self._agreement.can_leave
            if self._found.is_last_chance or not can_leave:
                self._report(error)
            if not can_leave:
                raise
            traceback.clear_frames(error.__traceback__)
            first_line = str(error).partition("\n")[0]
            log_lines.say(f"out of memory on {self._device}: {first_line}")
            if not self._is_alone:
                self._free()
                self._agreement.leave_pass()
            loss = None
        is_out = loss is None
        if recovers and not self._is_alone:
            is_out = self._agreement.has_run_out(here=is_out)
        return None if is_out else loss

    def _pass(self, loss_of: LossOf, batch: tuple[Any, ...], backward: Callable[[Tensor], None]) -> Tensor:
        total: Tensor | None = None
        with closing(self._accumulation.with_fractions(batch, 1)) as pieces:
            for piece, fraction in pieces:
                if total is None:
                    # after the batch was split: halving that has to be possible if this does not fit
                    total = torch.zeros((), device=self._device)
                loss = loss_of(*piece)
                total += loss.detach() * fraction
                backward(loss)
        assert total is not None
        return total

    def _kind_of(self, loss_of: LossOf) -> Hashable:
        """Return what the exchanges of a pass depend on: the job's function, and which parameters it trains."""
        trains = tuple(parameter.requires_grad for model in self._models.held() for parameter in model.parameters())
        return getattr(loss_of, "__code__", None), trains

    def _free(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _buffers(self) -> list[Tensor]:
        return [buffer for model in self._models.held() for buffer in model.buffers()]

    def _remember(self) -> _Before:
        return _Before(randomness.random_state(self._device), [each.detach().clone() for each in self._buffers()])

    @torch.no_grad()
    def _undo(self, before: _Before) -> None:
        """Restore the state before a failed pass, and free its memory."""
        for model in self._models.sharded:
            _reset(model)
        for exchange in self._models.exchanges:
            exchange.renew()
        for parameter in self._models.trained():
            parameter.grad = None
        self._free()
        randomness.set_random_state(before.random, self._device)
        if before.buffers:
            torch_adapter.copy_all(self._buffers(), before.buffers)


def _reset(model: nn.Module) -> None:
    """End the failed pass of a sharded model; all ranks do so together."""
    for root in roots_of(model):
        # memory may have run out before the first forward pass
        wrapper_adapter.begin_sharded(root)
        begin_anew(root)
    # it leaves gradients that were not exchanged yet on the whole parameters
    for part in parts_of(model):
        part.unshard()
        for parameter in part.parameters():
            parameter.grad = None
        part.reshard()
