"""Checks the network between the nodes: names, ports, the rendezvous, clocks, and the speed of all-reduce."""

from __future__ import annotations

import itertools
import re
import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_slurm.core.formatting import counted
from mgpu_slurm.doctor import check_results
from mgpu_slurm.doctor.check_results import Finding, span
from mgpu_slurm.doctor.in_job.team import Answer, Place, Team, names, who
from mgpu_slurm.job import store_server

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

MB = 1 << 20
LOOK_UP_WITHIN = 15.0
"""Seconds; a resolver that does not answer takes at least that long."""

SLOW_LOOK_UP = 0.5
SLOW_RENDEZVOUS = 0.05
CONNECT_WITHIN = 5.0
TURNS = 10
CLOCKS_MAY_DIFFER = 1.0

ALL_REDUCE_WITHIN = 60.0
SMALL, LARGE = 1 * MB, 64 * MB
TOO_SLOW_FOR_LARGE = 0.5
"""Seconds for the small all-reduce above which the large one is skipped."""

SLOW_GB_PER_SECOND = 0.1
"""Slightly less than the bandwidth of a 1 Gb/s network."""

NETWORKS = Path("/sys/class/net")


# -- names


@dataclass
class LookUp:
    """How long a resolver takes; None if it does not answer."""

    address: str | None = None
    forward: float | None = None
    """Seconds from the name to the address."""
    backward: float | None = None
    """Seconds from the address to a name."""


def measure_names(team: Team, place: Place) -> Any:
    """Measure how long this node takes to resolve all nodes' names to addresses, and these back to names."""
    if not team.me.is_leader or place.is_one_machine:
        return None
    return {leader.node_name: asdict(_look_up(leader.node_name)) for leader in team.leaders}


def _look_up(name: str) -> LookUp:
    found = LookUp()

    def look() -> None:
        with suppress(OSError):
            begun = time.perf_counter()
            found.address = socket.gethostbyname(name)
            found.forward = time.perf_counter() - begun
            begun = time.perf_counter()
            with suppress(OSError):
                socket.gethostbyaddr(found.address)
            # "no such name" is an answer too
            found.backward = time.perf_counter() - begun

    # resolver calls have no time-out
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(LOOK_UP_WITHIN)
    return replace(found)


def judge_names(answers: list[Answer]) -> list[Finding]:
    found = []
    slowest = 0.0
    for answer in answers:
        looks = {name: LookUp(**looked) for name, looked in answer.value.items()}
        unknown = [name for name, looked in looks.items() if looked.forward is None]
        if unknown:
            text = f"{answer.member.node_name} cannot resolve {', '.join(unknown)}"
            found.append(check_results.failed("names", text, "ask the site to add the nodes to its DNS or /etc/hosts"))
        for name, looked in looks.items():
            if looked.forward is None:
                continue
            backward = LOOK_UP_WITHIN if looked.backward is None else looked.backward
            slowest = max(slowest, looked.forward, backward)
            if backward > SLOW_LOOK_UP:
                text = f"{answer.member.node_name} takes {span(backward)} to look up {looked.address} ({name})"
                fix = "each start waits for it: ask the site to add the nodes' addresses to reverse DNS or /etc/hosts"
                found.append(check_results.warning("names", text, fix))
            elif looked.forward > SLOW_LOOK_UP:
                text = f"{answer.member.node_name} takes {span(looked.forward)} to look up {name}"
                found.append(
                    check_results.warning("names", text, "each start waits for it: ask the site to check its DNS")
                )
    if answers and not found:
        nodes = names([answer.member for answer in answers])
        found.append(check_results.ok("names", f"node names resolve on {nodes}: {span(slowest)} at most"))
    return found


# -- ports


@dataclass(frozen=True)
class Reached:
    """An attempt to connect to another node."""

    port: int
    seconds: float
    problem: str | None = None


def measure_ports(team: Team, place: Place) -> Any:
    """Measure the seconds to connect to each other node, on a port that it has just bound; or return the problem."""
    if not team.me.is_leader:
        return None
    with closing(store_server.bind("127.0.0.1" if place.is_one_machine else "")) as listener:
        team.tell(f"port/{team.me.rank}", listener.getsockname()[1])
        reached = {}
        for other in team.leaders:
            if other != team.me:
                address = "127.0.0.1" if place.is_one_machine else other.node_name
                reached[other.node_name] = asdict(_connect(address, team.hear(f"port/{other.rank}")))
        team.tell(f"port/{team.me.rank}/done")
        # keep listening until all have tried
        for other in team.leaders:
            team.hear(f"port/{other.rank}/done")
    return reached


def _connect(address: str, port: int) -> Reached:
    begun = time.perf_counter()
    problem = None
    try:
        socket.create_connection((address, port), CONNECT_WITHIN).close()
    except OSError as error:
        problem = str(error) or type(error).__name__
    return Reached(port, time.perf_counter() - begun, problem)


