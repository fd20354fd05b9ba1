"""A thread that looks at something every ten seconds, and never disturbs the training in whose process it runs."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress

FIRST_SECONDS = 1.0
"""Before the first look."""
SECONDS = 10.0
"""Between two looks."""
LATER_SECONDS, LATER_AFTER = 60.0, 3600.0
"""Between two looks of a thread that looks less often once it is an hour old."""

CLOSE_SECONDS = 5.0
"""To wait for the last look at the end: a disk or a GPU may never answer."""


class SamplerThread(ABC):
    """Looks until it is closed. What fails is left out: no training ends because of it."""

    slows_down = False
    """Whether it looks less often later on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        # a process that may have no more threads is not sampled
        with suppress(RuntimeError):
            thread.start()
            self._thread = thread

    def close(self) -> None:
        """Stop the thread, after what it has left to do."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    @abstractmethod
    def prepare(self) -> bool:
        """Prepare the looks, before the first one; return whether there is anything to look at."""

    @abstractmethod
    def look(self) -> None:
        """Look once."""

    def finish(self) -> None:  # noqa: B027
        """Do what is left to do when the thread is closed."""

    def _serve(self) -> None:
        with suppress(Exception):
            begun = time.monotonic()
            # what a rank does first is not held up
            wait, is_ready = FIRST_SECONDS, False
            while not self._is_closed.wait(wait):
                if not is_ready and not self.prepare():
                    return
                is_ready = True
                # the next one may succeed
                with suppress(Exception):
                    self.look()
                is_late = self.slows_down and time.monotonic() - begun > LATER_AFTER
                wait = LATER_SECONDS if is_late else SECONDS
            self.finish()
