"""The progress of a run, as stored in checkpoints and restored by a new attempt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.data.loader_positions import LoaderPlaces
from mgpu_slurm.data.loaders import Loader


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
        self.goes_on_in_pass = False
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
                f"run.restore({name}=...): {self.loader_name!r} is a loader already: give the one that drives the loop,"
                " at whose batches the run can stop; the others are restored with it"
            )
        self.loader_name, self.loader = name, loader
        self.loaders.driver = loader.place

    def facts(self, in_pass: bool) -> dict[str, Any]:
        """Return the progress to store in a checkpoint.

        Args:
            in_pass: whether the run is within a pass over the loader.
        """
        batch, passes = (self.loader.place.batch, self.loader.place.passes) if self.loader is not None else (0, 0)
        return {
            "step": self.step,
            "progress": self.progress,
            "metrics": self.metrics,
            "next_epoch": self.epoch if in_pass and self.epoch is not None else self.next_epoch,
            "in_epochs": self.next_epoch <= self.last_epoch,
            # distinguishes checkpoints of the same step; the beginning of a pass is the end of the previous one
            "place": [self.progress, batch if in_pass else 0, passes - in_pass, *self.loaders.others(in_pass)],
            "loader": {
                "name": self.loader_name,
                "active": in_pass,
                "batch": batch if in_pass else 0,
                # a resumed run begins this pass again
                "passes": passes - in_pass,
            },
            "loaders": self.loaders.facts(in_pass),
        }

    def begin_epochs(self, last: int) -> None:
        """Record that a loop over `state.epochs` begins."""
        self.loaders.begin_loop()
        self.last_epoch, self.awaits_epochs = last, False

    def leave_loop(self) -> None:
        """Record that the job has left its loop: an epoch left by `break` is over."""
        if self.epoch is not None:
            self.next_epoch, self.epoch = self.epoch + 1, None

    def go_to(self, facts: Mapping[str, Any]) -> None:
        """Set the progress to that of a checkpoint."""
        self.step, self.progress, self.metrics = facts["step"], facts["progress"], facts["metrics"]
        self._restored_at = self.step, self.progress
        self.next_epoch, self.goes_on_in_pass = facts["next_epoch"], facts["loader"]["active"]
        # v0.1 saved only the place of one loader, and not whether it was within an epoch
        self.awaits_epochs = facts.get("in_epochs", False)
        self.loaders.go_to(facts.get("loaders", []))
        if self.loader is not None:
            place = self.loader.place
            place.first_batch, place.passes, place.next_epoch = (
                facts["loader"]["batch"],
                facts["loader"]["passes"],
                None,
            )
