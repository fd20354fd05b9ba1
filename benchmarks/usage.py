"""What sampling the use of a node costs."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.measure import interleave, median
from benchmarks.report import Row, Section
from mgpu_slurm.core import process_usage
from mgpu_slurm.core.files import append_jsonl
from mgpu_slurm.job.sampling.node_sampler import NodeSampler
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.records import now
from mgpu_slurm.run_folder.usage_records import UsageSample

CALLS = 200
ROUNDS = 20
LIMIT = 200.0
"""Microseconds."""
RANKS, WORKERS = 8, 4
BYTES = 400 << 20


def run() -> Section:
    with tempfile.TemporaryDirectory() as folder, _ranks(1, 0) as one, _ranks(RANKS, WORKERS) as many:
        samplers = [_sampler(Path(folder, name), pids) for name, pids in (("one", one), ("many", many))]
        sample = UsageSample(time=now(), cpu=1.23, wait=0.1, rss=BYTES, peak=BYTES, ranks=1)
        found = interleave(
            {
                "one": lambda: _cost(samplers[0].look),
                "many": lambda: _cost(samplers[1].look, calls=20),
                "write": lambda: _cost(
                    lambda: append_jsonl(Path(folder, "lines"), *(sample.to_json() for _ in range(6)))
                ),
                "ranks": lambda: _cost(lambda: process_usage.with_entries(["MGPU_NONE=1"]), calls=20),
                "shared": lambda: _cost(lambda: process_usage.shared_once(one, 1 << 30), calls=20),
            },
            ROUNDS,
        )
    rows = [
        Row("CPU time of a sample of one rank", median(found["one"]), "us", 0, LIMIT),
        Row(
            f"CPU time of a sample of {RANKS} ranks with {WORKERS} loader workers each",
            median(found["many"]),
            "us",
            0,
        ),
        Row("CPU time of a write of six samples, once a minute", median(found["write"]), "us", 0),
        Row("CPU time of a look for ranks, once a minute", median(found["ranks"]), "us", 0),
        Row(
            "CPU time of measuring its shared memory, at most once a minute",
            median(found["shared"]),
            "us",
            0,
        ),
    ]
    count = len([name for name in os.listdir("/proc") if name.isdigit()])
    return Section("usage", _ABOUT, rows, [f"There were {count} processes on the machine after it."])


def _sampler(path: Path, pids: Sequence[int]) -> NodeSampler:
    path.mkdir()
    sampler = NodeSampler(RunFolder(path), 1, "n1", lambda: pids, None)
    # the first look is written at once
    sampler.look()
    return sampler


@contextmanager
def _ranks(count: int, workers: int) -> Iterator[list[int]]:
    """Have processes that hold memory and have torch's threads, each with processes below it."""
    ready, done = os.pipe()
    pids = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            _be_rank(done, workers)
        pids.append(pid)
    for _ in range(count * (workers + 1)):
        os.read(ready, 1)
    try:
        yield pids
    finally:
        for pid in pids:
            for each in process_usage.TreeReader().read([pid])[pid].pids[::-1]:
                os.kill(each, signal.SIGKILL)
            os.waitpid(pid, 0)


def _be_rank(done: int, workers: int) -> None:
    # workers are forked before the threads exist, and have less memory
    for _ in range(workers):
        if os.fork() == 0:
            _wait(done)
    torch.set_num_threads(4)
    held = torch.ones(BYTES // 4 // (RANKS if workers else 1))
    held.sum()
    _wait(done)


def _wait(done: int) -> None:
    os.write(done, b".")
    while True:
        signal.pause()


def _cost(call: object, calls: int = CALLS) -> float:
    """Return the CPU microseconds of a call."""
    assert callable(call)
    begun = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - begun) / calls * 1e6


_ABOUT = (
    "What the thread does that samples a node every ten seconds, without GPUs: NVML was not measured. One rank holds"
    f" {BYTES >> 20} MB and has four threads of torch; {RANKS} ranks hold {BYTES // RANKS >> 20} MB each, and have"
    f" {WORKERS} processes below each of them."
)
