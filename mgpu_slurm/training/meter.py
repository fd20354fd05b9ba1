"""A mean of what a loop adds to it, such as the loss over an epoch, also where that was interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from mgpu_slurm.core.errors import UserError

Mean = Callable[[torch.Tensor, float], float]
"""Of sums and counts of all ranks; see `Run.mean`."""


class Meter:
    """One rank's part of it; checkpoints hold what was added so far."""

    def __init__(self, device: torch.device, mean: Mean, samples: Callable[[Any], float | None]) -> None:
        """
        Args:
            samples: how many of its own this rank has in the batch that it trains with now; None in no such batch. It
                is given what is added.
        """
        self._device = device
        self._mean = mean
        self._samples = samples
        self._clear()

    def _clear(self) -> None:
        self._total = torch.zeros((), dtype=torch.float64, device=self._device)
        self._count = 0.0

    def add(self, value: torch.Tensor | float, count: float | None = None) -> None:
        """
        Args:
            value: the mean over this rank's samples; a tensor stays on its device, which is not waited for.
            count: of how many; None for those of the batch that `run.loader` has given, of which a rank may have none
                and get another one's. The value of an earlier batch needs it.

        Raises:
            UserError: it is no single number, or nobody knows of how many.
        """
        count = self._samples(value) if count is None else count
        if count is None:
            raise UserError("meter.add: not in a batch of run.loader: say of how many samples it is, as `count`")
        number = torch.as_tensor(value).detach()
        if number.numel() != 1:
            raise UserError(f"meter.add: expected a number, got a tensor of shape {[*number.shape]}: take its mean")
        if count:
            self._total += number.reshape(()).to(self._device, torch.float64) * count
            self._count += count

    def mean(self) -> float:
        """Of all samples that were added since the last call, on all ranks; NaN where there are none.

        Collective: every rank calls it.
        """
        mean = self._mean(self._total, self._count)
        self._clear()
        return mean

    def state(self) -> dict[str, Any]:
        return {"total": self._total, "count": self._count}

    def go_on_from(self, states: Iterable[Mapping[str, Any]]) -> None:
        """
        Args:
            states: of this rank, and of those that are there no more.
        """
        self._clear()
        for state in states:
            self._total += state["total"].to(self._device)
            self._count += state["count"]
