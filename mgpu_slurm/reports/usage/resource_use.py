"""What a run had asked for, and what it used of that."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from mgpu_slurm.core.files import read_json, write_json
from mgpu_slurm.reports.usage.run_times import AttemptTimes
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import from_known
from mgpu_slurm.run_folder.usage_records import NodeUsage, UsageSample
from mgpu_slurm.slurm.step_accounting import AccountedStep

_MEMORY = re.compile(r"(?P<number>\d+)(?P<unit>[KMGT]?)B?", re.IGNORECASE)
_UNITS = {"K": 1 << 10, "": 1 << 20, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

CLOCKS_DIFFER = timedelta(minutes=5)


@dataclass(frozen=True)
class Asked:
    """What a run asks for, per node and rank; None for what it leaves to the cluster."""

    nodes: int
    ranks_per_node: int
    gpus_per_node: int | None
    cpus_per_task: int | None
    mem: int | None
    """Bytes per node."""
    time: int | None
    """Seconds."""

    @staticmethod
    def of(resources: Resources) -> Asked:
        return Asked(
            resources.nodes,
            resources.ranks_per_node,
            resources.gpus_per_node,
            resources.cpus_per_task,
            memory_of(resources.mem),
            resources.time_limit,
        )

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Return what decides on how much a rank and a node use."""
        return self.nodes, self.ranks_per_node, self.gpus_per_node, self.cpus_per_task

    @property
    def unit(self) -> str:
        """Return what is allocated, for the ledger: `gpu`, or `core` without GPUs."""
        return "gpu" if self.gpus_per_node else "core"

    @property
    def units_per_node(self) -> int:
        """Return the GPUs of a node, or its cores."""
        return self.gpus_per_node or self.ranks_per_node * (self.cpus_per_task or 1)


def memory_of(text: str | None) -> int | None:
    """Return the bytes of `--mem`; None without it, or if sbatch's format has another word for it."""
    match = _MEMORY.fullmatch(text or "")
    number = int(match["number"]) if match else 0
    # 0 stands for all memory of a node
    return number * _UNITS[match["unit"].upper()] if match and number else None


@dataclass(frozen=True)
class Used:
    """What a run used. What is None was not measured."""

    seconds: float
    """Of all attempts together."""
    longest: float
    """Seconds of the longest attempt of those that count for all values below: see `used`."""
    cpu: float | None = None
    """CPU seconds of all ranks, in the attempts that were sampled."""
    cores: float | None = None
    """Cores that a rank kept busy, on average."""
    cores_high: float | None = None
    """The same, with cores that it waited for, in all but the busiest twentieth of the time."""
    wait: float | None = None
    """Seconds that threads waited for a core, per second in which they had one."""
    mem: int | None = None
    """Highest bytes of memory that the ranks of a node needed; shared pages count once for each process."""
    mem_shared: int | None = None
    """The same, but shared pages count once; None if it is not known how much is shared."""
    read: int | None = None
    wrote: int | None = None
    """Bytes from and to disks."""
    gpu: float | None = None
    """Part of the time in which a kernel ran, as a mean over GPUs and samples."""
    gpu_mem: int | None = None
    """Highest bytes on any GPU."""
    watts: float | None = None
    """Mean of one GPU."""
    gpu_seconds: float | None = None
    """Seconds over which GPUs were sampled."""

    @property
    def needed_memory(self) -> int | None:
        """Return the bytes of memory that a node needed; if it is not known what processes share, more than that."""
        return self.mem if self.mem_shared is None else self.mem_shared


