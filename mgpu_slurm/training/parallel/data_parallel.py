"""Copy a model: to every rank, with DistributedDataParallel, or to all GPUs of one rank, with DataParallel.

The model stays what it is: calling it computes with the copies, through the wrapper, which is not seen.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_slurm.core.formatting import human_size
from mgpu_slurm.rank.wrapper_adapter import (
    has_exchange_hook,
    refuse_unfinished_exchange,
    renew_exchange,
    stop_buffer_sync,
)


class Copied(nn.Module):
    """A model with copies. Calling it calls the wrapper that computes with all of them, which calls it in turn.

    A model gets this base class when it is wrapped, so it keeps its attributes, its methods and the names of its
    parameters, as with `fully_shard`. A copy, such as for a moving average, has the original class again.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # a class that copies itself may leave it out
        link = vars(self).get(_WRAPPER)
        wrapper = None if link is None else link.module
        if wrapper is None or wrapper.is_computing:
            return super().__call__(*args, **kwargs)
        return wrapper(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle refuses what later protocols return for an object of another class
        return self._as_it_was().__reduce_ex__(1)

    def _as_it_was(self) -> Any:
        """Return an object of the original class that shares all attributes."""
        original: Any = next(kind for kind in type(self).__mro__[1:] if not issubclass(kind, Copied))
        same = object.__new__(original)
        vars(same).update({name: value for name, value in vars(self).items() if name != _WRAPPER})
        return same

    def _copied_by_itself(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._as_it_was(), memo)


class Replicated(Copied):
    """A model with copies on other ranks, and what jobs call on a model in DDP."""

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """See `DistributedDataParallel.register_comm_hook`."""
        vars(self)[_WRAPPER].module.register_comm_hook(state, hook)

    def no_sync(self) -> AbstractContextManager[None]:
        """See `DistributedDataParallel.no_sync`."""
        found: AbstractContextManager[None] = vars(self)[_WRAPPER].module.no_sync()
        return found


_WRAPPER = "_copying_wrapper"
"""Attribute of such a model with a `_Link`."""


class _Link:
    """Holds the wrapper of a model. A copy holds none."""

    def __init__(self, module: Any = None) -> None:
        self.module = module

    def __reduce__(self) -> tuple[type[_Link], tuple[()]]:
        return _Link, ()


def _called_through(model: nn.Module, wrapper: nn.Module, base: type[Copied]) -> nn.Module:
    """Make calls of a model go through the wrapper around it; return the model."""
    own = type(model)
    # of the same name, for messages
    attributes: dict[str, Any] = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    if hasattr(own, "__deepcopy__"):
        # such a method may create an object of the class of its own
        attributes["__deepcopy__"] = Copied._copied_by_itself
    model.__class__ = type(own.__name__, (base, own), attributes)
    vars(model)[_WRAPPER] = _Link(wrapper)
    return model


class GradientExchange(DistributedDataParallel):
    """DDP whose parameters may be frozen and unfrozen at any time.

    Torch's own exchanges the gradients of the parameters that required them when it was created. Those that are
    unfrozen later would become different on each rank.
    """

    def __init__(self, model: nn.Module, group: Any, note_trained: Callable[[list[bool]], None], **options: Any):
        """
        Args:
            note_trained: called with the parameters that are trained, when others were before.
            options: those of DDP.
        """
        super().__init__(model, process_group=group, **options)
        stop_buffer_sync(self)
        self._options = options
        self._own_parameters = list(model.parameters())
        self._exchanged = self._trained()
        self._note_trained = note_trained
        self.check: Callable[[], None] | None = None
        """Called before each exchange of gradients, if there is one."""
        self.is_computing = False
        self._is_called = self._is_left_out = False

    def is_first_left_out(self) -> bool:
        """Return whether parameters have gradients although the model was not called since the last update, so that
        they were not exchanged: the job has called a part of the model. Call it before each update; it returns True
        once."""
        is_called, self._is_called = self._is_called, False
        if is_called or self._is_left_out:
            return False
        self._is_left_out = any(each.grad is not None for each in self._own_parameters)
        return self._is_left_out

    def check_before_exchange(self, check: Callable[[], None]) -> bool:
        """Call a function before each exchange of gradients. If it raises an error, call `renew` afterwards.

        Returns:
            whether it will be called: not if a hook of the job exchanges gradients.
        """
        if self.check is None:
            if has_exchange_hook(self):
                return False
            # a weak reference, because DDP's reducer holds its hook where Python finds no cycle
            self.register_comm_hook(weakref.ref(self), _exchange_checked)
        self.check = check
        return True

    def renew(self) -> None:
        """Exchange gradients as if none had been exchanged yet, after a backward pass that failed."""
        renew_exchange(self, **self._options)
        self._exchanged = self._trained()

    def _trained(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._own_parameters]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._follow()
            if self.check is not None and self.require_backward_grad_sync:
                # DDP broadcasts the order of its buckets in a forward pass, once it knows it
                self.check()
            self._is_called = True
        with _computing(self):
            return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _follow(self) -> None:
        """Exchange the gradients of the parameters that are trained now."""
        trained = self._trained()
        # without any there is nothing to exchange, as for a discriminator while its generator is being trained
        if trained != self._exchanged and any(trained):
            refuse_unfinished_exchange(self)
            self.renew()
            self._note_trained(trained)


@contextmanager
def _computing(wrapper: Any) -> Iterator[None]:
    wrapper.is_computing = True
    try:
        yield
    finally:
        wrapper.is_computing = False


def _exchange_checked(model: weakref.ref[GradientExchange], bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average gradients as DDP does, once the check has passed."""
    exchange = model()
    assert exchange is not None
    assert exchange.check is not None
    exchange.check()
    group = exchange.process_group
    work = dist.all_reduce(bucket.buffer().mul_(1.0 / group.size()), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]


# DDP does not accept annotations that are text
_exchange_checked.__annotations__.clear()


def replicate(model: nn.Module, exchange: GradientExchange) -> nn.Module:
    """Make calls of a model go through the DDP around it, and return it."""
    return _called_through(model, exchange, Replicated)


def exchange_of(
    model: nn.Module,
    device: torch.device,
    in_order: bool,
    note_trained: Callable[[list[bool]], None],
    group: Any = None,
) -> GradientExchange:
    """Return DDP around a model, with rank 0's parameters and buffers. If it is spread over devices, it stays there.

    Args:
        in_order: whether gradients are always summed in the same order. Otherwise, DDP rebuilds its buckets after the
            first step, and after the first step of each restart: a sum of three or more numbers depends on their
            position in the all-reduce.
        note_trained: called with the parameters that are trained, when others were before.
        group: process group of the ranks that hold the same model; None for all.
    """
    is_on_one_gpu = device.type == "cuda" and not is_spread(model)
    return GradientExchange(
        model,
        group,
        note_trained,
        device_ids=[device] if is_on_one_gpu else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=in_order,
    )


def is_spread(model: nn.Module) -> bool:
    """Return whether the parameters of a model lie on several devices of this rank."""
    return len({parameter.device for parameter in model.parameters()}) > 1


def scatter(model: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
    """Make calls of a model divide each batch among the GPUs of this process, and return it; on a CPU, it is computed
    there."""
    gpus = [device for device in devices if device.type == "cuda"]
    return _called_through(model, _Scatter(model, gpus or None), Copied)


class _Scatter(nn.DataParallel[nn.Module]):
    is_computing = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _computing(self):
            return super().forward(*args, **kwargs)


def memory_text(peaks: Sequence[int]) -> str:
    """Return a line about the memory of the GPUs with DataParallel.

    Args:
        peaks: the largest number of bytes that was allocated on each GPU.
    """
    first, others = peaks[0], max(peaks[1:])
    used = f"GPU 0 held up to {human_size(first)}, the others {human_size(others)}"
    return (
        f"DataParallel: {used}: GPU 0 also gathers the outputs of all, and copies the model to them in each step."
        " --strategy ddp, with one process per GPU, does neither"
    )
