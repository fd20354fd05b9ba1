"""Let all ranks abandon a step together when one of them runs out of memory.

Before each exchange of gradients or parameters, the ranks tell each other whether one of them has run out. So an
exchange is begun by all ranks or by none, and a rank that has run out never leaves the others waiting in one.

Once it is known in which order sharded models exchange, one message at the end of a pass is enough: a rank that has run
out takes part in the remaining exchanges without its model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from mgpu_slurm.data.batch_cutting import MicroBatchSize
from mgpu_slurm.training.memory import sharded_exchanges
from mgpu_slurm.training.memory.sharded_exchanges import Exchange, ExchangeOrder
from mgpu_slurm.training.parallel.data_parallel import GradientExchange

SETTLED_AFTER = 20
"""Passes without running out of memory after which the size counts as found. Adam's state comes with the first step."""

LARGEST_COST = 0.01
"""Fraction of a pass that the messages may take from then on."""


class RanOutElsewhere(Exception):
    """Another rank has run out of memory."""


class Agreement:
    """Tells all ranks whether one of them has run out of memory."""

    def __init__(self, any_rank: Callable[[bool], bool], size: MicroBatchSize) -> None:
        """
        Args:
            any_rank: returns on every rank whether something is true of any rank, given whether it is true of this one.
        """
        self._any_rank = any_rank
        self._size = size
        self._fastest = float("inf")
        """Seconds of the fastest message: the others may have waited for a slower rank."""
        self._is_on = False
        """Whether a pass is under way that all ranks can repeat."""
        self._watched, self._is_possible = 0, True
        """Number of models that check before their exchanges, and whether all could be made to."""
        self._learns = False
        """Whether all exchanges are those of sharded models without copies."""
        self._sharded: list[Any] = []
        """What `fully_shard` was called on."""
        self._order = ExchangeOrder()
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
        if self._learns and self._order.end_pass(self._size.parts, self._any_rank):
            # what the messages before took says nothing of those to come
            self.start_over()
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

    def check(self, exchange: Exchange | None = None) -> None:
        """Check before an exchange that no rank has run out of memory.

        Args:
            exchange: None if it is not that of a sharded model.

        Raises:
            RanOutElsewhere: another rank has.
        """
        if not self._is_on:
            return
        if not self._order.is_known(self._size.parts) and self.has_run_out(here=False):
            raise RanOutElsewhere
        if exchange is not None:
            self._order.note(exchange)

    @contextmanager
    def during_pass(self) -> Iterator[None]:
        """Check before each exchange of the watched models within the block."""
        if self._learns:
            # an evaluation leaves whole parameters, which would not be gathered
            for part in self._sharded:
                part.reshard()
        self._order.begin_pass()
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def leave_pass(self) -> bool:
        """Let the other ranks come to the end of a pass in which this one has run out of memory.

        Returns:
            whether they will: not if the exchanges of this pass differ from those of earlier ones.
        """
        parts = self._size.parts
        if not self._order.is_known(parts):
            # they will find out before their next exchange
            return True
        if not self._order.is_as_before(parts):
            return False
        self._order.finish(parts)
        return True

    def watch(self, models: Sequence[nn.Module]) -> bool:
        """Have these models check before each exchange.

        Returns:
            whether they do: not if a hook of the job exchanges gradients, or with an older torch.
        """
        if self._watched != len(models):
            self._is_possible = all(map(self._watch, models))
            self._watched = len(models)
            self._sharded = [part for model in models for part in sharded_exchanges.parts_of(model)]
            self._learns = self._is_possible and not any(map(sharded_exchanges.has_other_exchanges, models))
            self._order = ExchangeOrder()
        return self._is_possible

    def _watch(self, model: nn.Module) -> bool:
        if isinstance(model, GradientExchange):
            return model.check_before_exchange(self.check)
        return sharded_exchanges.check_before_exchange(model, self.check)
