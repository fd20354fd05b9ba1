"""All uses of private and undocumented names of what wraps a model: DistributedDataParallel and `fully_shard`.

As `torch_adapter`, it was written for torch 2.13.0, and works from torch 2.6 on.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_slurm.rank.torch_adapter import replaced

# -- fully_shard


def begin_sharded(model: Any) -> None:
    """Initialize what a model sharded by `fully_shard` otherwise initializes in its first forward pass."""
    model._get_fsdp_state()._lazy_init()


def is_sharded_root(part: Any) -> bool | None:
    """Return whether a module on which `fully_shard` was called is in no other one; None before the first forward
    pass."""
    found: bool | None = part._get_fsdp_state()._is_root
    return found


def has_reduce_hook(part: Any) -> bool:
    """Return whether a job's hook exchanges the gradients of a part of a sharded model once more."""
    return any(getattr(group, "_all_reduce_hook", None) is not None for group in _groups_of(part))


def custom_exchanges(part: Any) -> list[Any]:
    """Return the objects that exchange the parameters and gradients of a part of a sharded model in place of torch's
    own."""
    names = ("_all_gather_comm", "_reduce_scatter_comm")
    found = [getattr(group, name) for group in _groups_of(part) for name in names if hasattr(group, name)]
    return [each for each in found if not type(each).__name__.startswith("Default")]


def _groups_of(part: Any) -> list[Any]:
    state = part._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


# -- DistributedDataParallel

_HAS_INIT_SYNC = "init_sync" in inspect.signature(DistributedDataParallel).parameters


def stop_buffer_sync(model: DistributedDataParallel) -> None:
    """Stop DDP from broadcasting rank 0's buffers in each forward pass. It has done so once, when it was created.

    The argument for this, `forward_sync_buffers`, is not in torch 2.11. The older `broadcast_buffers` would also leave
    out the first broadcast, but the attribute of that name only concerns the forward pass, in all versions.
    """
    model.broadcast_buffers = False


def has_exchange_hook(model: DistributedDataParallel) -> bool:
    """Return whether a hook exchanges the gradients of a DDP model."""
    return bool(model._comm_hooks)


def refuse_unfinished_exchange(model: DistributedDataParallel) -> None:
    """Check that the last backward pass exchanged all gradients, as DDP itself does in the next forward pass.

    Raises:
        RuntimeError: it left out parameters.
    """
    model._check_reducer_finalized()  # type: ignore[no-untyped-call]


@contextmanager
def without_first_sync() -> Iterator[dict[str, Any]]:
    """Give the options of a DDP that, when it is created in this block, does not compare its parameters with those of
    rank 0 nor take its values."""
    if _HAS_INIT_SYNC:
        yield {"init_sync": False}
        return
    # torch 2.6
    module: Any = importlib.import_module("torch.nn.parallel.distributed")
    with replaced(
        module, _verify_param_shape_across_processes=lambda *_: None, _sync_module_states=lambda *_, **__: None
    ):
        yield {}


def renew_exchange(model: DistributedDataParallel, **options: Any) -> None:
    """Make DDP exchange the gradients of the parameters that require them now, as if it had just been created.

    Hooks registered by `register_comm_hook` remain, with their state.

    Args:
        options: those that it was created with.
    """
    # frees its buckets before others are allocated
    del model.reducer, model.logger
    with without_first_sync() as unsynchronized:
        fresh = DistributedDataParallel(model.module, process_group=model.process_group, **options, **unsynchronized)
    for hook, state in model._comm_hooks:
        fresh.register_comm_hook(state, hook)
    # keep the hooks of the module, and whether it is under `no_sync` or `join`
    kept = {*vars(nn.Module()), "require_backward_grad_sync", "_join_config"}
    vars(model).update({name: value for name, value in vars(fresh).items() if name not in kept})
    stop_buffer_sync(model)
