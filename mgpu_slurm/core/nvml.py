"""Find GPUs in NVML, the library that watches over NVIDIA's GPUs, and read their use: it lists all GPUs of a node, by
names of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GpuReading:
    """The present use of one GPU; None for what a kind of GPU does not report."""

    utilization: float | None = None
    """Part of the last second or less in which a kernel ran."""
    memory: int | None = None
    """Bytes used, by all processes."""
    watts: float | None = None


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
    for handle, uuid in _accessible(nvml):
        if uuid in seen:
            yield handle


def visible(nvml: Any, environ: Mapping[str, str]) -> list[Any]:
    """Return NVML's handles of the GPUs that CUDA_VISIBLE_DEVICES names, by index or UUID; all of them if it is unset.

    CUDA's indices are those of NVML on a node whose GPUs are all of one kind, and with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    found = list(_accessible(nvml))
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [handle for handle, _ in found]
    chosen = []
    for name in filter(None, map(str.strip, named.split(","))):
        if name.isdecimal():
            chosen += [found[int(name)][0]] if int(name) < len(found) else []
        else:
            # CUDA takes the beginning of a UUID, too
            begin = name.removeprefix("GPU-")
            chosen += [handle for handle, uuid in found if uuid.startswith(begin)]
    return chosen


def _accessible(nvml: Any) -> Iterator[tuple[Any, str]]:
    """Yield the handle and the UUID, without its prefix, of each GPU that this user can access."""
    for index in range(nvml.nvmlDeviceGetCount()):
        # a GPU that is lost or not accessible to this user
        with suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            yield handle, as_text(nvml.nvmlDeviceGetUUID(handle)).removeprefix("GPU-")


def read(nvml: Any, handle: Any) -> GpuReading:
    """Return the present use of a GPU."""

    def known(function: Callable[[Any], Any], value: Callable[[Any], Any]) -> Any:
        with suppress(nvml.NVMLError):
            return value(function(handle))
        return None

    return GpuReading(
        known(nvml.nvmlDeviceGetUtilizationRates, lambda rates: rates.gpu / 100),
        known(nvml.nvmlDeviceGetMemoryInfo, lambda info: int(info.used)),
        known(nvml.nvmlDeviceGetPowerUsage, lambda milliwatts: milliwatts / 1000),
    )


def as_text(value: Any) -> str:
    """Return a name; older versions of the binding return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
