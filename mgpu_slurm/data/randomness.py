"""The states of all random number generators that a job may draw from."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mgpu_slurm.rank.codec import StateDict


def seed(value: int, deterministic: bool = False) -> None:
    """Seed all generators.

    Args:
        deterministic: whether torch must use deterministic algorithms, and raise an error if it has none.
    """
    import numpy as np

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
    import numpy as np

    numpy: Any = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return RandomState(random.getstate(), numpy, torch.get_rng_state(), cuda)


def set_random_state(state: RandomState, device: torch.device) -> None:
    import numpy as np

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


class RandomNumbers:
    """Random numbers of Python, NumPy and torch on the CPU, from a separate seed; those of the job are not affected."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: RandomState | None = None

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Draw from these numbers within the block."""
        cpu = torch.device("cpu")
        before = random_state(cpu)
        if self._state is None:
            self._begin()
        else:
            set_random_state(self._state, cpu)
        try:
            yield
        finally:
            self._state = random_state(cpu)
            set_random_state(before, cpu)

    def _begin(self) -> None:
        import numpy as np

        random.seed(self._seed)
        np.random.seed(self._seed % 2**32)
        # not torch.manual_seed, which seeds devices too
        torch.default_generator.manual_seed(self._seed)