def used(
    attempts: Sequence[AttemptTimes], asked: Asked, nodes: Sequence[NodeUsage], accounted: Sequence[AccountedStep]
) -> Used:
    """Return what a run used, in the attempts that had the nodes, ranks and GPUs for which it asks now.

    Args:
        nodes: what was sampled.
        accounted: what SLURM's accounting says.
    """
    # an earlier attempt may have had other nodes, ranks or GPUs
    known = {
        each.attempt: each
        for each in attempts
        if each.resources is None or Asked.of(each.resources).shape == asked.shape
    }
    jobs = {each.job_id for each in known.values()}
    nodes = [each for each in nodes if each.attempt in known]
    accounted = [step for step in accounted if step.job_id in jobs]
    # each of an attempt's nodes has a file
    seconds = sum(known[each.attempt].seconds for each in nodes)
    samples = [sample for each in nodes for sample in each.samples]
    intervals = [interval for each in nodes for interval in _intervals(each.samples)]
    cpu = sum(each.cpu for each in nodes)
    sampled_cpu = sum(sample.cpu for sample in samples)
    waits = [sample.wait for sample in samples if sample.wait is not None]
    # the only sample of a short run is of a node whose ranks have ended
    has_io = any(each.ranks for each in samples)
    peak = max([*(each.peak for each in nodes), *(step.mem for step in accounted)], default=0)
    shared = [each.shared for each in nodes]
    measured = [each for each in shared if each is not None]
    return Used(
        seconds=sum(each.seconds for each in attempts),
        longest=max((each.seconds for each in known.values()), default=0.0),
        cpu=cpu if nodes else sum(step.cpu for step in accounted) if accounted else None,
        cores=cpu / (seconds * asked.ranks_per_node) if seconds else None,
        cores_high=_high(intervals, asked.ranks_per_node),
        wait=sum(waits) / sampled_cpu if waits and sampled_cpu else None,
        mem=peak or None,
        mem_shared=max(0, peak - min(measured)) if measured and len(measured) == len(shared) else None,
        read=sum(each.read for each in samples) if has_io else None,
        wrote=sum(each.wrote for each in samples) if has_io else None,
        gpu=_mean_of_gpus(intervals, "util"),
        gpu_mem=max((gpu.mem for sample in samples for gpu in sample.gpu if gpu.mem is not None), default=None),
        watts=_mean_of_gpus(intervals, "watts"),
        gpu_seconds=_seconds_with_gpus(nodes),
    )


Intervals = Sequence[tuple[float, UsageSample]]
"""Samples except the first, with the seconds since the one before: later in a run, samples are rarer."""


def _intervals(samples: Sequence[UsageSample]) -> Intervals:
    times = [datetime.fromisoformat(sample.time).timestamp() for sample in samples]
    # the last one may come at once after the one before
    return [
        (max(1.0, now - before), sample) for (before, now), sample in zip(pairwise(times), samples[1:], strict=True)
    ]


def _high(intervals: Intervals, ranks: int) -> float | None:
    """Return the cores that a rank kept busy, or waited for, in all but the busiest twentieth of the time."""
    rates = sorted(((sample.cpu + (sample.wait or 0.0)) / seconds / ranks, seconds) for seconds, sample in intervals)
    left = 0.95 * sum(seconds for seconds, _ in intervals)
    for rate, seconds in rates:
        left -= seconds
        if left <= 0:
            return rate
    return rates[-1][0] if rates else None


def _mean_of_gpus(intervals: Intervals, name: str) -> float | None:
    """Return the mean of a value over GPUs and time."""
    values = [
        (seconds, value)
        for seconds, sample in intervals
        for gpu in sample.gpu
        if (value := getattr(gpu, name)) is not None
    ]
    total = sum(seconds for seconds, _ in values)
    return sum(seconds * value for seconds, value in values) / total if total else None


def _seconds_with_gpus(nodes: Sequence[NodeUsage]) -> float | None:
    """Return the longest time for which a node's GPUs were sampled; None if no GPU was."""
    found = [sum(s for s, sample in _intervals(each.samples) if sample.gpu) for each in nodes]
    return max(found, default=0.0) or None


# -- SLURM's accounting, which is asked once


@dataclass(frozen=True)
class Accounted:
    """What accounting has answered about a run."""

    attempts: int = 0
    """Number of attempts that the run had then; 0 if accounting was not asked."""
    steps: Sequence[AccountedStep] = ()


def read_accounted(folder: RunFolder) -> Accounted:
    """Return what was kept of accounting's answer about a run."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = read_json(folder.accounting)
        if found is not None:
            return Accounted(found["attempts"], [from_known(AccountedStep, each) for each in found["steps"]])
    return Accounted()


def own_steps(steps: Sequence[AccountedStep], attempts: Sequence[AttemptTimes]) -> list[AccountedStep]:
    """Return those of the steps that are a run's: SLURM reuses the ids of jobs."""
    found = []
    for step in steps:
        start = datetime.fromisoformat(step.start).astimezone().timestamp()
        for each in attempts:
            is_within = each.begin / 1000 - CLOCKS_DIFFER.seconds <= start <= each.end / 1000 + CLOCKS_DIFFER.seconds
            if each.job_id == step.job_id and is_within:
                found.append(step)
                break
    return found


def keep_accounted(folder: RunFolder, accounted: Accounted) -> None:
    """Keep accounting's answer with a run, unless its folder is another user's, or the disk is full."""
    with suppress(OSError):
        folder.usage.mkdir(exist_ok=True)
        write_json(folder.accounting, asdict(accounted))
