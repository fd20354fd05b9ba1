"""Calls of `run`, and what they are compared with, in blocks that take turns; see `benchmarks/report_cost.py`."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter

from benchmarks.measure import interleave
from mgpu_slurm import Run

WARM_UPS = 3
"""Rounds that do not count: they open files."""


@dataclass
class Config:
    calls: int
    """Per block."""
    rounds: int


def train(run: Run, config: Config) -> dict[str, float]:
    steps = itertools.count(1)
    writer = SummaryWriter(str(run.folder / "scalars")) if run.is_main else None

    def report() -> None:
        run.report(next(steps), loss=0.1, accuracy=0.9)

    def two_scalars() -> None:
        if writer is not None:
            step = next(steps)
            writer.add_scalar("loss", 0.1, step)
            writer.add_scalar("accuracy", 0.9, step)

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(torch.zeros(2, dtype=torch.float64)),
        "mean": lambda: run.mean(1.0, 2.0),
        "report": report,
        "two_scalars": two_scalars,
    }
    cases = {name: functools.partial(seconds_per_call, call, config.calls) for name, call in calls.items()}
    seconds = interleave(cases, config.rounds, WARM_UPS)
    (run.folder / f"blocks-{run.rank}.json").write_text(json.dumps(seconds))
    if writer is not None:
        writer.close()
    return {"rounds": config.rounds}


def seconds_per_call(call: Callable[[], object], count: int) -> float:
    """Of one block; all ranks start it together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count
