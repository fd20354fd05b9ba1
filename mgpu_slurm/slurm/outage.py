"""Wait for a SLURM controller that does not answer, and report it once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.slurm import commands

SECONDS = 300.0
"""Seconds for which a login node waits."""

PAUSES = (3.0, 3.0, 5.0, 10.0, 15.0)
"""Seconds between requests; the last applies to all later ones. A controller may still work on a request that nobody
waits for any more, and it serves thousands of clients."""

Answer = TypeVar("Answer")


class Patience:
    """The time left for SLURM to answer."""

    def __init__(self, note: Note = quiet, seconds: float | None = None) -> None:
        self._note = note
        self._seconds = SECONDS if seconds is None else seconds
        self._give_up = time.monotonic() + self._seconds
        self._told = False
        self._pauses = 0

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._give_up

    def tell(self, problem: commands.SlurmUnavailable) -> None:
        """Report the problem, the first time only."""
        if self._told:
            return
        self._told = True
        what = "accepts no jobs at the moment" if problem.request == commands.BUSY else "does not answer"
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + self._give_up - time.monotonic()))
        self._note(f"SLURM's controller {what}; trying again until {until}; Ctrl-C stops waiting")

    def pause(self) -> None:
        time.sleep(PAUSES[min(self._pauses, len(PAUSES) - 1)])
        self._pauses += 1


def wait_out(ask: Callable[[], Answer], note: Note = quiet) -> Answer:
    """Call `ask` until SLURM answers, and return the answer.

    Raises:
        ClusterError: SLURM refuses, or has not answered for too long.
    """
    patience = Patience(note)
    while True:
        try:
            return ask()
        except commands.SlurmUnavailable as problem:
            if patience.is_over:
                raise
            patience.tell(problem)
        patience.pause()
