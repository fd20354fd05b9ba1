"""The progress of a run and the means over its epoch, as stored in checkpoints and restored by a new attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mgpu_slurm.checkpoints.rank_record import PassRecord, ProgressRecord
from mgpu_slurm.core import log_lines
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.data.loader_positions import LoaderPlaces
from mgpu_slurm.data.loaders import Loader
from mgpu_slurm.data.randomness import RandomState
from mgpu_slurm.rank.communication.codec import StateDict
from mgpu_slurm.run_folder.record_types import from_known

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

    def __init__(
        self, device: torch.device, mean: Mean, samples: Callable[[Any], float | None], ranks_per_batch: int = 1
    ) -> None:
        """
        Args:
            samples: returns the number of this rank's samples in the current training batch, or None outside of one.
                Called with the value that is added.
            ranks_per_batch: number of ranks that add the same samples.
        """
        self._share = 1.0 / ranks_per_batch
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
            raise UserError("meter.add: not in a batch of run.loader: pass the number of samples as `count`")
        number = torch.as_tensor(value).detach()
        if number.numel() != 1:
            raise UserError(f"meter.add: expected a number, got a tensor of shape {[*number.shape]}: take its mean")
        count *= self._share
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


class Position:
    """The progress of a run; the same on all ranks."""

    def __init__(self) -> None:
        self.step = 0
        """Optimizer steps done, over all attempts."""
        self.progress = 0
        """The last progress reported; `metrics` holds its metrics."""
        self.metrics: dict[str, float] = {}
        self.epoch: int | None = None
        """The current epoch of `state.epochs`."""
        self.next_epoch = 1
        self.last_epoch = 0
        """The last epoch of the loop over `state.epochs`; 0 outside of it."""
        self.awaits_epochs = False
        """Whether the run was restored within such a loop, and the loop has not begun yet."""
        self.loader: Loader | None = None
        """The loader passed to `restore`: the run can be resumed at its batches."""
        self.loader_name = ""
        self.continues_in_pass = False
        """Whether the run was restored within a pass over it, and has not reached its next batch yet."""
        self.loaders = LoaderPlaces()
        self._restored_at: tuple[int, int] | None = None
        """Step and progress of the checkpoint that this attempt loaded."""

    @property
    def has_moved(self) -> bool:
        """Whether this attempt has taken a step or reported anything."""
        return (self.step, self.progress) != self._restored_at

    def follow(self, name: str, loader: Loader) -> None:
        """Record the loader passed to `restore`, and its name there.

        Raises:
            UserError: there already is one.
        """
        if self.loader is not None:
            raise UserError(
                f"run.restore({name}=...): {self.loader_name!r} is a loader already: pass only the one that drives the"
                " loop, at whose batches the run can stop; the others are restored with it"
            )
        self.loader_name, self.loader = name, loader
        self.loaders.driver = loader.place

    def record(self, in_pass: bool) -> ProgressRecord:
        """Return the progress to store in a checkpoint.

        Args:
            in_pass: whether the run is within a pass over the loader.
        """
        batch, passes = (self.loader.place.batch, self.loader.place.passes) if self.loader is not None else (0, 0)
        # the beginning of a pass is the end of the previous one; a resumed run begins this pass again
        batch, passes = batch if in_pass else 0, passes - in_pass
        return ProgressRecord(
            step=self.step,
            progress=self.progress,
            metrics=self.metrics,
            next_epoch=self.epoch if in_pass and self.epoch is not None else self.next_epoch,
            in_epochs=self.next_epoch <= self.last_epoch,
            place=[self.progress, batch, passes, *self.loaders.others(in_pass)],
            loader=PassRecord(self.loader_name, in_pass, batch, passes),
            loaders=self.loaders.records(in_pass),
        )

    def begin_epochs(self, last: int) -> None:
        """Record that a loop over `state.epochs` begins."""
        self.loaders.begin_loop()
        self.last_epoch, self.awaits_epochs = last, False

    def leave_loop(self) -> None:
        """Record that the job has left its loop: an epoch left by `break` is over."""
        if self.epoch is not None:
            self.next_epoch, self.epoch = self.epoch + 1, None

    def resume_from(self, record: ProgressRecord) -> None:
        """Set the progress to that of a checkpoint."""
        self.step, self.progress, self.metrics = record.step, record.progress, dict(record.metrics)
        self._restored_at = self.step, self.progress
        self.next_epoch, self.continues_in_pass = record.next_epoch, record.loader.active
        self.awaits_epochs = record.in_epochs
        self.loaders.resume_from(record.loaders)
        if self.loader is not None:
            place, loader = self.loader.place, record.loader
            place.first_batch, place.passes, place.next_epoch = loader.batch, loader.passes, None


@dataclass(frozen=True)
class RankState:
    """The state of one rank that other ranks do not share."""

    random: RandomState
    meters: Mapping[str, MeterState]
    scaler: StateDict | None = None
    """The state of the gradient scaler, which is the same on all ranks; None without one."""
    memory: StateDict | None = None
    """How many samples a rank could compute at once, the same on all ranks; None if all of a batch."""
    grid: tuple[int, int, int] | None = None
    """The numbers of stages, of parts of each batch, and of ranks that compute a layer together; None if each rank has
    a part of its own."""

    def state_dict(self) -> StateDict:
        meters = {name: meter.state_dict() for name, meter in self.meters.items()}
        shared = {"scaler": self.scaler, "memory": self.memory}
        grid = {} if self.grid is None else {"grid": self.grid}
        known = {name: state for name, state in shared.items() if state is not None}
        return {"random": self.random.state_dict(), "meters": meters} | known | grid

    @staticmethod
    def from_state_dict(state: StateDict) -> RankState:
        meters = {name: from_known(MeterState, meter) for name, meter in state["meters"].items()}
        random = from_known(RandomState, state["random"])
        return RankState(random, meters, state.get("scaler"), state.get("memory"), state.get("grid"))


WARN_AFTER = 100
"""Steps without a boundary before a warning."""


class Overdue:
    """Counts the steps for which a save or a stop has been requested, and warns once."""

    def __init__(self) -> None:
        self._steps = 0
        self._has_warned = False

    def stepped(self, is_wanted: bool, reason: Callable[[], str]) -> None:
        """Count a step without a boundary."""
        self._steps = self._steps + 1 if is_wanted else 0
        if self._steps >= WARN_AFTER and not self._has_warned:
            self._has_warned = True
            log_lines.warn(
                f"a checkpoint or a stop has been pending for {WARN_AFTER} steps, but there was no place for it:"
                f" {reason()}"
            )

    def at_boundary(self) -> None:
        self._steps = 0
