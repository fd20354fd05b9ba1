"""Find GPUs in NVML, the library that watches over NVIDIA's GPUs: it lists all of a node, by names of its own."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any


def load() -> Any:
    """Return the binding of NVML, ready for use.

    Raises:
        ImportError: nvidia-ml-py is not installed.
        pynvml.NVMLError: this node has no such library.
    """
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    return nvml


def handles(nvml: Any, seen: set[str]) -> Iterator[Any]:
    """Yield NVML's handles of some GPUs.

    Args:
        seen: UUIDs of the GPUs as reported by torch.
    """
    for index in range(nvml.nvmlDeviceGetCount()):
        # a GPU that is lost or not accessible to this user
        with suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if as_text(nvml.nvmlDeviceGetUUID(handle)).removeprefix("GPU-") in seen:
                yield handle


def as_text(value: Any) -> str:
    """Return a name; older versions of the binding return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