def judge_ports(answers: list[Answer]) -> list[Finding]:
    found = []
    slowest = 0.0
    for answer in answers:
        for name, value in answer.value.items():
            reached = Reached(**value)
            if reached.problem is not None:
                place = f"{name} on port {reached.port}"
                text = f"{answer.member.node_name} cannot reach {place}: {reached.problem}"
                fix = "probably a firewall: ask the site to allow connections between nodes on ports above 10000"
                found.append(check_results.failed("ports", text, fix))
            else:
                slowest = max(slowest, reached.seconds)
    if len(answers) > 1 and not found:
        nodes = names([answer.member for answer in answers])
        text = f"{nodes} reach each other's ports: {span(slowest)} at most"
        found.append(check_results.ok("ports", text))
    return found


# -- the rendezvous


@dataclass(frozen=True)
class StoreTimes:
    """How fast the store answers a rank, in seconds."""

    connecting: float
    round_trip: float


def measure_store(team: Team, place: Place) -> Any:
    spans = []
    for turn in range(TURNS):
        begun = time.perf_counter()
        team.tell(f"store/{team.me.rank}/{turn}")
        team.hear(f"store/{team.me.rank}/{turn}")
        spans.append((time.perf_counter() - begun) / 2)
    return asdict(StoreTimes(place.connecting, statistics.median(spans)))


def judge_store(answers: list[Answer]) -> list[Finding]:
    if not answers:
        return []
    times = [(answer.member, StoreTimes(**answer.value)) for answer in answers]
    connecting = max(own.connecting for _, own in times)
    farthest, own = max(times, key=lambda pair: pair[1].round_trip)
    trip = own.round_trip
    ranks = counted(len(answers), "rank")
    text = f"rendezvous: {ranks} met, connected in {span(connecting)}; round trip {span(trip)}"
    if trip > SLOW_RENDEZVOUS:
        return [check_results.warning("rendezvous", f"{text} for {farthest.words}", "check the nodes' network")]
    return [check_results.ok("rendezvous", text)]


# -- clocks


@dataclass(frozen=True)
class Clock:
    """How far a node's clock is ahead of that of rank 0's node, and the uncertainty, in seconds."""

    ahead: float
    error: float


def measure_clocks(team: Team, place: Place) -> Any:
    """Measure how far this node's clock is ahead of that of rank 0's node, and the uncertainty, in seconds."""
    if not team.me.is_leader:
        return None
    others = team.leaders[1:]
    if team.is_first:
        for other, turn in itertools.product(others, range(TURNS)):
            team.hear(f"clock/{other.rank}/{turn}")
            team.tell(f"clock/{other.rank}/{turn}/time", time.time())
        return asdict(Clock(0.0, 0.0))
    # the turn with the smallest uncertainty, since rank 0 serves one node at a time
    return asdict(min((_clock_turn(team, turn) for turn in range(TURNS)), key=lambda clock: clock.error))


def _clock_turn(team: Team, turn: int) -> Clock:
    before = time.time()
    team.tell(f"clock/{team.me.rank}/{turn}")
    there = team.hear(f"clock/{team.me.rank}/{turn}/time")
    after = time.time()
    return Clock((before + after) / 2 - there, (after - before) / 2)


def judge_clocks(answers: list[Answer]) -> list[Finding]:
    if len(answers) < 2:
        return []
    first, others = answers[0].member, [(answer.member, Clock(**answer.value)) for answer in answers[1:]]
    found = []
    for member, clock in others:
        if abs(clock.ahead) > CLOCKS_MAY_DIFFER + clock.error:
            how = "ahead of" if clock.ahead > 0 else "behind"
            text = f"the clock of {member.node_name} is {span(abs(clock.ahead))} {how} that of {first.node_name}"
            found.append(
                check_results.warning("clocks", text, "times in logs and file ages mislead: ask the site to check NTP")
            )
    if not found:
        _, farthest = max(others, key=lambda pair: abs(pair[1].ahead))
        nodes = names([answer.member for answer in answers])
        text = f"clocks of {nodes} differ by at most {span(abs(farthest.ahead))} (known to {span(farthest.error)})"
        found.append(check_results.ok("clocks", text))
    return found


# -- all-reduce


@dataclass(frozen=True)
class AllReduce:
    """Seconds that all-reduces of one rank took."""

    making: float
    """With the start of the process group."""
    small: float
    large: float | None
    """None if the small one was too slow."""
    backend: str
    interfaces: dict[str, int]
    """Network interfaces of the node and their speed in Mb/s; empty except on one rank of each node."""
    transport: str = ""
    """The network that NCCL uses between nodes, on rank 0."""


