"""Let all ranks abandon a step together when one of them runs out of memory.

Before each exchange of gradients or parameters, the ranks tell each other whether one of them has run out. So an
exchange is begun by all ranks or by none, and a rank that has run out never leaves the others waiting in one.

Once it is known in which order sharded models exchange, one message at the end of a pass is enough: a rank that has run
out takes part in the remaining exchanges without its model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from mgpu_slurm.data.batching.batch_cutting import MicroBatchSize
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
        self._roots: list[Any] = []
        """The models, if all exchanges are those of models that are sharded over all ranks."""
        self._order = ExchangeOrder(0)
        self._kinds: dict[Hashable, int] = {}
        self._kind = 0
        """The number of the kind of the pass under way."""
        self.is_quiet = False
        """Whether the ranks have stopped telling each other."""
        self.start_over()

    def start_over(self) -> None:
        """Tell each other for a while, and judge anew what that costs."""
        self._began: float | None = None
        """When the first pass ended, in seconds."""
        self._passes = self._messages = 0
        """Since then."""

    def settle(self, at: float) -> None:
        """Record a pass in which memory sufficed on all ranks. Every rank must call it.

        After `SETTLED_AFTER` of them the ranks stop telling each other if that takes too much time.

        Args:
            at: when it ended, in seconds. A GPU computes later than it is told to, so that the time between two passes
                counts, not that of a pass.
        """
        if self._roots and self._order.end_pass(self._kind_of_pass, self._any_rank):
            # what the messages before took says nothing of those to come
            self.start_over()
        if self._began is None:
            self._began, self._messages = at, 0
            return
        self._passes += 1
        if self._passes == SETTLED_AFTER:
            cost = self._fastest * self._messages
            self.is_quiet = self._any_rank(cost > LARGEST_COST * (at - self._began))

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
        if self._is_on and not self._is_order_known and self.has_run_out(here=False):
            raise RanOutElsewhere

    @property
    def _kind_of_pass(self) -> Hashable:
        return self._kind, self._size.parts

    @property
    def _is_order_known(self) -> bool:
        return self._order.is_known(self._kind_of_pass)

    def _note(self, exchange: Exchange) -> None:
        if self._is_on:
            self._order.note(exchange)

    @contextmanager
    def during_pass(self, kind: Hashable) -> Iterator[None]:
        """Check before each exchange of the watched models within the block.

        Args:
            kind: what the exchanges depend on, besides the number of micro-batches.
        """
        for root in self._roots:
            sharded_exchanges.begin_anew(root)
        self._kind = self._kinds.setdefault(kind, len(self._kinds))
        self._order.begin_pass()
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    @property
    def can_leave(self) -> bool:
        """Whether this rank can leave a pass in which it has run out of memory: not if the order of exchanges was
        known, but is another one now."""
        return not self._is_order_known or self._order.is_as_before(self._kind_of_pass)

    def leave_pass(self) -> None:
        """Let the other ranks come to the end of a pass in which this one has run out of memory."""
        self._is_on = False
        # otherwise they find out before their next exchange
        if self._is_order_known:
            for root in self._roots:
                for parameter in root.parameters():
                    parameter.grad = None
                sharded_exchanges.begin_anew(root)
            self._order.finish(self._kind_of_pass)

    def watch(self, models: Sequence[nn.Module]) -> bool:
        """Have these models check before each exchange.

        Returns:
            whether they do: not if a hook of the job exchanges gradients, or layers exchange anything by themselves.
        """
        if self._watched != len(models):
            self._watched = len(models)
            self._is_possible = not any(map(_has_synced_layers, models)) and all(map(self._watch, models))
            self._roots = self._learned_roots(models) if self._is_possible else []
            self._order = ExchangeOrder(dist.get_world_size() if self._roots else 0)
        return self._is_possible

    @staticmethod
    def _learned_roots(models: Sequence[nn.Module]) -> list[Any]:
        """Return the sharded models if there are no others, and the order of their exchanges can be learned."""
        roots = [root for model in models for root in sharded_exchanges.roots_of(model)]
        for root in roots:
            sharded_exchanges.begin_anew(root)
        return [] if any(map(sharded_exchanges.has_other_exchanges, models)) else roots

    def _watch(self, model: nn.Module) -> bool:
        if isinstance(model, GradientExchange):
            return model.check_before_exchange(self.check)
        return sharded_exchanges.check_before_exchange(model, self.check, self._note)


def _has_synced_layers(model: nn.Module) -> bool:
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
