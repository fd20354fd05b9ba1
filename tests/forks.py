"""Processes that are forked from a server which has imported what they need, and done nothing with it, so that forks of
it are sound and fast. There is one such server for all tests of a process: what it imports is said here alone."""

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
