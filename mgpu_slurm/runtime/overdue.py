"""A warning for work that is wanted at a boundary, if the loop comes to none."""

from __future__ import annotations

from collections.abc import Callable

AFTER = 100
"""Steps without a boundary."""


class Overdue:
    """Counts the steps for which a save or a stop has been wanted, and warns once."""

    def __init__(self) -> None:
        self._steps = 0
        self._has_warned = False

    def stepped(self, is_wanted: bool, reason: Callable[[], str]) -> None:
        """Count a step that is no boundary."""
        self._steps = self._steps + 1 if is_wanted else 0
        if self._steps >= AFTER and not self._has_warned:
            self._has_warned = True
            print(
                f"mgpu_slurm: WARNING: a checkpoint or a stop has been wanted for {AFTER} steps, and there was no place"
                f" for it: {reason()}",
                flush=True,
            )

    def at_boundary(self) -> None:
        self._steps = 0
