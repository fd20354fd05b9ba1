"""Where a run stands: what a checkpoint says of it, and what a new attempt goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.data.loader_positions import LoaderPlaces
from mgpu_slurm.data.loaders import Loader


class Position:
    """The same on all ranks."""

    def __init__(self) -> None:
        self.step = 0
        """Optimizer steps done, over all attempts."""
        self.progress = 0
        """The last one reported, and its metrics."""
        self.metrics: dict[str, float] = {}
        self.epoch: int | None = None
        """That of `state.epochs` which goes on."""
        self.next_epoch = 1
        self.last_epoch = 0
        """That of the loop over `state.epochs`; 0 outside of it."""
        self.awaits_epochs = False
        """It was restored in such a loop, and that has not begun yet."""
        self.loader: Loader | None = None
        """The one that is restored: its batches are places to go on from."""
        self.loader_name = ""
        self.goes_on_in_pass = False
        """It was restored there, and has not come to its next batch yet."""
        self.loaders = LoaderPlaces()
        self._restored_at: tuple[int, int] | None = None
        """Step and progress of the checkpoint that this attempt has loaded."""

    @property
    def has_moved(self) -> bool:
        """Whether this attempt has taken a step or reported anything."""
        return (self.step, self.progress) != self._restored_at

    def follow(self, name: str, loader: Loader) -> None:
        """Note the loader that is restored, and the name that the job has given it.

        Raises:
            UserError: there is one already.
        """
        if self.loader is not None:
            raise UserError(
                f"run.restore({name}=...): {self.loader_name!r} is a loader already: give the one that drives the loop,"
                " at whose batches the run can stop; the others are restored with it"
            )
        self.loader_name, self.loader = name, loader
        self.loaders.driver = loader.place

    def facts(self, in_pass: bool) -> dict[str, Any]:
        """What a checkpoint of here holds.

        Args:
            in_pass: whether a pass over the loader goes on.
        """
        batch, passes = (self.loader.place.batch, self.loader.place.passes) if self.loader is not None else (0, 0)
        return {
            "step": self.step,
            "progress": self.progress,
            "metrics": self.metrics,
            "next_epoch": self.epoch if in_pass and self.epoch is not None else self.next_epoch,
            "in_epochs": self.next_epoch <= self.last_epoch,
            # tells checkpoints of one step apart; the begin of a pass is the end of the one before
            "place": [self.progress, batch if in_pass else 0, passes - in_pass, *self.loaders.others(in_pass)],
            "loader": {
                "name": self.loader_name,
                "active": in_pass,
                "batch": batch if in_pass else 0,
                # the pass that was begun is begun again
                "passes": passes - in_pass,
            },
            "loaders": self.loaders.facts(in_pass),
        }

    def begin_epochs(self, last: int) -> None:
        """Note that a loop over `state.epochs` begins."""
        self.loaders.begin_loop()
        self.last_epoch, self.awaits_epochs = last, False

    def leave_loop(self) -> None:
        """Note that the job has left its loop: an epoch that it left by `break` is over."""
        if self.epoch is not None:
            self.next_epoch, self.epoch = self.epoch + 1, None

    def go_to(self, facts: Mapping[str, Any]) -> None:
        """Takes over what a checkpoint holds."""
        self.step, self.progress, self.metrics = facts["step"], facts["progress"], facts["metrics"]
        self._restored_at = self.step, self.progress
        self.next_epoch, self.goes_on_in_pass = facts["next_epoch"], facts["loader"]["active"]
        # v0.1 saved the place of one loader, and not whether that was in an epoch
        self.awaits_epochs = facts.get("in_epochs", False)
        self.loaders.go_to(facts.get("loaders", []))
        if self.loader is not None:
            place = self.loader.place
            place.first_batch, place.passes, place.next_epoch = (
                facts["loader"]["batch"],
                facts["loader"]["passes"],
                None,
            )
