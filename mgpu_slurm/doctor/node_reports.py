"""Judge the nodes of a partition by what they measured, each compared with those of the same kind. Pure functions."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mgpu_slurm.core.formatting import human_size
from mgpu_slurm.core.hostlist import compress
from mgpu_slurm.slurm.partition_nodes import Node

SLOW_CLOCK = 0.9
"""Part of the median below which a node is slow. GPUs of one model differ by some percent in the clock that they keep
under load; a throttled one falls to half or less."""

SLOW_GPU = 0.9
"""The same for matrix products, whose speed follows the clock."""

SLOW_DISK = 0.5
"""Other jobs may write to the same disk, and one second of writing is a short measurement."""

SLOW_NETWORK = 0.5
"""Other jobs may use the same links; one that has fallen back to a lower rate loses half or more."""

Verdict = Literal["ok", "slow", "broken", "down", "unchecked"]


@dataclass(frozen=True)
class GpuFacts:
    """One GPU as its node measured it; None for what is not known."""

    name: str
    clock: int | None = None
    """MHz of its processors while it multiplied matrices."""
    highest_clock: int | None = None
    flops: float | None = None
    """Operations per second of these products."""


@dataclass(frozen=True)
class NodeFacts:
    """A node as it measured itself; None for what is not known."""

    driver: str = ""
    """Version of the GPUs' driver."""
    gpus: tuple[GpuFacts, ...] = ()
    folder: str = ""
    """Its folder for temporary files."""
    free: int | None = None
    """Free bytes there."""
    write: float | None = None
    """Bytes per second written there."""
    memory: int = 0
    """Bytes of main memory."""
    broken: tuple[str, ...] = ()
    """What keeps runs from working on it."""
    slow: tuple[str, ...] = ()
    """What slows them down, if one node alone can tell."""

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> NodeFacts:
        gpus = tuple(GpuFacts(**gpu) for gpu in plain["gpus"])
        return NodeFacts(**{**plain, "gpus": gpus, "broken": tuple(plain["broken"]), "slow": tuple(plain["slow"])})

    @property
    def gpu_names(self) -> list[str]:
        return list(dict.fromkeys(gpu.name for gpu in self.gpus))

    @property
    def kind(self) -> str:
        """Nodes of one kind are compared with each other: those with the same model of GPU."""
        return ", ".join(self.gpu_names)

    @property
    def clock(self) -> int | None:
        """The clock of the slowest GPU."""
        return min((gpu.clock for gpu in self.gpus if gpu.clock is not None), default=None)

    @property
    def flops(self) -> float | None:
        """The speed of the slowest GPU."""
        return min((gpu.flops for gpu in self.gpus if gpu.flops is not None), default=None)


@dataclass(frozen=True)
class Meeting:
    """A measurement of the network between two nodes."""

    nodes: tuple[str, str]
    rate: float | None
    """Bytes per second in the slower direction; None if they could not connect."""
    problem: str = ""


@dataclass(frozen=True)
class Seen:
    """All that was found out about one node."""

    node: Node
    facts: NodeFacts | None = None
    failure: str = ""
    """Why its task has not reported, or has failed afterwards, if the node may be the cause."""
    unchecked: str = ""
    """Why its task has not run, if nothing speaks against the node."""


@dataclass(frozen=True)
class NodeReport:
    """One line of the table, with its reasons."""

    seen: Seen
    verdict: Verdict
    why: tuple[str, ...] = ()
    network: float | None = None
    """Bytes per second to the better one of its partners, so that a slow partner is not held against it."""
    partners: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        return self.seen.node.name

    @property
    def is_checked(self) -> bool:
        return self.seen.facts is not None

    @property
    def to_exclude(self) -> bool:
        """SLURM itself starts nothing on nodes that are down."""
        return self.verdict in ("slow", "broken")

    def to_json(self) -> dict[str, Any]:
        facts = self.seen.facts
        return {
            "node": self.name,
            "verdict": self.verdict,
            "why": list(self.why),
            "slurm_state": self.seen.node.state,
            "slurm_reason": self.seen.node.reason,
            "facts": None if facts is None else dataclasses.asdict(facts),
            "network": self.network,
            "partners": list(self.partners),
        }


