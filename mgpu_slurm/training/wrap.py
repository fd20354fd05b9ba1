"""What `run.wrap` does to a module: hear its inputs, refuse what DDP cannot wrap, and give it rank 0's values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from mgpu_slurm.checkpoints.tensors import is_spread
from mgpu_slurm.core.errors import UserError


class TellInputs:
    """A hook before the forward of a module that tells somebody what the module is given. Copies of the module, as for
    a moving average, tell nobody."""

    def __init__(self, tell: Callable[[nn.Module, Any], None] | None = None) -> None:
        self._tell = tell

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # a compiler would trace it, and find what is no computation
        if self._tell is not None and not torch.compiler.is_compiling():
            self._tell(module, (*args, *kwargs.values()))

    def __reduce__(self) -> tuple[type[TellInputs], tuple[()]]:
        return TellInputs, ()


def refuse_first_fsdp(model: nn.Module) -> None:
    """
    Raises:
        UserError: a part of the model is in FullyShardedDataParallel, whose parameters DDP would exchange once more.
    """
    # there are none before somebody has imported this, which takes long
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in model.modules()):
        raise UserError(
            f"run.wrap({type(model).__name__}): FullyShardedDataParallel is not supported: shard the model by torch's"
            " fully_shard instead"
        )


def bring(tensors: Iterable[torch.Tensor]) -> None:
    """Give these tensors rank 0's values on all ranks, but for those that are spread over them; every rank calls it."""
    for tensor in tensors:
        if is_spread(tensor):
            continue
        held = tensor.detach().contiguous()
        # as bytes, because gloo does not send every type
        torch.distributed.broadcast(held.reshape(-1).view(torch.uint8), src=0)
        if not tensor.is_contiguous():
            tensor.detach().copy_(held)
