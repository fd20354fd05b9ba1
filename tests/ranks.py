"""Run functions on real ranks: processes that form a gloo group."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from mgpu_slurm.core import torch_versions
from mgpu_slurm.core.errors import RunStopped
from mgpu_slurm.job import store_server
from mgpu_slurm.rank.communication import rendezvous
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.signals import StopFlag
from mgpu_slurm.request.parallelism import Layout
from mgpu_slurm.training.run import Run
from tests.forks import FORKS

Work = Callable[..., Any]
KILLED = "killed"
PATIENCE = 90
"""Seconds in which a rank must answer."""


class Failed(str):
    """The error that a rank raised, as text."""


def run_ranks(
    work: Work,
    world_size: int,
    *arguments: Any,
    folder: Path | None = None,
    may_fail: bool = False,
    layout: Layout | None = None,
) -> list[Any]:
    """Call `work(run, *arguments)` on each rank; return the result of each, or as text that it was stopped or killed.

    Args:
        may_fail: also return a rank's error as text.
        layout: how the ranks share models; None for a copy on each.

    Raises:
        AssertionError: a rank failed, and `may_fail` is not set.
    """
    folder = folder or Path(tempfile.mkdtemp())
    facts = [RankInfo(rank, world_size, rank, world_size) for rank in range(world_size)]
    answers = join_ranks(_with_run, facts, work, folder, layout, arguments)
    failed = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, Failed)}
    assert may_fail or not failed, f"failed, by rank: {failed}"
    return answers


def join_ranks(body: Work, facts: list[RankInfo], *arguments: Any) -> list[Any]:
    """Call `body(facts, *arguments)` in one process per rank, with a rendezvous; return the results."""
    listener = store_server.bind("127.0.0.1")
    secret_file = Path(tempfile.mkdtemp()) / "secret"
    store_server.create_secret(secret_file)
    variables = store_server.exports("127.0.0.1", listener.getsockname()[1])
    variables |= {"GLOO_SOCKET_IFNAME": "lo", store_server.SECRET_VARIABLE: str(secret_file)}
    store = torch_versions.serve_store(listener)
    started = []
    for own in facts:
        here, there = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=_process, args=(there, body, own, variables, arguments))
        process.start()
        there.close()
        started.append((process, here))
    processes = [process for process, _ in started]
    try:
        answers = [_answer(here, processes) for _, here in started]
        for process in processes:
            process.join(60)
            assert process.exitcode in (0, -signal.SIGKILL)
    finally:
        # this program would wait for them at its end
        for process in processes:
            process.kill()
    del store
    return answers


def _answer(here: Connection, processes: list[ForkServerProcess]) -> Any:
    give_up = time.monotonic() + PATIENCE
    while not here.poll(0.1):
        assert time.monotonic() < give_up, "a rank did not answer"
        if any(process.exitcode == -signal.SIGKILL for process in processes) and not here.poll(10):
            # a launcher would end the other ranks: this one may wait for the killed one
            for process in processes:
                process.kill()
    try:
        return here.recv()
    except EOFError:
        return KILLED


def _process(there: Connection, body: Work, facts: RankInfo, variables: dict[str, str], arguments: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(variables)
    try:
        there.send(body(facts, *arguments))
    except RunStopped as stopped:
        there.send(f"RunStopped: {stopped}")
    except BaseException as error:
        there.send(Failed(f"{type(error).__name__}: {error}"))


def _with_run(facts: RankInfo, work: Work, folder: Path, layout: Layout | None, arguments: tuple[Any, ...]) -> Any:
    if facts.world_size > 1:
        rendezvous.join(facts, torch.device("cpu"), timeout=timedelta(seconds=60))
    try:
        return work(Run(facts, folder, torch.device("cpu"), 1, StopFlag(), layout=layout), *arguments)
    finally:
        torch_versions.destroy_groups()
