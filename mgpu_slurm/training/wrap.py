"""Wrap models for training on all ranks: in DDP, with a hook that reports their inputs, and with rank 0's values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_slurm.checkpoints.tensors import is_sharded
from mgpu_slurm.checkpoints.wrapping import Wrapped
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.rank.torch_adapter import is_dtensor


class Models:
    """The models of one rank's run, as `run.wrap` has returned them."""

    def __init__(self, device: torch.device, world_size: int, note_inputs: Callable[[nn.Module, Any], None]) -> None:
        """
        Args:
            note_inputs: called with a model and its inputs.
        """
        self._device = device
        self._world_size = world_size
        self._note_inputs = note_inputs
        self.is_deterministic = False
        """Whether DDP must always sum gradients in the same order."""
        self.wrapped = Wrapped()
        self.replicated: list[DistributedDataParallel] = []
        """Models that exchange gradients in each backward pass, except under `no_sync`."""
        self._sharded: list[nn.Module] = []
        """Models for which a rank with fewer forward passes would leave the others waiting."""

    @property
    def are_sharded(self) -> bool:
        """Whether any model is sharded over the ranks."""
        return bool(self._sharded)

    def add_sharded(self, model: nn.Module) -> None:
        """Record a model that is sharded over the ranks."""
        self._sharded.append(model)
        self.wrapped.add(model)

    def add_restored(self, value: Any) -> None:
        """Record an object passed to `run.restore`: a sharded model need not have been wrapped."""
        if isinstance(value, nn.Module) and is_sharded(value) and value not in self._sharded:
            self.add_sharded(value)

    def wrap(self, model: nn.Module) -> nn.Module:
        """See `Run.wrap`."""
        refuse_first_fsdp(model)
        if is_sharded(model):
            self.add_sharded(model)
            self._note_inputs_of(model)
            return model
        model = model.to(self._device)
        if self._world_size == 1:
            # not recorded: a job may create many models
            return model
        self.wrapped.add(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            # DDP refuses a model without trainable parameters
            broadcast_tensors([*model.parameters(), *model.buffers()])
            return model
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self._device] if self._device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            # otherwise DDP rebuilds its buckets after the first step, and after the first step of each restart: a sum
            # of three or more numbers depends on their position in the all-reduce
            find_unused_parameters=self.is_deterministic and self._world_size > 2,
            # DDP gives all ranks rank 0's buffers here, and not again at each forward
            forward_sync_buffers=False,
        )
        self.replicated.append(wrapped)
        # not a hook of the model itself: torch.jit.script refuses that
        self._note_inputs_of(wrapped)
        return wrapped

    def _note_inputs_of(self, model: nn.Module) -> None:
        # before hooks that change the inputs, such as those of a sharded model
        model.register_forward_pre_hook(InputHook(self._note_inputs), prepend=True, with_kwargs=True)

    def broadcast_buffers(self) -> None:
        """Broadcast rank 0's buffers of all models."""
        if self._world_size > 1:
            for model in self.wrapped:
                broadcast_tensors(model.buffers())


class InputHook:
    """A forward pre-hook that reports a module's inputs. Copies of the module, such as for a moving average, report
    nothing."""

    def __init__(self, tell: Callable[[nn.Module, Any], None] | None = None) -> None:
        self._tell = tell

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]) -> None:
        # a compiler would trace it, though it is not part of the computation
        if self._tell is not None and not torch.compiler.is_compiling():
            self._tell(module, (*args, *kwargs.values()))

    def __reduce__(self) -> tuple[type[InputHook], tuple[()]]:
        return InputHook, ()


def refuse_first_fsdp(model: nn.Module) -> None:
    """Check that no part of a model is in FullyShardedDataParallel.

    Raises:
        UserError: a part is; DDP would exchange its parameters once more.
    """
    # not imported here because that is slow: if nobody has, there is no such model
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in model.modules()):
        raise UserError(
            f"run.wrap({type(model).__name__}): FullyShardedDataParallel is not supported: use torch's fully_shard"
            " instead"
        )


def broadcast_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Broadcast rank 0's values of these tensors, except those that are sharded. Every rank must call it."""
    for tensor in tensors:
        if is_dtensor(tensor):
            continue
        held = tensor.detach().contiguous()
        # as bytes, because gloo does not support every dtype
        torch.distributed.broadcast(held.reshape(-1).view(torch.uint8), src=0)
        if not tensor.is_contiguous():
            tensor.detach().copy_(held)
