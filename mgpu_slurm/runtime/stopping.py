"""Signals that ask a run to stop: the handler sets a flag, and ranks act on it together at a step boundary.

A collective inside a handler deadlocks, and a save on one rank alone tears the checkpoint; so nothing happens here.
"""

from __future__ import annotations

import os
import signal
import time
from enum import IntEnum
from types import FrameType

LEAD_SIGNAL_VARIABLE = "MGPU_LEAD_SIGNAL"


class Stop(IntEnum):
    """What was asked, the stronger the higher."""

    NO = 0
    REQUEUE = 1
    """The time limit is near: save and come back."""
    LEAVE = 2
    """The time limit is very near: leave and come back, also where nothing was saved."""
    END = 3
    """SIGTERM: save and leave; who sent it decides what comes next."""


class StopFlag:
    """The strongest request that this rank has received so far."""

    def __init__(self, leave_after: float | None = None) -> None:
        """
        Args:
            leave_after: seconds after the lead signal at which this rank has to be gone, saved or not; None for one
                that stays to its end.
        """
        self._leave_after = leave_after
        self.asked = Stop.NO
        self._asked_at = 0.0

    @property
    def due(self) -> Stop:
        """What is to be done now."""
        is_late = self._leave_after is not None and time.monotonic() - self._asked_at >= self._leave_after
        return Stop.LEAVE if self.asked is Stop.REQUEUE and is_late else self.asked

    def listen(self) -> None:
        """Takes over the lead signal and SIGTERM of this process."""
        lead = os.environ.get(LEAD_SIGNAL_VARIABLE, "USR2")
        signal.signal(getattr(signal, f"SIG{lead}"), self._on_lead)
        signal.signal(signal.SIGTERM, self._on_term)

    def _on_lead(self, signum: int, frame: FrameType | None) -> None:
        if self.asked is Stop.NO:
            self.asked, self._asked_at = Stop.REQUEUE, time.monotonic()

    def _on_term(self, signum: int, frame: FrameType | None) -> None:
        self.asked = Stop.END


def ignore_stop_signals() -> None:
    """For processes that a rank starts: they get the run's signals too, and must not die before the save."""
    for name in {os.environ.get(LEAD_SIGNAL_VARIABLE, "USR2"), "TERM", "INT"}:
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
