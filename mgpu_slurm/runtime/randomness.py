"""The state of every generator of random numbers that a job may draw from."""

from __future__ import annotations

import random
from typing import Any

import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """Python's, NumPy's, torch's and the device's."""
    import numpy as np

    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    name, keys, *rest = np.random.get_state(legacy=True)
    state["numpy"] = [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest]
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    import numpy as np

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
