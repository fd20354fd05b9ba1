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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mgpu_slurm.core.records import now

if TYPE_CHECKING:
    from mgpu_slurm.rank.rank_info import RankInfo
import sys

FAREWELL_SECONDS = 5.0
"""For the process group, threads and exit handlers of a rank that has failed; any of them may block for ever."""

LAST_SECONDS = 75.0
"""After which the system ends such a rank in any case, a checkpoint that is being written included."""


def own_traceback(error: BaseException) -> str:
    """The traceback from the user's function on: the frames that led there tell nobody anything."""
    start = error.__traceback__
    while start is not None and start.tb_next is not None and _is_of_this_package(start):
        start = start.tb_next
    return "".join(traceback.format_exception(type(error), error, start))


def _is_of_this_package(frame: TracebackType) -> bool:
    return Path(frame.tb_frame.f_code.co_filename).is_relative_to(Path(__file__).parents[1])


def record(error: BaseException, shown: str, facts: RankInfo) -> dict[str, Any]:
    return {
        "rank": facts.rank,
        "node": facts.node_name,
        "time": now(),
        "error": type(error).__name__,
        "message": str(error),
        "traceback": shown,
        # a lost connection is what the other ranks see when one fails: never the first cause
        "consequence": _is_lost_connection(error),
    }


def _is_lost_connection(error: BaseException) -> bool:
    # the name is that of torch's store, which words a lost connection in many ways
    return type(error).__name__ == "DistNetworkError" or (
        isinstance(error, RuntimeError)
        and any(
            words in str(error)
            for words in ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "gloo")
        )
    )


def exit_code(error: BaseException) -> int:
    """As the interpreter would end: `sys.exit()` is a success, `sys.exit("words")` is none."""
    if not isinstance(error, SystemExit):
        return 1
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def leave_soon(exit_code: int, saved: Callable[[], None] = lambda: None) -> None:
    """Have this process end in `FAREWELL_SECONDS`, whatever it is blocked on then.

    Args:
        saved: waits for what this rank is still saving, for a limited time, which comes on top.
    """

    def leave() -> None:
        with suppress(Exception):
            saved()
        signal.setitimer(signal.ITIMER_REAL, 2 * FAREWELL_SECONDS)
        time.sleep(FAREWELL_SECONDS)
        with suppress(Exception):
            # exit handlers would have ended them
            for child in multiprocessing.active_children():
                child.kill()
        os._exit(exit_code)

    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # ends the process also if C code keeps the interpreter's lock, so that no thread runs
    signal.setitimer(signal.ITIMER_REAL, LAST_SECONDS)
    threading.Thread(target=leave, name="farewell", daemon=True).start()


def guarded_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread that ends this process with its traceback if it fails.

    Nobody would miss it before the run waits in vain for what it does.
    """

    def guarded() -> None:
        try:
            work()
        except BaseException:
            print(f"mgpu_slurm: thread {name!r} of this process failed:", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            # the main thread may be blocked for ever
            os._exit(1)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread
