"""Threads that work next to the training: a rank does not outlive one that fails."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable


def start(work: Callable[[], None], name: str) -> threading.Thread:
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
