"""End a rank that has failed: show its traceback without the frames of this package, and exit soon.

A rank does not outlive a helper thread that fails (see `guarded_thread`).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_slurm.core import log_lines
from mgpu_slurm.core.errors import MgpuError
from mgpu_slurm.run_folder.record_types import Failure
from mgpu_slurm.run_folder.records import now

if TYPE_CHECKING:
    from mgpu_slurm.rank.rank_info import RankInfo
import sys

FAREWELL_SECONDS = 5.0
"""Seconds for the process group, threads and exit handlers of a failed rank; any of them may block forever."""

LAST_SECONDS = 75.0
"""Seconds after which the system kills a failed rank in any case, even if it is still writing a checkpoint."""


def own_traceback(error: BaseException) -> str:
    """Return the traceback without the frames of this package that lead to the user's function, and without those
    that follow if this package refuses what the user's code asks for."""
    start = error.__traceback__
    while start is not None and start.tb_next is not None and _is_of_this_package(start.tb_frame.f_code.co_filename):
        start = start.tb_next
    shown = traceback.TracebackException(type(error), error, start)
    while isinstance(error, MgpuError) and len(shown.stack) > 1 and _is_of_this_package(shown.stack[-1].filename):
        shown.stack.pop()
    return "".join(shown.format())


def _is_of_this_package(file: str) -> bool:
    return Path(file).is_relative_to(Path(__file__).parents[1])


def record(error: BaseException, shown: str, facts: RankInfo) -> Failure:
    """Return the record of an error in this rank.

    Args:
        shown: the traceback.
    """
    return Failure(
        rank=facts.rank,
        node=facts.node_name,
        time=now(),
        error=type(error).__name__,
        message=str(error),
        traceback=shown,
        # the other ranks lose their connection when one fails, so this is never the root cause
        consequence=any(map(_is_lost_connection, _chain(error))),
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those that it was raised for or while handling."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _is_lost_connection(error: BaseException) -> bool:
    # DistNetworkError is raised by torch's store, whose messages for a lost connection vary
    return type(error).__name__ == "DistNetworkError" or (
        isinstance(error, RuntimeError)
        and any(
            words in str(error)
            for words in ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "gloo")
        )
    )


def exit_code(error: BaseException) -> int:
    """Return the exit code that the interpreter would use: `sys.exit()` is a success, `sys.exit("words")` a failure."""
    if not isinstance(error, SystemExit):
        return 1
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def leave_soon(exit_code: int, saved: Callable[[], None] = lambda: None) -> None:
    """Make this process exit within `FAREWELL_SECONDS`, even if it is blocked.

    Args:
        saved: waits, for a limited additional time, until this rank has saved its part of a checkpoint.
    """

    def leave() -> None:
        with suppress(Exception):
            saved()
        signal.setitimer(signal.ITIMER_REAL, 2 * FAREWELL_SECONDS)
        time.sleep(FAREWELL_SECONDS)
        with suppress(Exception):
            # os._exit skips the exit handlers that would end them
            for child in multiprocessing.active_children():
                child.kill()
        os._exit(exit_code)

    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # kills the process even if C code holds the GIL, so that no thread can run
    signal.setitimer(signal.ITIMER_REAL, LAST_SECONDS)
    threading.Thread(target=leave, name="farewell", daemon=True).start()


def guarded_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread that prints its traceback and ends this process if it fails.

    Otherwise, its failure would only be noticed when the run hangs.
    """

    def guarded() -> None:
        try:
            work()
        except BaseException:
            log_lines.say(f"thread {name!r} of this process failed:", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            # the main thread may be blocked forever
            os._exit(1)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread
