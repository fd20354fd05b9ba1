"""Shard a model over ranks by `fully_shard`: the strategies `fsdp` (ZeRO-3), `zero2` and `hsdp`.

See Rajbhandari et al., ZeRO (2020), and https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request.parallelism import Layout
from mgpu_slurm.training.parallel.mesh import mesh_of
from mgpu_slurm.training.parallel.precision import HALF


def shard(
    model: nn.Module, parts: Sequence[nn.Module], layout: Layout, device: torch.device, offload: bool = False
) -> None:
    """Shard a model in place: each rank keeps its part of every parameter, on the device.

    The parameters of a part are gathered for its forward and backward pass; with `zero2` they stay until the backward
    pass. All ranks must pass a model with the same values. It need not fit on the device as a whole: it is moved part
    by part.

    Args:
        parts: modules within the model, outer ones first.
        offload: keep parameters, gradients and optimizer state in main memory, and move the parameters of a part to the
            device when they are gathered.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    half = HALF.get(layout.precision)
    # gradients are summed in float32, and the model returns float32
    of_parts = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half and torch.float32)
    of_root = MixedPrecisionPolicy(
        param_dtype=half, reduce_dtype=half and torch.float32, output_dtype=half and torch.float32
    )
    # its running statistics are in float32
    of_norms = MixedPrecisionPolicy(param_dtype=half and torch.float32, output_dtype=half)
    mesh = mesh_of(layout, device)
    over = mesh["replicate", "shard"] if layout.replicas > 1 else mesh["shard"]
    place = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    # by default, torch reshards each block after its forward pass, but not the root
    options: dict[str, Any] = {"reshard_after_forward": False} if layout.strategy == "zero2" else {}
    norms = [part for part in model.modules() if half is not None and isinstance(part, _BatchNorm)]
    policies: list[tuple[nn.Module, MixedPrecisionPolicy]] = [(norm, of_norms) for norm in norms]
    policies += [(part, of_parts) for part in reversed(parts) if part not in norms]
    for part, policy in [*policies, (model, of_root)]:
        fully_shard(part, mesh=over, mp_policy=policy, offload_policy=place, **options)
    model.register_forward_hook(_reshard_after_evaluation)


def _reshard_after_evaluation(model: nn.Module, *_: Any) -> None:
    """Reshard all parts after a forward pass that no backward pass follows: until then, `parameters()` returns gathered
    copies, which an optimizer must not get."""
    from torch.distributed.fsdp import FSDPModule

    if not torch.is_grad_enabled():
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def blocks_of(model: nn.Module, blocks: Sequence[type[nn.Module]], option: str) -> list[nn.Module]:
    """Return the blocks of a model, outer ones first.

    Args:
        blocks: classes of the repeated layers.
        option: the option that needs them, for the error.

    Raises:
        UserError: no part of the model is of one of these classes.
    """
    if not blocks:
        raise UserError(f"run.wrap: {option} needs blocks=(...), the classes of the model's repeated layers")
    found = [part for part in model.modules() if isinstance(part, tuple(blocks)) and part is not model]
    if not found:
        named = ", ".join(each.__name__ for each in blocks)
        raise UserError(f"run.wrap(blocks=...): the {type(model).__name__} contains no {named}")
    return found


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
