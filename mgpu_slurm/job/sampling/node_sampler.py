"""Sample what the ranks of a node use, together with everything below them, for `mgpu-slurm efficiency`.

Under SLURM the first rank of each node samples it; on this machine, the process that has started the ranks. The kernel
knows the highest memory of each process, so no sample has to hit it; what a process had after the last sample, it
records itself when it ends.

Samples are written once a minute and at the end, in one small piece. A disk that takes nothing costs samples only.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from mgpu_slurm.core import node_gpus, process_usage
from mgpu_slurm.core.files import append_jsonl
from mgpu_slurm.core.node_gpus import GpuReading
from mgpu_slurm.core.process_usage import TreeReader, TreeUsage
from mgpu_slurm.job.sampling.sampler_thread import SamplerThread
from mgpu_slurm.request.spec import Spec
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.records import now
from mgpu_slurm.run_folder.usage_records import GpuUse, RankEnd, UsageSample

WRITE_SECONDS = 60.0
"""Between two writes, two looks for ranks, and two measurements of shared memory."""

MOST_UNWRITTEN = 1000
"""Samples that wait for a disk; older ones are dropped."""

MOST_SHARED = 1 << 30
"""Bytes of memory of a process from which it is not measured how much processes share: that takes long."""

CHANGE = 0.1
"""Part by which the memory has to change until shared memory is measured again."""

FindRanks = Callable[[], Sequence[int]]
"""Returns the process ids of the ranks of a node."""


class NodeSampler(SamplerThread):
    """Samples one node in one attempt."""

    slows_down = True

    def __init__(
        self, folder: RunFolder, attempt: int, node: str, ranks: FindRanks, gpus: Mapping[str, str] | None
    ) -> None:
        """
        Args:
            ranks: called again now and then, as ranks may start later, and leave processes behind.
            gpus: the environment of a rank, which names the GPUs of the run on this node; None without GPUs.
        """
        super().__init__("usage")
        self._folder = folder
        self._attempt = attempt
        self._node = node
        self._find_ranks = ranks
        self._environ = gpus
        self._library: Any = None
        self._gpus: list[Any] = []
        self._trees = TreeReader()
        self._roots: dict[int, TreeUsage] = {}
        """The ranks that live, with their last readings."""
        self._below: dict[int, int] = {}
        """The highest memory so far of a process below each process."""
        self._measured = (0, 0)
        """The processes and their memory when shared memory was measured."""
        self._samples: list[UsageSample] = []
        self._written_at = -math.inf

    def prepare(self) -> bool:
        if self._environ is not None:
            with suppress(Exception):
                self._library = node_gpus.load()
                self._gpus = node_gpus.visible_handles(self._library, self._environ)
        # the processes are sampled without GPUs, too
        return True

    def look(self) -> None:
        # the first sample is written at once, so that a run that has just begun has one
        is_due = time.monotonic() - self._written_at >= WRITE_SECONDS
        if is_due or not self._roots:
            for root in self._find_ranks():
                self._roots.setdefault(root, TreeUsage())
        self._samples.append(self._sample(measures_shared=is_due))
        if is_due:
            self._written_at = time.monotonic()
            self._write()

    def finish(self) -> None:
        # what ranks that still live have done since the last sample
        sample = self._sample(measures_shared=False)
        if sample.ranks:
            self._samples.append(sample)
        self._write()

    def _sample(self, measures_shared: bool) -> UsageSample:
        before, trees = self._roots, self._trees.read(self._roots)
        living = {root: tree for root, tree in trees.items() if tree.pids}
        # another process may get the id of a rank that has ended
        self._roots = living
        waits = [tree.wait for tree in living.values() if tree.wait is not None]
        rss = sum(tree.rss for tree in living.values())

        def since(name: str) -> Any:
            # less than before: some of the processes were not waited for by one of the tree
            return sum(max(0, getattr(tree, name) - getattr(before[root], name)) for root, tree in trees.items())

        return UsageSample(
            time=now(),
            cpu=round(since("cpu"), 2),
            wait=round(sum(waits), 3) if waits else None,
            rss=rss,
            peak=sum(tree.peak for tree in living.values()),
            below=self._higher_below(living.values()),
            pss=self._shared_once(living.values(), rss) if measures_shared else None,
            ranks=len(living),
            read=since("read"),
            wrote=since("wrote"),
            gpu=self._gpu_use(),
        )

    def _higher_below(self, trees: Iterable[TreeUsage]) -> dict[str, int] | None:
        """Return the highest memory below each process for which it is higher than so far; None without any."""
        found = {pid: peak for tree in trees for pid, peak in tree.below.items() if peak > self._below.get(pid, 0)}
        self._below |= found
        return {str(pid): peak for pid, peak in found.items()} or None

    def _shared_once(self, trees: Iterable[TreeUsage], rss: int) -> int | None:
        """Return the memory of all processes, of which shared pages count once; None if it is as it was, or too much
        to be measured."""
        pids = [pid for tree in trees for pid in tree.pids]
        count, before = self._measured
        if len(pids) == count and abs(rss - before) <= CHANGE * before:
            return None
        with suppress(OSError):
            # the memory of a single process is its own, but for libraries
            found = process_usage.shared_once(pids, MOST_SHARED) if len(pids) > 1 else rss
            self._measured = len(pids), rss
            return found
        return None

    def _gpu_use(self) -> Sequence[GpuUse]:
        readings: list[GpuReading] = []
        with suppress(Exception):
            readings = [node_gpus.read(self._library, handle) for handle in self._gpus]
        return tuple(GpuUse(each.utilization, each.memory, each.watts) for each in readings)

    def _write(self) -> None:
        _append(self._folder, self._attempt, self._node, self._samples)
        del self._samples[:-MOST_UNWRITTEN]


def _append(folder: RunFolder, attempt: int, node: str, lines: list[Any]) -> None:
    """Write lines and remove them from the list; if they cannot be written, leave them there."""
    with suppress(OSError):
        folder.usage.mkdir(exist_ok=True)
        append_jsonl(folder.node_usage(attempt, node), *(line.to_json() for line in lines))
        lines.clear()


# -- the end of a rank


def note_own_end(folder: RunFolder, attempt: int, node: str, rank: int) -> None:
    """Record what this process has used, as a rank that ends now."""
    own, below = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cpu = _cpu_seconds(own) + _cpu_seconds(below)
    # in kilobytes, see getrusage(2)
    peak, child = own.ru_maxrss << 10, below.ru_maxrss << 10
    _append(folder, attempt, node, [RankEnd(time=now(), rank=rank, pid=os.getpid(), cpu=cpu, peak=peak, child=child)])


def _note_end(folder: RunFolder, attempt: int, node: str, rank: int, pid: int, used: resource.struct_rusage) -> None:
    """Record what a rank has used that this process has waited for."""
    cpu, highest = _cpu_seconds(used), used.ru_maxrss << 10
    _append(folder, attempt, node, [RankEnd(time=now(), rank=rank, pid=pid, cpu=cpu, highest=highest)])


def _cpu_seconds(used: resource.struct_rusage) -> float:
    return round(used.ru_utime + used.ru_stime, 2)


# -- ranks that this process has started


@dataclass(frozen=True)
class ChildRank:
    """A rank that is a child process."""

    rank: int
    node: str
    gpus: str | None
    """The GPUs of its node, as CUDA_VISIBLE_DEVICES names them; None without GPUs."""


class ChildSampling:
    """Samples ranks that are children of this process, by node, and records what they had used when they ended."""

    def __init__(self, folder: RunFolder, attempt: int, ranks: Mapping[int, ChildRank]) -> None:
        """
        Args:
            ranks: by process id; empty if the ranks are not children.
        """
        self._folder = folder
        self._attempt = attempt
        self._ranks = ranks
        self._living = set(ranks)
        self._samplers = [self._sampler(node) for node in dict.fromkeys(each.node for each in ranks.values())]
        for sampler in self._samplers:
            sampler.start()

    def ended(self, pid: int, used: resource.struct_rusage) -> None:
        """Record the end of a process.

        Args:
            used: what wait4(2) returned for it.
        """
        if pid in self._living:
            self._living.remove(pid)
            child = self._ranks[pid]
            _note_end(self._folder, self._attempt, child.node, child.rank, pid, used)

    def close(self) -> None:
        """Stop sampling."""
        for sampler in self._samplers:
            sampler.close()

    def _sampler(self, node: str) -> NodeSampler:
        own = {pid: child for pid, child in self._ranks.items() if child.node == node}
        gpus = next(iter(own.values())).gpus
        environ = None if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
        return NodeSampler(self._folder, self._attempt, node, lambda: [*(own.keys() & self._living)], environ)


# -- under SLURM


@contextmanager
def sampled_by_rank(
    spec: Spec, folder: RunFolder, attempt: int, node: str, rank: int, local_rank: int
) -> Iterator[None]:
    """Sample the node during the block if this rank is the first one there; record what the rank used at its end."""
    # the process that has started simulated nodes samples them
    is_first = local_rank == 0 and not spec.nodes_are_simulated
    environ = dict(os.environ) if spec.resources.gpus_per_node else None
    sampler = NodeSampler(folder, attempt, node, _ranks_of_step, environ) if is_first else None
    if sampler is not None:
        sampler.start()
    try:
        yield
    finally:
        if sampler is not None:
            sampler.close()
        note_own_end(folder, attempt, node, rank)


_STEP_ON_NODE = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURMD_NODENAME")


def _ranks_of_step() -> Sequence[int]:
    """Return the processes that SLURM has started for this step on this node."""
    step = [f"{name}={os.environ[name]}" for name in _STEP_ON_NODE if name in os.environ]
    # in a container, those of other ranks may be hidden
    return (process_usage.with_entries(step) if step else []) or [os.getpid()]
