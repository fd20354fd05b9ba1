"""The states of all random number generators that a job may draw from."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mgpu_slurm.rank.communication.codec import StateDict


def mixed(seed: int, *parts: int) -> int:
    """Return a 63-bit seed for several numbers, in practice different for different numbers."""
    for part in parts:
        seed = seed * 1_000_003 + part
    return seed % 2**63


def seed(value: int, deterministic: bool = False) -> None:
    """Seed all generators.

    Args:
        deterministic: whether torch must use deterministic algorithms, and raise an error if it has none.
    """
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
    if deterministic:
        # cuBLAS reads it at its first product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)


@dataclass(frozen=True)
class RandomState:
    """The states of Python's, NumPy's, torch's and the device's generators."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: Tensor
    cuda: Tensor | None = None
    """None if the device is not a GPU."""

    def state_dict(self) -> StateDict:
        state = {"python": self.python, "numpy": self.numpy, "torch": self.torch}
        return state if self.cuda is None else {**state, "cuda": self.cuda}


def random_state(device: torch.device) -> RandomState:
    """Return the states of all generators of this process."""
    numpy: Any = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return RandomState(random.getstate(), numpy, torch.get_rng_state(), cuda)


def set_random_state(state: RandomState, device: torch.device) -> None:
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    torch.set_rng_state(state.torch)
    if device.type == "cuda" and state.cuda is not None:
        torch.cuda.set_rng_state(state.cuda, device)


def share_random_state(device: torch.device, group: Any) -> None:
    """Set the states of all generators to those of the first rank of a process group. Its ranks must call it."""
    state = [random_state(device)]
    torch.distributed.broadcast_object_list(state, group=group, group_src=0, device=device)
    set_random_state(state[0], device)


def seed_cpu(value: int) -> None:
    """Seed Python's, NumPy's and torch's generators, but that of no device. Takes microseconds, unlike
    `torch.manual_seed`."""
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.default_generator.manual_seed(value)


@contextmanager
def kept() -> Iterator[None]:
    """Restore the states of all generators on the CPU after this block."""
    cpu = torch.device("cpu")
    before = random_state(cpu)
    try:
        yield
    finally:
        set_random_state(before, cpu)


class RandomNumbers:
    """Random numbers of Python, NumPy and torch on the CPU, from a separate seed; those of the job are not affected."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: RandomState | None = None

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Draw from these numbers within the block."""
        cpu = torch.device("cpu")
        with kept():
            if self._state is None:
                seed_cpu(self._seed)
            else:
                set_random_state(self._state, cpu)
            try:
                yield
            finally:
                self._state = random_state(cpu)
