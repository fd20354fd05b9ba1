"""Let all ranks abandon a step together when one of them runs out of memory.

Before each exchange of gradients or parameters, the ranks tell each other whether one of them has run out. So an
exchange is begun by all ranks or by none, and a rank that has run out never leaves the others waiting in one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mgpu_slurm.training.parallel.data_parallel import GradientExchange

SETTLED_AFTER = 20
"""Passes without running out of memory after which the size counts as found. Adam's state comes with the first step."""

LARGEST_COST = 0.01
"""Fraction of a pass that the messages may take from then on."""


class RanOutElsewhere(Exception):
    """Another rank has run out of memory."""


class Agreement:
    """Tells all ranks whether one of them has run out of memory."""

    def __init__(self, any_rank: Callable[[bool], bool]) -> None:
        """
        Args:
            any_rank: returns on every rank whether something is true of any rank, given whether it is true of this one.
        """
        self._any_rank = any_rank
        self._fastest = float("inf")
        """Seconds of the fastest message: the others may have waited for a slower rank."""
        self._is_on = False
        """Whether a pass is under way that all ranks can repeat."""
        self._watched, self._is_possible = 0, True
        """Number of models that check before their exchanges, and whether all could be made to."""
        self.is_quiet = False
        """Whether the ranks have stopped telling each other."""
        self.start_over()

    def start_over(self) -> None:
        """Tell each other for a while: memory has run out."""
        self._messages = 0
        self._durations: list[float] = []

    def settle(self, seconds: float) -> None:
        """Record a pass in which memory sufficed on all ranks. Every rank must call it.

        After `SETTLED_AFTER` of them the ranks stop telling each other if that takes too much time.

        Args:
            seconds: what the pass took.
        """
        if len(self._durations) == SETTLED_AFTER:
            return
        self._durations.append(seconds)
        if len(self._durations) == SETTLED_AFTER:
            cost = self._fastest * self._messages
            self.is_quiet = self._any_rank(cost > LARGEST_COST * sum(self._durations))

    def has_run_out(self, here: bool) -> bool:
        """Return whether any rank has run out of memory. Every rank must call it.

        Args:
            here: whether this rank has.
        """
        began = time.perf_counter()
        found = self._any_rank(here)
        self._fastest = min(self._fastest, time.perf_counter() - began)
        self._messages += 1
        return found

    def check(self) -> None:
        """Check before an exchange that no rank has run out of memory.

        Raises:
            RanOutElsewhere: another rank has.
        """
        if self._is_on and self.has_run_out(here=False):
            raise RanOutElsewhere

    @contextmanager
    def during_pass(self) -> Iterator[None]:
        """Check before each exchange of the watched models within the block."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def watch(self, models: Sequence[nn.Module]) -> bool:
        """Have these models check before each exchange.

        Returns:
            whether they do: not if a hook of the job exchanges gradients, or with an older torch.
        """
        if self._watched != len(models):
            self._is_possible = all(map(self._watch, models))
            self._watched = len(models)
        return self._is_possible

    def _watch(self, model: nn.Module) -> bool:
        if isinstance(model, GradientExchange):
            return model.check_before_exchange(self.check)
        parts: list[Any] = parts_of(model)
        if not all(hasattr(part, "set_custom_all_gather") and hasattr(part, "reset_iter_state") for part in parts):
            return False
        for part in parts:
            part.set_custom_all_gather(_AllGather(self.check))
            part.set_custom_reduce_scatter(_ReduceScatter(self.check))
        return True


def parts_of(model: nn.Module) -> list[Any]:
    """Return the modules of a model on which `fully_shard` was called."""
    return [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]


class _Exchange:
    """An exchange of `fully_shard`, as its `set_custom_all_gather` and `set_custom_reduce_scatter` expect it."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Exchange):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self._check()
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceScatter(_Exchange):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        self._check()
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
