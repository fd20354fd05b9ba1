"""The exchanges of models under `fully_shard`: checked before they begin, and their order learned.

A rank that has run out of memory cannot go on with its model. Once it knows in which order the ranks exchange, it goes
through the rest of a pass without the model: see `ExchangeOrder.finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from mgpu_slurm.rank import torch_adapter

LEARNED_AFTER = 4
"""Passes after which the order counts as known, if all but the first had the same."""


class Exchange(NamedTuple):
    """An exchange without its tensors."""

    of: Any
    """What identifies the part of the model."""
    group: Any
    sent: int
    """Number of elements."""
    received: int
    """Number of elements."""
    dtype: torch.dtype
    device: torch.device
    op: Any
    """How gradients are reduced; None if parameters are gathered."""

    def take_part(self) -> None:
        """Exchange zeros."""
        sent = torch.zeros(self.sent, dtype=self.dtype, device=self.device)
        received = torch.empty(self.received, dtype=self.dtype, device=self.device)
        if self.op is None:
            torch_adapter.all_gather(received, sent, self.group)
        else:
            torch_adapter.reduce_scatter(received, sent, self.op, self.group)


class _Order:
    """The exchanges of passes over the same number of micro-batches."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        """Those of the newest pass."""
        self.passes = 0
        self.alike = 0
        """Passes in a row with these exchanges."""
        self.is_known = False


class ExchangeOrder:
    """Learns in which order passes exchange, and takes part in the rest of a pass without the model.

    A model that exchanges in the same order in `LEARNED_AFTER` passes, but in another one in the very pass in which
    memory runs out, would leave ranks waiting for each other until the time-out.
    """

    def __init__(self) -> None:
        self._orders: dict[int, _Order] = {}
        self._begun: list[Exchange] = []
        """The exchanges of the pass under way."""

    def begin_pass(self) -> None:
        self._begun = []

    def is_known(self, parts: int) -> bool:
        """Return whether the order of a pass over this number of micro-batches is known, on all ranks."""
        return parts in self._orders and self._orders[parts].is_known

    def note(self, exchange: Exchange) -> None:
        """Record that the pass under way begins an exchange."""
        self._begun.append(exchange)

    def end_pass(self, parts: int, any_rank: Callable[[bool], bool]) -> bool:
        """Learn from a pass that has exchanged to its end on all ranks. Every rank must call it.

        Args:
            parts: the number of its micro-batches.

        Returns:
            whether the order has just become known.
        """
        order = self._orders.setdefault(parts, _Order())
        order.passes += 1
        order.alike = order.alike + 1 if self._begun == order.exchanges else 1
        order.exchanges = self._begun
        if order.passes == LEARNED_AFTER:
            order.is_known = not any_rank(order.alike < LEARNED_AFTER - 1)
            return order.is_known
        if order.alike == 1:
            # it changes on all ranks, as they exchange with each other
            order.is_known = False
        return False

    def is_as_before(self, parts: int) -> bool:
        """Return whether the pass under way has begun with the exchanges of the one before."""
        return self._begun == self._orders[parts].exchanges[: len(self._begun)]

    def finish(self, parts: int) -> None:
        """Take part in those exchanges of the pass under way that this rank has not begun yet."""
        for exchange in self._orders[parts].exchanges[len(self._begun) :]:
            exchange.take_part()


def parts_of(model: nn.Module) -> list[Any]:
    """Return the modules of a model on which `fully_shard` was called."""
    return [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]


def has_other_exchanges(model: nn.Module) -> bool:
    """Return whether a model also exchanges in ways that cannot be checked, such as between copies of its shards."""
    meshes = [each.device_mesh for each in model.parameters() if hasattr(each, "device_mesh")]
    return not meshes or any(mesh.ndim > 1 for mesh in meshes)


def check_before_exchange(model: nn.Module, check: Callable[[Exchange], None]) -> bool:
    """Call a function before each exchange of a sharded model.

    Returns:
        whether it will be called: not with an older torch.
    """
    parts = parts_of(model)
    if not all(hasattr(part, "set_custom_all_gather") and hasattr(part, "reset_iter_state") for part in parts):
        return False
    for part in parts:
        part.set_custom_all_gather(_AllGather(check))
        part.set_custom_reduce_scatter(_ReduceScatter(check))
    return True


class _Checked:
    """An exchange of `fully_shard`, as its `set_custom_all_gather` and `set_custom_reduce_scatter` expect it."""

    def __init__(self, check: Callable[[Exchange], None]) -> None:
        self._check = check

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _begin(self, sent: torch.Tensor, received: torch.Tensor, group: Any, op: Any = None) -> None:
        self._check(Exchange(self, group, sent.numel(), received.numel(), sent.dtype, sent.device, op))


class _AllGather(_Checked):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self._begin(input_tensor, output_tensor, group)
        return torch_adapter.all_gather(output_tensor, input_tensor, group, async_op)


class _ReduceScatter(_Checked):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        self._begin(input_tensor, output_tensor, group, op)
        return torch_adapter.reduce_scatter(output_tensor, input_tensor, op, group, async_op)
