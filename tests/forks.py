"""Fork processes from a server that has imported the modules they need and run nothing, so forks are safe and fast.

All tests of a process share the server, so its imports are listed here only."""

from __future__ import annotations

import multiprocessing

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
