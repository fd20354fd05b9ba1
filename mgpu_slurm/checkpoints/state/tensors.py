"""Determine how tensors are stored: whether a model is spread over ranks, and which tensors share memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from mgpu_slurm.rank.torch_adapter import is_dtensor, is_fake


def is_sharded(model: nn.Module) -> bool:
    """Return whether any parameter of a model is spread over ranks."""
    return any(map(is_dtensor, model.parameters()))


def has_memory(part: torch.Tensor) -> bool:
    return part.layout is torch.strided and not part.is_nested and part.numel() > 0 and not is_fake(part)


def memory_id(part: Any) -> int:
    """Return a number that is the same for a tensor and its views, and for an array and tensors made from it."""
    if isinstance(part, np.ndarray):
        return part.ctypes.data
    if isinstance(part, torch.Tensor) and has_memory(part):
        return part.untyped_storage().data_ptr()
    return id(part)
