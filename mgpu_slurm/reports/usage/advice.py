"""What to ask for next time. Pure: from what runs asked for, what they used, and their ledgers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from mgpu_slurm.core.formatting import binary_size, duration
from mgpu_slurm.reports.usage.ledger import Ledger
from mgpu_slurm.reports.usage.resource_use import Asked, Used

MEMORY_FACTOR = 1.3
LOW_MEMORY, HIGH_MEMORY = 0.5, 0.9
"""Parts of the memory asked for, below and above which another amount is advised."""
GIB = 1 << 30

TIME_FACTOR = 1.5
LOW_TIME = 0.5
TIME_STEP = 300
"""Seconds to which a time limit is rounded up."""

LOW_CORES = 0.5
MOST_WAIT = 0.1
"""Seconds of waiting for a core, per busy second, above which nothing is known of the cores that are needed."""

LOW_GPU = 0.3
GPU_SECONDS = 600
"""Seconds for which a GPU has to be sampled before its use says anything."""
LOADER_WAITS = 0.2
"""Part of a step's time for batches from which the loader is named."""

MOST_STARTING, MOST_IDLE = 0.15, 0.1
LEAST_SECONDS = 600
"""Seconds of a run from which the parts of its ledger say anything."""


@dataclass(frozen=True)
class RunFacts:
    """A run, as far as advice depends on it."""

    run: str
    state: str
    asked: Asked
    used: Used
    ledger: Ledger
    data_wait: float | None = None
    """Part of a step's time for batches of the loader, as last reported; None if it is not known."""
    is_worker: bool = False

    @property
    def is_complete(self) -> bool:
        return self.state == "COMPLETED"


@dataclass(frozen=True)
class Advice:
    """One piece of advice for one or several runs."""

    kind: str
    """`memory`, `time`, `cores`, `gpu`, `loader`, `batch`, `workers`, `starting` or `range`."""
    runs: tuple[str, ...]
    flags: str
    """Flags of `submit` and `resume` to paste; empty if none would help."""
    why: str


def advice_for(runs: Iterable[RunFacts]) -> list[Advice]:
    """Return advice, in which runs with the same advice are together."""
    together: dict[tuple[str, str], Advice] = {}
    for run in runs:
        for rule in RULES:
            for found in rule(run):
                before = together.get((found.kind, found.flags))
                if before is not None:
                    found = replace(before, runs=(*before.runs, *found.runs))
                together[found.kind, found.flags] = found
    return list(together.values())


def _memory(run: RunFacts) -> Iterator[Advice]:
    asked, used = run.asked.mem, run.used
    # without knowing what processes share it is less than that, or as much
    peak = used.needed_memory
    is_out = run.state == "OUT_OF_MEMORY"
    if asked is None or (peak is None and not is_out):
        return
    # what has run out would have become more
    needed = max(peak or 0, asked) if is_out else peak or 0
    advised = math.ceil(needed * MEMORY_FACTOR / GIB)
    # one that failed at once, or has just begun, would have needed more
    is_typical = run.is_complete or used.seconds >= LEAST_SECONDS
    is_less = is_typical and needed < LOW_MEMORY * asked and advised * GIB < asked
    is_more = needed > HIGH_MEMORY * asked and (is_out or used.mem_shared is not None)
    if is_less or is_more:
        why = f"a node needed {binary_size(peak)} of {binary_size(asked)}" if peak else "a node ran out of memory"
        yield Advice("memory", (run.run,), f"--mem {advised}G", why)


def _time(run: RunFacts) -> Iterator[Advice]:
    asked, longest = run.asked.time, run.used.longest
    # a worker leaves when there is nothing left to do
    if asked is None or not run.is_complete or run.is_worker or longest >= LOW_TIME * asked:
        return
    advised = math.ceil(longest * TIME_FACTOR / TIME_STEP) * TIME_STEP
    if advised >= asked:
        return
    hours, minutes = divmod(advised // 60, 60)
    why = f"it took {duration(longest)} of {duration(asked)}; shorter jobs often start earlier"
    yield Advice("time", (run.run,), f"--time {hours}:{minutes:02d}:00", why)


def _cores(run: RunFacts) -> Iterator[Advice]:
    asked, cores, high, wait = run.asked.cpus_per_task, run.used.cores, run.used.cores_high, run.used.wait
    if asked is None or cores is None or high is None or wait is None or run.used.seconds < LEAST_SECONDS:
        return
    if wait > MOST_WAIT or cores * (1 + wait) >= LOW_CORES * asked:
        return
    advised = max(1, math.ceil(high))
    if advised < asked:
        why = f"a rank kept {cores:.1f} of {asked} cores busy, and at most {high:.1f} for long"
        yield Advice("cores", (run.run,), f"--cpus-per-task {advised}", why)


def _gpu(run: RunFacts) -> Iterator[Advice]:
    use = run.used.gpu
    if use is None or use >= LOW_GPU or (run.used.gpu_seconds or 0) <= GPU_SECONDS:
        return
    why = f"GPUs computed for {use:.0%} of the time"
    if run.data_wait is None:
        yield Advice("gpu", (run.run,), "", f"{why}: `submit --profile 10-13` shows what they wait for")
    elif run.data_wait >= LOADER_WAITS:
        waits = f"and waited for batches for {run.data_wait:.0%} of a step"
        yield Advice("loader", (run.run,), "", f"{why} {waits}: give the loader more workers")
    else:
        yield Advice("batch", (run.run,), "", f"{why} and did not wait for batches: larger batches may help")


def _workers(run: RunFacts) -> Iterator[Advice]:
    share = run.ledger.share("between_trials")
    if run.is_worker and share > MOST_IDLE and run.used.seconds >= LEAST_SECONDS:
        why = f"the worker had no trial for {share:.0%} of its time: use fewer workers"
        yield Advice("workers", (run.run,), "", why)


def _starting(run: RunFacts) -> Iterator[Advice]:
    share = run.ledger.share("starting")
    if share > MOST_STARTING and run.used.seconds >= LEAST_SECONDS:
        why = f"{share:.0%} of the time went into starting: a longer --time needs fewer starts, --stage reads data once"
        yield Advice("starting", (run.run,), "", why)


RULES: Sequence[Callable[[RunFacts], Iterator[Advice]]] = (_memory, _time, _cores, _gpu, _workers, _starting)