def judge(seen: Sequence[Seen], meetings: Sequence[Meeting]) -> list[NodeReport]:
    """Return a report for each node, in the same order."""
    failed = {each.node.name for each in seen if each.failure}
    # a node that failed meanwhile says nothing about its partner
    counted = [meeting for meeting in meetings if failed.isdisjoint(meeting.nodes)]
    own = {each.node.name: [meeting for meeting in counted if each.node.name in meeting.nodes] for each in seen}
    rates = {name: _best_rate(own[name]) for name in own}
    peers = _Peers([(each.facts, rates[each.node.name]) for each in seen if each.facts is not None])
    return [_report(each, own[each.node.name], rates[each.node.name], peers) for each in seen]


def exclude(reports: Iterable[NodeReport]) -> str:
    """Return the nodes to avoid as a host list for `--exclude`; empty for none."""
    names = [report.name for report in reports if report.to_exclude]
    return compress(names) if names else ""


def _best_rate(meetings: Iterable[Meeting]) -> float | None:
    return max((meeting.rate for meeting in meetings if meeting.rate is not None), default=None)


@dataclass(frozen=True)
class _Peers:
    """What the nodes of each kind have measured."""

    measured: list[tuple[NodeFacts, float | None]]

    def slower(
        self, facts: NodeFacts, rate: float | None, part: float, value: Callable[[NodeFacts, float | None], Any]
    ) -> float | None:
        """Return the median of a value, if that of this node is less than this part of it."""
        values = [value(*each) for each in self.measured if each[0].kind == facts.kind]
        known = [each for each in values if each is not None]
        own = value(facts, rate)
        if own is None or own >= part * statistics.median(known):
            return None
        return float(statistics.median(known))


def _report(seen: Seen, meetings: Sequence[Meeting], rate: float | None, peers: _Peers) -> NodeReport:
    name = seen.node.name
    partners = tuple(other for meeting in meetings for other in meeting.nodes if other != name)
    if seen.facts is None:
        verdict: Verdict = "broken" if seen.failure else "unchecked" if seen.unchecked else "down"
        return NodeReport(seen, verdict, (seen.failure or seen.unchecked or seen.node.words,))
    broken = [*seen.facts.broken, *([seen.failure] if seen.failure else [])]
    slow = [*seen.facts.slow, *_slow(seen.facts, rate, partners, peers)]
    unreached = [
        f"no connection to {other}: {each.problem}"
        for other, each in zip(partners, meetings, strict=True)
        if each.rate is None
    ]
    # of two nodes that cannot connect, one that has reached another node may not be to blame
    (broken if rate is None else slow).extend(unreached)
    verdict = "broken" if broken else "slow" if slow else "ok"
    return NodeReport(seen, verdict, (*broken, *slow), rate, partners)


def _slow(facts: NodeFacts, rate: float | None, partners: Sequence[str], peers: _Peers) -> Iterable[str]:
    others = f"the median of nodes with {facts.kind}" if facts.kind else "the median"
    if median := peers.slower(facts, rate, SLOW_CLOCK, lambda each, _: each.clock):
        yield f"GPU clock {megahertz(facts.clock)}, {others} is {megahertz(median)}"
    if median := peers.slower(facts, rate, SLOW_GPU, lambda each, _: each.flops):
        yield f"matrix products at {teraflops(facts.flops)}, {others} is {teraflops(median)}"
    if median := peers.slower(facts, rate, SLOW_DISK, lambda each, _: each.write):
        yield f"writes to {facts.folder} at {per_second(facts.write)}, {others} is {per_second(median)}"
    if median := peers.slower(facts, rate, SLOW_NETWORK, lambda _, own: own):
        yield f"network to {' and '.join(partners)} at {per_second(rate)}, {others} is {per_second(median)}"


def megahertz(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} MHz"


def teraflops(value: float | None) -> str:
    return "" if value is None else f"{value / 1e12:.3g} TFLOP/s"


def per_second(value: float | None) -> str:
    return "" if value is None else f"{human_size(int(value))}/s"
