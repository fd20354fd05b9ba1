"""What differs between builds of torchvision.

This module was written for torchvision 0.28.0, and aims to work from 0.21 on, which goes with torch 2.6.
"""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Any

from mgpu_slurm.core.errors import UserError

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
