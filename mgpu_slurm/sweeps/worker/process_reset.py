"""Resetting a process between trials, and measuring what they leave behind.

Settings of Python and torch are reset to their values before the first trial. Remaining memory, threads and open files
are counted; beyond some growth it is better to restart the ranks. The global state of modules is not reset.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import random
import resource
import signal
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch

from mgpu_slurm.core import processes

GROWTH_OF_MEMORY = 1 << 30
"""Bytes of main memory that all trials together may leave, or half of what the process had if that is more."""

GROWTH_OF_GPU_MEMORY = 1 << 28
"""Bytes of GPU memory that tensors of earlier trials may hold."""

GROWTH_OF_THREADS = 16
GROWTH_OF_FILES = 64

COLLECT_EVERY = 1.0
"""Seconds for which trials share one garbage collection, which also traverses the study in this process."""

LITTLE_MEMORY = 1 << 26
"""Bytes that trials may leave to a later collection."""


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`, from its malloc.h."""


def keep_freed_memory() -> None:
    """Let this process keep up to 64 MB of freed memory, so that it need not request it from the system again.

    glibc reaches these values by itself in a process that frees large blocks (mallopt(3)). Sampling the parameters of a
    trial allocates blocks just above the default thresholds, which go back to the system at each step; with a thousand
    trials in the study, about a tenth of the time was spent on getting them again, page by page.
    """
    with suppress(OSError, AttributeError):
        # other C libraries have no mallopt
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 25)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 26)


@dataclass(frozen=True)
class ResourceUsage:
    """Memory, threads and open files of a process."""

    memory: int
    """Resident bytes."""
    gpu_memory: int
    """Bytes of live tensors."""
    threads: int
    files: int

    @classmethod
    def now(cls) -> ResourceUsage:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        return cls(
            memory=pages * resource.getpagesize(),
            # 0 if no GPU was used
            gpu_memory=torch.cuda.memory_allocated(),
            threads=processes.thread_count(),
            files=len(os.listdir("/proc/self/fd")),
        )


def growth(before: ResourceUsage, now: ResourceUsage) -> str | None:
    """Return which growth exceeds its limit; None if none does."""
    if now.memory - before.memory > max(GROWTH_OF_MEMORY, before.memory // 2):
        return f"{(now.memory - before.memory) / 2**30:.1f} GiB of memory"
    if now.gpu_memory - before.gpu_memory > GROWTH_OF_GPU_MEMORY:
        return f"{(now.gpu_memory - before.gpu_memory) / 2**30:.1f} GiB of GPU memory"
    if now.threads - before.threads > GROWTH_OF_THREADS:
        return f"{now.threads - before.threads} threads"
    if now.files - before.files > GROWTH_OF_FILES:
        return f"{now.files - before.files} open files"
    return None


@dataclass(frozen=True)
class _TorchSettings:
    """Settings of torch in this process."""

    dtype: torch.dtype
    threads: int
    grad: bool
    deterministic: bool
    warn_only: bool
    precision: str
    benchmark: bool
    cudnn_deterministic: bool
    anomaly: bool

    @classmethod
    def now(cls) -> _TorchSettings:
        return cls(
            dtype=torch.get_default_dtype(),
            threads=torch.get_num_threads(),
            grad=torch.is_grad_enabled(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            precision=torch.get_float32_matmul_precision(),
            benchmark=torch.backends.cudnn.benchmark,
            cudnn_deterministic=torch.backends.cudnn.deterministic,
            anomaly=torch.is_anomaly_enabled(),
        )

    def apply(self) -> None:
        if self == _TorchSettings.now():
            # setting a value for the first time imports half of torch, even if the value stays the same
            return
        torch.set_default_dtype(self.dtype)
        torch.set_num_threads(self.threads)
        torch.set_grad_enabled(self.grad)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.set_float32_matmul_precision(self.precision)
        torch.backends.cudnn.benchmark = self.benchmark
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.autograd.set_detect_anomaly(self.anomaly)


class Reset:
    """A copy of this process's settings, to reset them later."""

    def __init__(self) -> None:
        self._folder = os.getcwd()
        self._environ = dict(os.environ)
        self._path = list(sys.path)
        self._arguments = list(sys.argv)
        self._filters = list(warnings.filters)
        self._signals = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
        self._torch = _TorchSettings.now()
        self._collected = -math.inf
        """Time of the last collection, by the monotonic clock."""
        self._left: ResourceUsage | None = None
        """Resources of this process after the last collection."""

    def apply(self) -> None:
        """Reset the settings, and free unreferenced memory."""
        os.chdir(self._folder)
        if os.environ != self._environ:
            os.environ.clear()
            os.environ.update(self._environ)
        sys.path[:] = self._path
        sys.argv[:] = self._arguments
        warnings.filters[:] = self._filters  # type: ignore[index]
        # before its handler is reset: by default the signal ends the process
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in self._signals.items():
            if handler is not None and signal.getsignal(signum) is not handler:
                signal.signal(signum, handler)
        self._torch.apply()
        # a trial that sets no seed must not depend on earlier trials
        seed = int.from_bytes(os.urandom(4), "little")
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        if (
            self._left is None
            or time.monotonic() >= self._collected + COLLECT_EVERY
            or _is_much(self._left, ResourceUsage.now())
        ):
            self._collect()

    def _collect(self) -> None:
        gc.collect()
        if self._left is None:
            # what the first trial has loaded stays, and need not be traversed again
            gc.freeze()
        # does nothing if no GPU was used
        torch.cuda.empty_cache()
        self._collected, self._left = time.monotonic(), ResourceUsage.now()


def _is_much(before: ResourceUsage, now: ResourceUsage) -> bool:
    """Return whether trials have left too much to postpone the collection."""
    return now.memory > before.memory + LITTLE_MEMORY or replace(now, memory=before.memory) != before
