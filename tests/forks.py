"""Fork processes from a server that has imported the modules they need and run nothing, so forks are safe and fast.

All tests of a process share the server, so its imports are listed here only."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from mgpu_slurm.core.errors import UserError

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "mgpu_slurm.training.run",
        "tests.sweeps.study.test_storage",
        "alembic.command",
        "psycopg",
    ]
)


def in_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a function's result, or the error with which it refuses its arguments, in a process of its own."""
    here, there = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_send_result, args=(there, function, arguments))
    process.start()
    there.close()
    result = here.recv()
    process.join()
    assert process.exitcode == 0
    return result


def _send_result(there: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        there.send(function(*arguments))
    except UserError as error:
        there.send(error)
