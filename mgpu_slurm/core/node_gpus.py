"""Find the GPUs of this node: those that environment variables make visible, and those that NVML lists and measures.

`CUDA_VISIBLE_DEVICES` chooses GPUs for NVIDIA's runtime. AMD's has two layers: `ROCR_VISIBLE_DEVICES` chooses GPUs of
the node, and `HIP_VISIBLE_DEVICES` some of those by their place in that list; if it is missing, `CUDA_VISIBLE_DEVICES`
counts as it. SLURM sets the variables of the vendor that gres.conf names, and those of all if it names none. Then
both lists have the same numbers, of which the second is wrong on AMD's GPUs unless they start from 0.

A GPU may be divided into MIG instances, whose names begin with `MIG-`. A process can use the first visible one only.
"""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"

HIDDEN = {CUDA: "", HIP: "-1"}
"""Variables that hide all GPUs; AMD's runtime takes an empty list for none given."""

AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
"""Where AMD's driver lists processors; `gpu_id` of those without GPU is 0."""


@dataclass(frozen=True)
class VisibleGpus:
    """GPUs by their names in the variables, in the same order."""

    cuda: tuple[str, ...]
    hip: tuple[str, ...] | None = None
    """Their names in HIP_VISIBLE_DEVICES; None if nothing speaks for AMD's GPUs."""

    def __len__(self) -> int:
        return len(self.cuda)

    @property
    def are_instances(self) -> bool:
        """Whether these are MIG instances."""
        return any(name.startswith("MIG-") for name in self.cuda)

    def chosen(self, positions: Iterable[int]) -> dict[str, str]:
        """Return the variables that make only the GPUs at these positions visible."""
        at = list(positions)
        variables = {CUDA: ",".join(self.cuda[position] for position in at)}
        if self.hip is not None:
            variables[HIP] = ",".join(self.hip[position] for position in at) or HIDDEN[HIP]
        return variables


def counted_from_zero(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


def visible(environ: Mapping[str, str]) -> VisibleGpus | None:
    """Return the GPUs that environment variables choose; None if they choose none, so that all are visible."""
    cuda, hip, rocr = (_listed(environ.get(name)) for name in (CUDA, HIP, ROCR))
    if hip is not None and environ[HIP]:
        # only users set it, on AMD's GPUs
        return VisibleGpus(cuda if cuda is not None and len(cuda) == len(hip) else hip, hip)
    if rocr is not None:
        left = counted_from_zero(len(rocr))
        if cuda is None:
            return VisibleGpus(left, left)
        # equal lists are SLURM's; another one is the user's choice among those that are left
        return VisibleGpus(cuda, left if cuda == rocr else cuda)
    return None if cuda is None else VisibleGpus(cuda)


def _listed(text: str | None) -> tuple[str, ...] | None:
    """Return the names in a list up to the first invalid entry, as runtimes read it."""
    if text is None:
        return None
    return tuple(itertools.takewhile(lambda name: name not in ("", "-1"), map(str.strip, text.split(","))))


def of_this_machine(environ: Mapping[str, str] = os.environ) -> VisibleGpus:
    """Return the GPUs visible to this user's programs: those that variables choose, else those that drivers list."""
    if (found := visible(environ)) is not None:
        return found
    if count := _nvidia_count():
        return VisibleGpus(counted_from_zero(count))
    names = counted_from_zero(_amd_count())
    return VisibleGpus(names, names or None)


def _nvidia_count() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _amd_count() -> int:
    found = 0
    for path in AMD_NODES.glob("*/gpu_id"):
        # a GPU that a container does not have cannot be read
        with suppress(OSError):
            found += path.read_text().strip() not in ("", "0")
    return found


def own_variables(environ: Mapping[str, str], local_rank: int, local_ranks: int) -> dict[str, str]:
    """Return the variables to change in a rank before it uses a GPU.

    It gets a MIG instance of its own, or AMD's GPUs although SLURM has set the variables of all vendors.
    """
    found = visible(environ)
    if found is None:
        return {}
    if found.are_instances:
        return found.chosen([share_of_gpus(local_rank, local_ranks, len(found))[0]])
    if found.hip is not None and found.hip != found.cuda and not environ.get(HIP):
        return {HIP: ",".join(found.hip)}
    return {}


def share_of_gpus(local_rank: int, local_ranks: int, gpus: int) -> list[int]:
    """Return the positions of a local rank's GPUs; if there are more ranks than GPUs, they share these in turn."""
    size = max(1, gpus // local_ranks)
    return [(local_rank * size + index) % gpus for index in range(size)]


def divided_gpu(environ: Mapping[str, str]) -> str | None:
    """Return which GPU the MIG instance of this process is a part of; None if it does not use one."""
    found = visible(environ)
    if found is None or not found.are_instances:
        return None
    name = found.cuda[0]
    # `MIG-GPU-1a2b/7/0` of drivers before 470
    parent = name.removeprefix("MIG-").partition("/")[0] if name.startswith("MIG-GPU-") else _parent(name)
    return f"{parent or f'a GPU of {os.uname().nodename}'} (divided by MIG)"


def _parent(instance: str) -> str | None:
    """Return the UUID of the GPU of a MIG instance; None if NVML does not tell."""
    # any error of NVML: a missing library, an instance that is gone
    with suppress(Exception):
        nvml = load()
        handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID(instance))
        return as_text(nvml.nvmlDeviceGetUUID(handle))
    return None


# -- NVML, the library that watches over NVIDIA's GPUs: it lists all GPUs of a node, by names of its own


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


def visible_handles(nvml: Any, environ: Mapping[str, str]) -> list[Any]:
    """Return NVML's handles of the visible GPUs, by index or UUID; all of them if no variable chooses any.

    CUDA's indices are those of NVML on a node whose GPUs are all of one kind, and with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    found = list(_accessible(nvml))
    named = visible(environ)
    if named is None:
        return [handle for handle, _ in found]
    chosen = []
    for name in named.cuda:
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
