"""A job whose ranks start processes of their own and end them, in all the ways that multiprocessing has: as a job
function, and as a script that attaches."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

METHODS = ("fork", "forkserver", "spawn")
LONG = 3600.0
"""Seconds that a child sleeps which nobody ends."""


def a_pool(context: BaseContext) -> None:
    with context.Pool(2) as pool:
        assert pool.map(abs, range(-4, 0)) == [4, 3, 2, 1]


def an_executor(context: BaseContext) -> None:
    with ProcessPoolExecutor(2, mp_context=context) as executor:
        assert list(executor.map(abs, range(-4, 0))) == [4, 3, 2, 1]


def a_terminated_child(context: BaseContext) -> None:
    child = context.Process(target=time.sleep, args=(LONG,))  # type: ignore[attr-defined]
    child.start()
    child.terminate()
    child.join()
    assert child.exitcode == -signal.SIGTERM, child.exitcode


def a_terminated_program() -> None:
    # with a function to call before it becomes the program it is forked as a child of multiprocessing is
    for options in ({}, {"preexec_fn": os.getpid}):
        child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({LONG})"], **options)  # type: ignore
        child.terminate()
        assert child.wait() == -signal.SIGTERM


def rounds(count: int, record: Path) -> None:
    """Writes down what is done, so that a test can tell which child was waited for in vain."""
    for turn in range(count):
        for method in METHODS:
            for ends in (a_pool, an_executor, a_terminated_child):
                record.write_text(json.dumps([turn, method, ends.__name__]))
                ends(multiprocessing.get_context(method))
        a_terminated_program()
    for method in METHODS:
        # left for the end of the rank
        context: Any = multiprocessing.get_context(method)
        context.Process(target=time.sleep, args=(LONG,), daemon=True).start()
    record.write_text("done")


def train(run: Any, config: dict[str, Any]) -> dict[str, float]:
    rounds(config["rounds"], run.folder / f"children-{run.rank}")
    return {"done": 1.0}


if __name__ == "__main__":
    from mgpu_slurm import attach

    attached = attach()
    rounds(int(sys.argv[1]), attached.folder / f"children-{attached.rank}")
