"""The states of all random number generators that a job may draw from."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def seed(value: int, deterministic: bool) -> None:
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


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, NumPy's, torch's and the device's generators."""
    import numpy as np

    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    import numpy as np

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


class RandomNumbers:
    """Random numbers of Python, NumPy and torch on the CPU, from a separate seed; those of the job are not affected."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: dict[str, Any] | None = None

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
