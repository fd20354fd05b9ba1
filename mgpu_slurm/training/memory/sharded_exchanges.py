"""The exchanges of models under `fully_shard`: checked before they begin, and their order learned.

A rank that has run out of memory cannot continue with its model. Once it knows in which order the ranks exchange, it
goes through the rest of a pass without computing anything: see `ExchangeOrder.finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from mgpu_slurm.core import torch_versions
from mgpu_slurm.rank import torch_adapter, wrapper_adapter

LEARNED_AFTER = 4
"""Passes after which the order counts as known, if all but the first had the same order."""


class Exchange(NamedTuple):
    """An exchange without its tensors."""

    part: Any
    """The module on which `fully_shard` was called."""
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
        """Send this rank's parameters, with which the others compute, or zeros as gradients, which nobody will use."""
        if self.op is None:
            self.part.unshard()
            self.part.reshard()
            return
        sent = torch.zeros(self.sent, dtype=self.dtype, device=self.device)
        received = torch.empty(self.received, dtype=self.dtype, device=self.device)
        torch_versions.reduce_scatter_single(received, sent, self.op, self.group)


class _Order:
    """The exchanges of passes of one kind."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        """Those of the newest pass."""
        self.passes = 0
        """Number of passes since the order was looked for."""
        self.alike = 0
        """Passes in a row with these exchanges."""
        self.needed = LEARNED_AFTER
        """Number of passes that it takes; twice as many after each disappointment."""
        self.is_known = False
        """Whether on all ranks."""

    def forget(self, passes: int) -> None:
        self.is_known, self.passes, self.needed = False, passes, 2 * self.needed


class ExchangeOrder:
    """Learns in which order passes exchange, and takes part in the rest of a pass without the model.

    Passes of one kind are expected to exchange in the same order. If they have done so from the first one on, but do
    not in the very pass in which memory runs out, ranks may wait for each other until the time-out.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._orders: dict[Hashable, _Order] = {}
        self._begun: list[Exchange] = []
        """The exchanges of the pass under way."""

    def begin_pass(self) -> None:
        self._begun = []

    def is_known(self, kind: Hashable) -> bool:
        """Return whether the order of passes of this kind is known, on all ranks."""
        return kind in self._orders and self._orders[kind].is_known

    def note(self, exchange: Exchange) -> None:
        """Record that the pass under way has begun an exchange."""
        self._begun.append(exchange)

    def end_pass(self, kind: Hashable, any_rank: Callable[[bool], bool]) -> bool:
        """Learn from a pass that has exchanged to its end on all ranks. Every rank must call it.

        Returns:
            whether it has changed whether the order is known.
        """
        order = self._orders.setdefault(kind, _Order())
        order.passes += 1
        order.alike = order.alike + 1 if self._begun == order.exchanges else 1
        order.exchanges = self._begun
        if order.is_known:
            if order.alike == 1:
                # on all ranks, as all of them take part in each exchange
                order.forget(passes=1)
            return not order.is_known
        if order.passes == order.needed:
            is_of_all = all(exchange.group.size() == self._world_size for exchange in self._begun)
            order.is_known = not any_rank(order.alike < order.needed - 1 or not is_of_all)
            if not order.is_known:
                order.forget(passes=0)
        return order.is_known

    def is_as_before(self, kind: Hashable) -> bool:
        """Return whether the pass under way has begun with the exchanges of the one before."""
        return self._begun == self._orders[kind].exchanges[: len(self._begun)]

    def finish(self, kind: Hashable) -> None:
        """Take part in those exchanges of the pass under way that this rank has not begun yet."""
        for exchange in self._orders[kind].exchanges[len(self._begun) :]:
            exchange.take_part()


def parts_of(model: nn.Module) -> list[Any]:
    """Return the modules of a model on which `fully_shard` was called."""
    return [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]


def roots_of(model: nn.Module) -> list[Any]:
    """Return those of them that are in no other one."""
    parts = parts_of(model)
    within = {id(inner) for part in parts for inner in part.modules() if inner is not part}
    return [part for part in parts if id(part) not in within]


def begin_anew(root: Any) -> None:
    """Bring a sharded model into the state before a pass, whatever a failed pass or an evaluation has left: whole
    parameters, which would not be gathered again, and an order of layers, which would be gathered ahead."""
    # before its first forward pass, it is in that state, and may still become a part of a larger model
    if wrapper_adapter.is_sharded_root(root):
        root.reset_iter_state()


def has_other_exchanges(model: nn.Module) -> bool:
    """Return whether a model, which is at the beginning of a pass, also exchanges in ways that cannot be checked, such
    as between copies of its shards, or is not sharded over all ranks."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return (
        not parts_of(model)
        or not all(map(_is_sharded_over_all, trained))
        or any(map(wrapper_adapter.has_reduce_hook, parts_of(model)))
        # a part of a larger model
        or any(wrapper_adapter.is_sharded_root(root) is False for root in roots_of(model))
    )


def _is_sharded_over_all(parameter: Any) -> bool:
    if not torch_adapter.is_dtensor(parameter):
        return False
    mesh = parameter.device_mesh
    return bool(mesh.ndim == 1 and mesh.size() == dist.get_world_size() and parameter.placements[0].is_shard())


def check_before_exchange(model: nn.Module, check: Callable[[], None], note: Callable[[Exchange], None]) -> bool:
    """Call `check` before each exchange of a sharded model, and `note` when it has begun.

    Returns:
        whether they will be called: not if parts are divided in several ways, the job exchanges in its own way, or this
            torch cannot repeat a pass.
    """
    parts = parts_of(model)
    if parts and not torch_versions.can_repeat_passes():
        return False
    for part in parts:
        if not all(isinstance(each, _Checked) for each in wrapper_adapter.custom_exchanges(part)):
            return False
        try:
            part.set_custom_all_gather(_AllGather(part, check, note))
            part.set_custom_reduce_scatter(_ReduceScatter(part, check, note))
        except ValueError:
            return False
    return True


class _Checked:
    """An exchange of `fully_shard`, as its `set_custom_all_gather` and `set_custom_reduce_scatter` expect it."""

    def __init__(self, part: Any, check: Callable[[], None], note: Callable[[Exchange], None]) -> None:
        self._part = part
        self._check = check
        self._note = note

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _has_begun(self, sent: torch.Tensor, received: torch.Tensor, group: Any, op: Any = None) -> None:
        self._note(Exchange(self._part, group, sent.numel(), received.numel(), sent.dtype, sent.device, op))


class _AllGather(_Checked):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self._check()
        work = torch_versions.all_gather_single(output_tensor, input_tensor, group, async_op)
        self._has_begun(input_tensor, output_tensor, group)
        return work


class _ReduceScatter(_Checked):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        self._check()
        work = torch_versions.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)
        self._has_begun(input_tensor, output_tensor, group, op)
        return work
