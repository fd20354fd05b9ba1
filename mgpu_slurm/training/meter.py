"""A mean over values added in a loop, such as the loss over an epoch, which survives an interruption."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.rank.codec import StateDict

Mean = Callable[[torch.Tensor, float], float]
"""A mean from the sums and counts of all ranks; see `Run.mean`."""


@dataclass(frozen=True)
class MeterState:
    """What was added to a meter so far."""

    total: torch.Tensor
    count: float

    def state_dict(self) -> StateDict:
        return {"total": self.total, "count": self.count}


class Meter:
    """One rank's part of a mean; checkpoints contain what was added so far."""

    def __init__(self, device: torch.device, mean: Mean, samples: Callable[[Any], float | None]) -> None:
        """
        Args:
            samples: returns the number of this rank's samples in the current training batch, or None outside of one.
                Called with the value that is added.
        """
        self._device = device
        self._mean = mean
        self._samples = samples
        self._clear()

    def _clear(self) -> None:
        self._total = torch.zeros((), dtype=torch.float64, device=self._device)
        self._count = 0.0

    def add(self, value: torch.Tensor | float, count: float | None = None) -> None:
        """Add the mean over some samples, weighted by their number.

        Args:
            value: the mean over this rank's samples; a tensor stays on its device, without synchronization.
            count: number of samples; None for that of the current batch of `run.loader`, which is 0 if this rank only
                computes on another rank's sample. Required for the value of an earlier batch.

        Raises:
            UserError: `value` is not a single number, or the number of samples is unknown.
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
        """Return the mean over all samples added on all ranks since the last call; NaN if there are none.

        Collective: every rank must call it.
        """
        mean = self._mean(self._total, self._count)
        self._clear()
        return mean

    def state(self) -> MeterState:
        return MeterState(self._total, self._count)

    def resume_from(self, states: Iterable[MeterState]) -> None:
        """Continue from saved states.

        Args:
            states: states of this rank, and of ranks that no longer exist.
        """
        self._clear()
        for state in states:
            self._total += state.total.to(self._device)
            self._count += state.count
