"""Tell a compilation by torch's compiler from a hang, in this rank and in those that it waits for.

A compilation may take longer than any step, and shows no sign of life of its own. It makes progress as long as this
process or those below it, such as a C++ compiler, compute. The other ranks hear of that by a file.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

from mgpu_slurm.core import processes
from mgpu_slurm.core.log_lines import PREFIX
from mgpu_slurm.rank import torch_adapter

SAID_AFTER = 30.0
"""Seconds of a compilation after which the log says so."""

LEAST_LOAD = 0.1
"""Part of a core that counts as computing: processes and threads that wait wake up now and then."""


class Compilation:
    """The compilations of one rank, as its watchdog sees them."""

    def __init__(self, mark: Path | None, mark_every: float) -> None:
        """
        Args:
            mark: file that shows the other ranks that this one compiles; None if they cannot see it.
            mark_every: seconds between two changes of the file.
        """
        self._mark = mark
        self._mark_every = mark_every
        self._since: float | None = None
        self._marked = 0.0
        self._has_said = False
        self._computed = self._looked = 0.0

    def makes_progress(self) -> bool:
        """Return whether torch compiles, and has computed since the last call. Always called by the same thread."""
        at = time.monotonic()
        if not torch_adapter.is_compiling():
            self.close()
            return False
        if self._since is None:
            self._since = self._marked = at
        elif at - self._since >= SAID_AFTER and not self._has_said:
            self._has_said = True
            # not print, in which another thread may be blocked
            os.write(1, f"{PREFIX}compiling the model: {at - self._since:.0f} s so far\n".encode())
        computed = processes.seconds_computed() - time.thread_time()
        is_alive = computed - self._computed >= LEAST_LOAD * (at - self._looked)
        self._computed, self._looked = computed, at
        if is_alive and at - self._marked >= self._mark_every:
            self._marked = at
            self._write(str(at))
        return is_alive

    def _write(self, text: str) -> None:
        if self._mark is not None:
            # without its mark, the others count as stuck
            with suppress(OSError):
                self._mark.write_text(text)

    def close(self) -> None:
        """Remove the file."""
        if self._since is not None and self._mark is not None:
            with suppress(OSError):
                self._mark.unlink(missing_ok=True)
        self._since = None


class OtherCompilations:
    """What the other ranks show of their compilations."""

    def __init__(self, mark: Path | None, rank: int) -> None:
        """
        Args:
            mark: file of this rank.
        """
        self._mark = mark
        self._pattern = "" if mark is None else mark.name.replace(f"-{rank}.", "-*.")
        self._seen: dict[Path, str] | None = None

    def make_progress(self) -> bool:
        """Return whether any rank has made progress in a compilation since the last call."""
        if self._mark is None:
            return False
        found: dict[Path, str] = {}
        with suppress(OSError):
            found = {path: path.read_text() for path in self._mark.parent.glob(self._pattern) if path != self._mark}
        before, self._seen = self._seen, found
        return before is not None and any(before.get(path) != text for path, text in found.items())

    def forget(self) -> None:
        """Forget what was seen, as this rank does not wait any more."""
        self._seen = None


def compiling_frame(watched: int) -> FrameType | None:
    """Return the innermost frame of the thread that compiles, which need not be the watched one: that of a backward
    pass does so, too. None if none does."""
    if not torch_adapter.is_compiling():
        return None
    own, frames = threading.get_ident(), sys._current_frames()
    threads = [watched, *(ident for ident in frames if ident not in (own, watched))]
    return next((frames[ident] for ident in threads if any(map(_is_compiler, _callers(frames[ident])))), None)


def _is_compiler(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    # a thread that reads from its workers is always there
    return path.startswith(torch_adapter.COMPILER_CODE) and "compile_worker" not in path


def _callers(innermost: FrameType) -> Iterator[FrameType]:
    frame: FrameType | None = innermost
    while frame is not None:
        yield frame
        frame = frame.f_back
