"""Clip gradients by their norm, however the parameters are divided over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mgpu_slurm.rank.torch_adapter import is_dtensor


def clip_gradients(parameters: Iterable[torch.Tensor], limit: float, stages: Any = None) -> None:
    """Scale gradients so that their common norm is at most `limit`.

    torch's `clip_grad_norm_` refuses parameters that are divided over different meshes, as in tensor parallelism.

    Args:
        stages: mesh of the ranks that hold the other layers of the model; None if there are none.
    """
    held = list(parameters)
    groups: dict[Any, list[torch.Tensor]] = {}
    for parameter in held:
        if parameter.grad is not None:
            groups.setdefault(_division(parameter.grad), []).append(parameter)
    if stages is None and len(groups) <= 1:
        nn.utils.clip_grad_norm_(held, limit)
        return
    # a stage may have no parameters, as they are frozen
    device = held[0].device if stages is None else stages.device_type
    total = torch.zeros((), dtype=torch.double, device=device)
    for (mesh, placements, _), own in groups.items():
        square = _local_norm(own).to(total).square()
        for dimension, placement in enumerate(placements):
            # torch's class for two sharded dimensions says that it is no shard
            if not placement.is_replicate():
                dist.all_reduce(square, group=mesh.get_group(dimension))
        total += square
    if stages is not None:
        dist.all_reduce(total, group=stages.get_group())
    for (*_, device), own in groups.items():
        nn.utils.clip_grads_with_norm_(own, limit, total.sqrt().to(device, torch.float32))


def _division(grad: Any) -> tuple[Any, tuple[Any, ...], torch.device]:
    """Return the mesh and placements of a gradient, if it is divided, and its device."""
    if not is_dtensor(grad):
        return None, (), grad.device
    return grad.device_mesh, tuple(grad.placements), grad.device


def _local_norm(parameters: list[torch.Tensor]) -> torch.Tensor:
    grads: list[Any] = [each.grad for each in parameters]
    return nn.utils.get_total_norm([each.to_local() if is_dtensor(each) else each for each in grads])
