"""Keep a moving average of a model's weights, however the model is shared among the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mgpu_slurm.checkpoints.state.wrapping import canonical_names
from mgpu_slurm.core.errors import UserError


class MovingAverage:
    """An exponential moving average of a model's parameters and buffers, to evaluate with.

    Each rank averages the parts that it holds, so it works for sharded models and for pipelines, unlike
    `torch.optim.swa_utils.AveragedModel`, which copies the model. Pass it to `run.restore` like the model.

        average = MovingAverage(model, decay=0.999)
        ...
        run.update(optimizer)
        average.update()
        ...
        with average.applied():
            evaluate(model)
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        """
        Args:
            model: as `run.wrap` or `run.pipeline` returned it.
            decay: weight of the previous average in each update; the first update copies the model.

        Raises:
            UserError: `decay` is not between 0 and 1.
        """
        if not 0.0 <= decay <= 1.0:
            raise UserError(f"MovingAverage: decay={decay}: expected a number from 0 to 1")
        self.module = model
        self._decay = decay
        self._updates = 0
        self._values = {name: tensor.detach().clone() for name, tensor in self._current().items()}

    def _current(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.module.state_dict()
        names = canonical_names(self.module, state)
        return {names[name]: tensor for name, tensor in state.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights; call it after each step."""
        weight = 1.0 - self._decay if self._updates else 1.0
        for name, tensor in self._current().items():
            if tensor.is_floating_point():
                self._values[name].lerp_(tensor, weight)
            else:
                # the number of batches that batch norm has seen, for example
                self._values[name].copy_(tensor)
        self._updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights within the block, and its own ones back afterwards."""
        current = self._current()
        own = {name: tensor.detach().clone() for name, tensor in current.items()}
        self._copy(self._values)
        try:
            yield
        finally:
            self._copy(own)

    @torch.no_grad()
    def _copy(self, values: dict[str, torch.Tensor]) -> None:
        for name, tensor in self._current().items():
            tensor.copy_(values[name])

    def state_dict(self) -> dict[str, Any]:
        return {**self._values, "updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._updates = state["updates"]
        with torch.no_grad():
            for name, tensor in self._values.items():
                tensor.copy_(state[name])
