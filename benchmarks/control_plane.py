"""What it costs that all ranks of a job reach each other, and what they then exchange: with 32 to 256 processes, and by
a model with more."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.measure import interleave, median
from benchmarks.report import Row, Section
from mgpu_slurm.core import torch_versions
from mgpu_slurm.job import store_server
from mgpu_slurm.rank import rank_info
from mgpu_slurm.rank.communication import collectives, rendezvous
from mgpu_slurm.rank.communication.collectives import Collectives
from mgpu_slurm.rank.communication.step_sync import Agreed, Call
from mgpu_slurm.rank.rank_info import RankInfo

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["benchmarks.control_plane"])

PER_NODE = 8
SIZES = {"full mesh": (32, 64, 128), "tree": (32, 64, 128, 256)}
"""Numbers of ranks; 256 with a full mesh would take minutes."""
POWERS = {"full mesh": (1, 2), "tree": (1,)}
"""Powers of the number of ranks that the model has."""
MODELLED = (1024, 4096)
ROUNDS = 3
EXCHANGES = 10
LIMIT = 5.0
"""Seconds for 1,024 ranks."""


@dataclass(frozen=True)
class Cost:
    """What one start of all ranks cost."""

    server: float
    """CPU seconds of the store's server until all ranks were connected."""
    ranks: float
    """CPU seconds of all ranks until then."""
    slowest: float
    """The most CPU seconds that one rank needed."""
    wall: float
    descriptors: int
    """The most that one rank opened, exchanges included."""
    exchange: float
    """Median seconds of an exchange."""
    exchange_cpu: float
    """CPU seconds of an exchange, of all ranks."""


def run() -> Section:
    cases = {f"{case}, {ranks} ranks": _starter(case, ranks) for case, sizes in SIZES.items() for ranks in sizes}
    costs = interleave(cases, ROUNDS, warm_ups=0)
    rows = [row for name, found in costs.items() for row in _measured(name, found)]
    return Section("control plane", _ABOUT, [*rows, *_modelled(costs)], _NOTES)


def _starter(case: str, ranks: int) -> Callable[[], Cost]:
    return lambda: start(case, ranks)


def _measured(name: str, costs: Sequence[Cost]) -> list[Row]:
    return [
        Row(f"{name}: CPU time of the server", median([each.server for each in costs]), "s", 3),
        Row(f"{name}: CPU time of all ranks", median([each.ranks for each in costs]), "s", 2),
        Row(f"{name}: wall time", median([each.wall for each in costs]), "s", 2),
        Row(f"{name}: file descriptors of a rank, at most", median([each.descriptors for each in costs]), "", 0),
        Row(f"{name}: an exchange", median([each.exchange * 1e3 for each in costs]), "ms", 1),
        Row(
            f"{name}: CPU time of an exchange, all ranks", median([each.exchange_cpu * 1e3 for each in costs]), "ms", 0
        ),
    ]


def _modelled(costs: Mapping[str, Sequence[Cost]]) -> list[Row]:
    rows = []
    for case, sizes in SIZES.items():
        rounds = [[costs[f"{case}, {ranks} ranks"][turn] for ranks in sizes] for turn in range(ROUNDS)]
        for ranks in MODELLED:
            server = [_fitted(sizes, [each.server for each in found], case, ranks) for found in rounds]
            slowest = [_fitted(sizes, [each.slowest for each in found], case, ranks) for found in rounds]
            target = LIMIT if (case, ranks) == ("tree", 1024) else None
            rows.append(Row(f"model: {case}, {ranks:,} ranks: CPU time of the server", median(server), "s", 1, target))
            rows.append(Row(f"model: {case}, {ranks:,} ranks: CPU time of the slowest rank", median(slowest), "s", 2))
    return rows


def _fitted(sizes: Sequence[int], seconds: Sequence[float], case: str, ranks: int) -> float:
    """Return the seconds of a number of ranks, by a least-squares fit to measured ones."""
    powers = np.array(POWERS[case])
    terms, *_ = np.linalg.lstsq(np.array(sizes)[:, None] ** powers, np.array(seconds), rcond=None)
    return float(terms @ float(ranks) ** powers)


def start(case: str, ranks: int) -> Cost:
    """Start ranks that connect to each other and exchange messages."""
    listener = store_server.bind("127.0.0.1")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        secret = Path(folder, "secret")
        store_server.create_secret(secret)
        variables = store_server.exports("127.0.0.1", listener.getsockname()[1])
        variables |= {"GLOO_SOCKET_IFNAME": "lo", store_server.SECRET_VARIABLE: str(secret)}
        server = stack.enter_context(_process(_serve, listener))
        listener.close()
        server.recv()
        started = [stack.enter_context(_process(_be_rank, case, rank, ranks, variables)) for rank in range(ranks)]
        _all_say(started)
        before, began = _ask(server), time.perf_counter()
        connected = _all_say(started)
        wall, served = time.perf_counter() - began, _ask(server) - before
        exchanged = _all_say(started)
    return Cost(
        served,
        sum(connected),
        max(connected),
        wall,
        max(descriptors for _, _, descriptors in exchanged),
        statistics.median(seconds for seconds, _, _ in exchanged),
        sum(cpu for _, cpu, _ in exchanged),
    )


@contextmanager
def _process(body: Callable[..., None], *arguments: Any) -> Any:
    here, there = FORKS.Pipe()
    process = FORKS.Process(target=body, args=(there, *arguments))
    process.start()
    there.close()
    try:
        yield here
    finally:
        process.kill()
        process.join()


def _ask(process: Connection) -> Any:
    process.send(None)
    return process.recv()


def _all_say(processes: Sequence[Connection]) -> list[Any]:
    """Let all processes continue, and return what each says next."""
    for process in processes:
        process.send(None)
    return [process.recv() for process in processes]


def _serve(asked: Connection, listener: Any) -> None:
    store = torch_versions.serve_store(listener)
    asked.send(None)
    while store is not None:
        asked.recv()
        asked.send(time.process_time())


def _be_rank(told: Connection, case: str, rank: int, ranks: int, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    facts = rank_info.from_slurm(_slurm_variables(rank, ranks))
    told.recv()
    told.send(None)
    told.recv()
    before = time.process_time()
    exchange = _connected(facts, case)
    told.send(time.process_time() - before)
    told.recv()
    before, seconds = time.process_time(), []
    for _ in range(EXCHANGES):
        began = time.perf_counter()
        exchange()
        seconds.append(time.perf_counter() - began)
    cpu = (time.process_time() - before) / EXCHANGES
    told.send((statistics.median(seconds), cpu, len(os.listdir("/proc/self/fd"))))
    told.recv()


def _slurm_variables(rank: int, ranks: int) -> dict[str, str]:
    nodes = ranks // PER_NODE
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % PER_NODE),
        "SLURM_NODEID": str(rank // PER_NODE),
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_STEP_NODELIST": f"n[0-{nodes - 1}]",
        "SLURM_STEP_TASKS_PER_NODE": f"{PER_NODE}(x{nodes})",
    }


def _connected(facts: RankInfo, case: str) -> Callable[[], object]:
    """Connect this rank to all others, and return a function that exchanges a message with them."""
    if case == "tree":
        rendezvous.join(facts, torch.device("cpu"))
        # who waits long for another rank asks where that is
        collectives.LOOKS = (60.0,)
        channel = Collectives(facts)
        return lambda: channel.sync(Call.MEAN, Agreed())
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    rendezvous.join(facts, torch.device("cpu"))
    group = dist.new_group(backend="gloo")
    own = torch.zeros(108, dtype=torch.uint8)
    table = [*torch.zeros(facts.world_size, 108, dtype=torch.uint8).unbind()]
    return lambda: dist.all_gather(table, own, group=group)


_ABOUT = (
    f"Ranks of simulated nodes, {PER_NODE} on each, join through the real store, in processes forked from one that has"
    " imported torch. Full mesh: two gloo groups of all ranks, each of which connects every rank to every other, and"
    " an all-gather. Tree: what the package does, with a lazily connected default group. The model is fitted to these"
    " figures by least squares: terms linear and quadratic in the number of ranks for a full mesh, linear for a tree."
    " The store's server has one thread, so its CPU time bounds the time to connect from below."
)
_NOTES = [
    "All processes share this machine's cores, and no message crosses a network: wall times and the time of an exchange"
    " are those of many processes on few cores. CPU times are what a larger machine would need as well.",
    "A connection to torch's store asks the name server for the name of the other end. The name server of this machine"
    " leaves some requests unanswered when there are many, and the resolver asks again after 5 s: wall times of 5 s and"
    " more consist of that.",
]
