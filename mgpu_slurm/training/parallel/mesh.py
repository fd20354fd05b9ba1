"""The device mesh of a run: torch's view of the grid of ranks, and what the first of some ranks sends to the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mgpu_slurm.core import torch_versions
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.rank.torch_adapter import is_dtensor
from mgpu_slurm.request.parallelism import Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_made: dict[tuple[str, tuple[tuple[str, int], ...]], tuple[Any, DeviceMesh]] = {}
"""The default process group at that time, and the mesh."""


def mesh_of(layout: Layout, device: torch.device) -> DeviceMesh:
    """Return the mesh with the layout's dimensions. Collective: all ranks must make the first call for a layout.

    It is made once per process and layout, because each mesh has process groups, and these stay open: the trials of a
    sweep share their process.

    Raises:
        UserError: the run has one rank, which has no process group; or this torch cannot divide models among such
            devices.
    """
    if layout.is_sharded:
        torch_versions.check_sharding(device)
    if layout.pipeline > 1:
        torch_versions.check_pipeline(device)
    if not dist.is_initialized():
        raise UserError("run.mesh: the run has one rank, and a mesh needs several: check run.world_size before")
    from torch.distributed.device_mesh import init_device_mesh

    dimensions = tuple(layout.dimensions.items())
    key = (device.type, dimensions)
    if key not in _made or _made[key][0] is not dist.group.WORLD:
        names, sizes = zip(*dimensions, strict=True)
        _made[key] = dist.group.WORLD, init_device_mesh(device.type, sizes, mesh_dim_names=names)
    return _made[key][1]


def data_group(layout: Layout, device: torch.device) -> Any:
    """Return the process group of the ranks that hold the same layers and divide the batches among them."""
    mesh = mesh_of(layout, device)
    return mesh["replicate"].get_group() if layout.replicas > 1 else mesh["shard"].get_group()


def broadcast_tensors(tensors: Iterable[torch.Tensor], group: Any = None) -> None:
    """Broadcast the first rank's values of these tensors, except those that are sharded. Every rank must call it.

    Args:
        group: process group of the ranks; None for all.
    """
    for tensor in tensors:
        if is_dtensor(tensor):
            continue
        held = tensor.detach().contiguous()
        # as bytes, because gloo does not support every dtype
        dist.broadcast(held.reshape(-1).view(torch.uint8), group=group, group_src=0)
        if not tensor.is_contiguous():
            tensor.detach().copy_(held)
