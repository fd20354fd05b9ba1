"""All uses of private and undocumented names of torch, and what differs between builds of torchvision.

Torch may change these names in any version. This module was written for torch 2.13.0, the only version it is tested
with; it aims to work from torch 2.6 on. Its test checks that each name exists. No other module uses one when it runs:
only for type checkers do they import the store classes from `torch._C`, as torch's hints have them nowhere else.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from mgpu_slurm.core.errors import UserError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# -- tensors


def is_dtensor(tensor: Any) -> bool:
    """Return whether this is a DTensor, without importing DTensor's modules."""
    return hasattr(tensor, "__create_chunk_list__")


def own_chunk(dtensor: Any) -> Any:
    """Return the `offsets` and `sizes` of this rank's part of a DTensor."""
    (chunk,) = dtensor.__create_chunk_list__()
    return chunk


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors into others, without waiting for a device."""
    torch._foreach_copy_(targets, sources, non_blocking=True)


def fix_weak_reference(tensor: torch.Tensor) -> None:
    """Make a tensor safe to use after it was taken from a weak reference.

    `torch.utils.weak.TensorWeakRef` does the same, but is slow to create.
    """
    tensor._fix_weakref()  # type: ignore[attr-defined]


# -- modules

COMPILED_MODULE = "_orig_mod"
"""Attribute of a compiled module with the original one."""


def is_compiled(module: Any) -> bool:
    """Return whether `torch.compile` returned this module."""
    # before torch has imported this (a slow import), no compiled modules exist
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def import_compiler() -> None:
    """Import torch's compiler, which DistributedDataParallel needs."""
    importlib.import_module("torch._dynamo")


def registered(module: nn.Module, name: str) -> Any:
    """Return the child, parameter or buffer that is registered under a name; None if there is none."""
    for held in (module._modules, module._parameters, module._buffers):
        if held.get(name) is not None:
            return held[name]
    return None


# -- optimizers


def calls_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether torch calls its step hooks; not if a subclass does not call torch's `__init__`."""
    return getattr(type(optimizer).step, "hooked", False)


def skips_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether GradScaler told a fused optimizer, which skips steps itself, that gradients are infinite."""
    return bool(getattr(optimizer, "found_inf", None))


def has_found_infinite(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the scaler found infinite gradients of the optimizer since its last `update`."""
    return any(found.item() for found in scaler._found_inf_per_device(optimizer).values())


# -- data


@contextmanager
def as_only_worker() -> Iterator[None]:
    """Make `get_worker_info` return None in this block, as in a process that is no loader's worker."""
    from torch.utils.data._utils import worker

    info = worker._worker_info
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = info


# -- ranks


def default_store() -> Store:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def flight_recorder_dumps() -> Iterator[tuple[str, bytes]]:
    """Yield the suffix of torch's file and the pickled dump of each flight recorder that this build has.

    The second is asked for only then: in a stuck rank that of NCCL may fail or block.
    """
    from torch._C import _distributed_c10d as recorders

    for suffix, name in (("-cpu", "_dump_fr_trace"), ("", "_dump_nccl_trace")):
        if hasattr(recorders, name):
            yield suffix, getattr(recorders, name)()


_TORCH = Path(torch.__file__).parent

WAITING_CODE = (str(_TORCH / "distributed"), str(_TORCH / "autograd" / "graph.py"))
"""Code of torch in which a rank waits for the others: in collectives, including those of a backward pass."""


# -- torchvision


_MISSING_OPERATOR = re.compile(r"operator torchvision::\w+ does not exist")

# operators for which torchvision registers a fake kernel at import, whether or not its C++ operators were loaded
_OPERATORS = tuple(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms"))

# torch removes the operators together with the object that declared them
_declared: list[Any] = []


def import_torchvision() -> ModuleType:
    """Import torchvision, with `models`, `datasets` and `transforms.v2`, and return it.

    The wheel on PyPI is built for CUDA. With a CPU-only torch, its C++ operators do not load, and importing it fails
    with `operator torchvision::nms does not exist` (https://github.com/pytorch/vision/issues/9085). Only then, the
    missing operators are declared without an implementation: box operators do not work, the rest does.

    Raises:
        UserError: torchvision is not installed.
        RuntimeError: torchvision and torch are incompatible for another reason; torchvision's own error.
    """
    try:
        torchvision = importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise UserError(
            "torchvision is not installed: `pip install 'mgpu-slurm[vision]'`, or the version of it for your torch"
        ) from None
    except RuntimeError as error:
        if not _MISSING_OPERATOR.search(str(error)):
            raise
        _declare_operators()
        torchvision = importlib.import_module("torchvision")
    # torchvision itself imports it only when asked
    importlib.import_module("torchvision.transforms.v2")
    return torchvision


def has_declared() -> bool:
    """Return whether torchvision's box operators were only declared, and do not work."""
    return bool(_declared)


def _declare_operators() -> None:
    from torch.library import Library

    library = Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for schema in _OPERATORS:
        library.define(schema)  # type: ignore[no-untyped-call]
    _declared.append(library)
