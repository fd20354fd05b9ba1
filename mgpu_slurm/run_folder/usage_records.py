"""What an attempt used of its nodes: the lines of `usage/<attempt>-<node>.jsonl`, and those of `saves.jsonl`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mgpu_slurm.core.files import append_jsonl, read_jsonl
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Record, from_known, optional
from mgpu_slurm.run_folder.records import now

S = TypeVar("S", bound="UsageSample")

_OF_AN_END = ("cpu", "peak", "child", "highest")
"""What several lines may say of the end of a rank."""

_NAME = re.compile(r"(?P<attempt>\d+)-(?P<node>.+)\.jsonl")


GROWTH = 1.25
"""How many times as large as in the last sample a process has to be to count as another one."""


@dataclass(frozen=True)
class GpuUse:
    """One GPU at the time of a sample; None for what it does not report."""

    util: float | None = None
    """Part of the time in which a kernel runs, from 0 to 1."""
    mem: int | None = None
    """Bytes used."""
    watts: float | None = None


@dataclass(frozen=True, kw_only=True)
class UsageSample(Record):
    """All processes of a run on one node at one time."""

    time: str = ""
    """ISO 8601 with the time zone."""
    cpu: float = 0.0
    """CPU seconds since the sample before; in the first one, since the processes started."""
    wait: float | None = optional()
    """Seconds that threads, ready to run, have waited for a core since then."""
    rss: int = 0
    """Bytes of memory; pages that processes share count once for each of them."""
    peak: int = 0
    """Sum of the highest `rss` that each of the living processes has had."""
    below: Mapping[str, int] | None = optional()
    """By process id, the highest `rss` that a process below that one has had; only of those for which it is higher than
    in all samples before."""
    pss: int | None = optional()
    """Bytes of memory, of which shared pages count once; measured once a minute, if the memory has changed."""
    ranks: int = 0
    """Number of ranks that live."""
    read: int = 0
    wrote: int = 0
    """Bytes from and to disks since the sample before."""
    gpu: Sequence[GpuUse] = optional(())

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | ({"gpu": [asdict(each) for each in self.gpu]} if self.gpu else {})

    @classmethod
    def from_json(cls: type[S], values: Mapping[str, Any]) -> S:
        gpus = tuple(from_known(GpuUse, each) for each in values.get("gpu") or ())
        return replace(super().from_json(values), gpu=gpus)


@dataclass(frozen=True, kw_only=True)
class RankEnd(Record):
    """What a rank had used when it ended. Nothing that it had only between two samples is missing."""

    time: str = ""
    rank: int = 0
    pid: int = 0
    cpu: float = 0.0
    """CPU seconds, with those of its processes that had ended."""
    peak: int = optional(0)
    """Its highest `rss`, as it knows it itself; 0 if it was killed."""
    child: int = optional(0)
    """The highest `rss` of any of its processes that had ended, as it knows it itself. The kernel counts what a process
    had before it started another program, which is what the rank had."""
    highest: int = optional(0)
    """The highest `rss` of itself or any of its processes that had ended, as who waited for it knows."""

    @property
    def own(self) -> int:
        """Return the highest `rss` of the rank, or of one of its processes if that is all that is known."""
        return self.highest if self.highest > max(self.peak, self.child) else self.peak

    def unseen(self, known: int) -> int:
        """Return the bytes of a process that lived between two samples, of which only its rank knows.

        Args:
            known: the highest `rss` of a process below the rank in any sample.
        """
        if self.child <= self.own:
            return 0
        # one that was sampled may have grown since
        return self.child if self.child > GROWTH * known else max(0, self.child - known)


@dataclass(frozen=True)
class NodeUsage:
    """A file: one node in one attempt."""

    attempt: int
    node: str
    samples: Sequence[UsageSample]
    ends: Mapping[int, RankEnd]
    """By rank."""

    @property
    def cpu(self) -> float:
        """CPU seconds of all ranks."""
        return max(sum(each.cpu for each in self.samples), sum(end.cpu for end in self.ends.values()))

    @property
    def peak(self) -> int:
        """Bytes of memory that the ranks had together at most."""
        sampled = max((each.peak for each in self.samples), default=0)
        known: dict[str, int] = {}
        for each in self.samples:
            # later ones are higher
            known |= each.below or {}
        unseen = sum(end.unseen(known.get(str(end.pid), 0)) for end in self.ends.values())
        return max(sampled, sum(end.own for end in self.ends.values())) + unseen

    @property
    def shared(self) -> int | None:
        """Bytes that `peak` counts more than once, because processes share them; None if that was not measured."""
        looks = [(each.rss, each.pss) for each in self.samples if each.pss is not None]
        # how much they share changes: as it was when they had most
        rss, pss = max(looks, default=(0, 0))
        return max(0, rss - pss) if looks else None


def read_usage(folder: RunFolder) -> list[NodeUsage]:
    """Return what was recorded of a run, by attempt and node; nothing for a run of an older version."""
    found = []
    for path in folder.usage.iterdir() if folder.usage.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match is not None:
            found.append(_node_usage(int(match["attempt"]), match["node"], path))
    return sorted(found, key=lambda each: (each.attempt, each.node))


def _node_usage(attempt: int, node: str, path: Path) -> NodeUsage:
    samples: list[UsageSample] = []
    ends: dict[int, RankEnd] = {}
    for line in read_jsonl(path):
        if "rank" not in line:
            samples.append(UsageSample.from_json(line))
            continue
        end = RankEnd.from_json(line)
        # a rank says it of itself, and who waited for it as well
        before = ends.get(end.rank, end)
        highest = {name: max(getattr(before, name), getattr(end, name)) for name in _OF_AN_END}
        ends[end.rank] = replace(end, **highest)
    return NodeUsage(attempt, node, samples, ends)


@dataclass(frozen=True, kw_only=True)
class SaveRecord(Record):
    """A checkpoint of a run that was saved, with its times. It is kept when the checkpoint is deleted."""

    step: int = 0
    attempt: int = 0
    begun: str = ""
    """When the training stopped for it, in ISO 8601 with the time zone."""
    stood: float = 0.0
    """Seconds for which the training stood."""
    time: str = ""
    """When it was complete."""


def note_save(folder: RunFolder, attempt: int, times: SaveRecord) -> None:
    """Record a checkpoint that is complete now; the training does not depend on it."""
    with suppress(OSError):
        append_jsonl(folder.saves, replace(times, attempt=attempt, time=now()).to_json())


def read_saves(folder: RunFolder) -> list[SaveRecord]:
    """Return the checkpoints that a run has saved; nothing for a run of an older version."""
    return [SaveRecord.from_json(line) for line in read_jsonl(folder.saves)]