def measure_gloo(team: Team, place: Place) -> Any:
    if team.size == 1:
        return None
    import torch

    return asdict(_measure_all_reduce(team, "gloo", torch.device("cpu")))


def measure_nccl(team: Team, place: Place) -> Any:
    import torch.distributed as dist

    # ranks that share a GPU have no NCCL
    if team.size == 1 or "nccl" not in dist.get_backend_config():
        return None
    measured = _measure_all_reduce(team, "nccl", place.device)
    log = place.folder.rank_log(place.attempt, team.me.rank)
    transport = nccl_transport(log.read_text(errors="replace")) if team.is_first else ""
    return asdict(replace(measured, transport=transport))


def _measure_all_reduce(team: Team, backend: str, device: torch.device) -> AllReduce:
    import torch.distributed as dist

    team.meet(f"all-reduce/{backend}")
    begun = time.perf_counter()
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=ALL_REDUCE_WITHIN))
    _reduce(group, 1, device)
    making = time.perf_counter() - begun
    small = _timed(lambda: _reduce(group, SMALL, device), times=5)
    # all ranks have to make the same decision
    team.tell(f"all-reduce/{backend}/{team.me.rank}", small)
    slowest = max(team.hear(f"all-reduce/{backend}/{member.rank}") for member in team.members)
    large = _timed(lambda: _reduce(group, LARGE, device), times=3) if slowest < TOO_SLOW_FOR_LARGE else None
    interfaces = interfaces_of(NETWORKS) if team.me.is_leader else {}
    return AllReduce(making, small, large, backend, interfaces)


def _reduce(group: dist.ProcessGroup | None, size: int, device: torch.device) -> None:
    import torch
    import torch.distributed as dist

    tensor = torch.ones(max(1, size // 4), device=device)
    dist.all_reduce(tensor, group=group)
    # waits for the GPU too, and checks the sum
    assert tensor[-1].item() == dist.get_world_size()


def _timed(work: Callable[[], None], times: int) -> float:
    """Return the median seconds of several calls, after a warm-up call."""
    work()
    spans = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        spans.append(time.perf_counter() - begun)
    return statistics.median(spans)


def interfaces_of(networks: Path) -> dict[str, int]:
    """Return the network interfaces that are up, with their speed in Mb/s, or 0 if the driver does not report it."""
    found = {}
    for path in sorted(networks.iterdir()) if networks.is_dir() else []:
        with suppress(OSError, ValueError):
            if path.name != "lo" and (path / "operstate").read_text().strip() != "down":
                found[path.name] = 0
                found[path.name] = max(0, int((path / "speed").read_text()))
    return found


def nccl_transport(log: str) -> str:
    """Return the network that NCCL logs for traffic between nodes (`IB`, `Socket`, a plugin's name); empty if none."""
    match = re.search(r"NCCL INFO (?:\S+ )*?Using network (?P<name>[^\n]+)", log)
    return match["name"].strip() if match else ""


def judge_gloo(answers: list[Answer]) -> list[Finding]:
    return _judge_all_reduce(answers, "GLOO_SOCKET_IFNAME")


def judge_nccl(answers: list[Answer]) -> list[Finding]:
    found = _judge_all_reduce(answers, "NCCL_SOCKET_IFNAME")
    transport = next((each.transport for each in _all_reduces(answers) if each.transport), "")
    if transport:
        found.append(check_results.ok("all-reduce", f"NCCL connects nodes by {transport}"))
    return found


def _judge_all_reduce(answers: list[Answer], variable: str) -> list[Finding]:
    if not answers:
        return []
    measured = _all_reduces(answers)
    small, larges = max(each.small for each in measured), [each.large for each in measured if each.large is not None]
    ranks = who([answer.member for answer in answers])
    text = f"all-reduce by {measured[0].backend}, {ranks}: 1 MB in {span(small)}"
    if len(larges) < len(measured):
        return [check_results.warning("all-reduce", f"{text}, so 64 MB was not tried", _faster(measured, variable))]
    large = max(larges)
    rate = LARGE / large / 1e9
    text += f", 64 MB in {span(large)} ({rate:.2g} GB/s)"
    if rate < SLOW_GB_PER_SECOND:
        return [check_results.warning("all-reduce", text, _faster(measured, variable))]
    return [check_results.ok("all-reduce", text)]


def _all_reduces(answers: list[Answer]) -> list[AllReduce]:
    return [AllReduce(**answer.value) for answer in answers]


def _faster(measured: list[AllReduce], variable: str) -> str:
    known: dict[str, int] = {}
    for each in measured:
        known |= each.interfaces
    listed = ", ".join(f"{name} ({speed / 1000:g} Gb/s)" if speed else name for name, speed in known.items())
    return f"set {variable} to the fastest interface ({listed}) under environment: in mgpu.yaml"
