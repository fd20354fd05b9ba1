"""Join the other ranks of an attempt, through the store that the job serves (see `job.store_server`)."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from mgpu_slurm.core import torch_versions
from mgpu_slurm.core.errors import RendezvousError, UserError
from mgpu_slurm.rank import rank_info
from mgpu_slurm.rank.preflight import shared_gpu_warnings
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.request.parallelism import LONGEST_COMPILATION, compiles
from mgpu_slurm.request.spec import STUCK_AFTER_VARIABLE

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

ARRIVAL_TIMEOUT = timedelta(minutes=5)
"""Time for which ranks wait for each other at the start; nodes of a large job boot and import at different speeds."""

ANSWER_SECONDS = 5.0
"""Seconds that the store may take to accept a connection before it counts as gone."""

LONGER_THAN_STUCK_MINUTES = 5.0
"""Minutes that collectives wait beyond the longest time for which a rank may be silent."""


def join(
    facts: RankInfo,
    device: torch.device,
    environ: Mapping[str, str] = os.environ,
    timeout: timedelta = ARRIVAL_TIMEOUT,
    listener: int | None = None,
) -> str | None:
    """Wait until all ranks have arrived, then create the default process group.

    Ranks that share a GPU communicate through gloo, because NCCL refuses two ranks on one device.

    Args:
        listener: bound socket on which this rank, rank 0, serves the store; see `job.socket_handoff`.

    Returns:
        a warning if another rank uses the same GPU, else None.

    Raises:
        RendezvousError: ranks did not arrive, or expect a different world size; the message names them.
    """
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    from mgpu_slurm.rank import torch_adapter

    store = connect(facts, environ, timeout, listener)
    warnings = _check_in(store, facts, rank_info.gpu_for_nccl(device), timeout)
    has_nccl = device.type == "cuda" and not warnings
    torch_adapter.connect_lazily()
    dist.init_process_group(
        "cuda:nccl,cpu:gloo" if has_nccl else "gloo",
        store=PrefixStore("default", store),
        rank=facts.rank,
        world_size=facts.world_size,
        device_id=device if has_nccl else None,
        timeout=collective_timeout(),
    )
    return warnings.get(facts.rank)


def collective_timeout() -> timedelta | None:
    """Return the time-out of collectives, or None for torch's default.

    It is longer than a rank may be stuck, or compile with `--compile`, so that the watchdog reports that rank first.
    """
    minutes = float(os.environ.get(STUCK_AFTER_VARIABLE, "0"))
    if not minutes:
        return None
    return timedelta(minutes=minutes * (1 + LONGEST_COMPILATION * compiles()) + LONGER_THAN_STUCK_MINUTES)


def connect(facts: RankInfo, environ: Mapping[str, str], timeout: timedelta, listener: int | None = None) -> Store:
    """Connect this rank to the store of its attempt.

    Args:
        listener: see `join`.

    Raises:
        RendezvousError: the store does not answer, or the secret for its signatures cannot be read.
    """
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    from mgpu_slurm.rank.communication.signed_store import signed

    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not address or not port:
        raise UserError(
            f"rank {facts.rank} of {facts.world_size} has no MASTER_ADDR and MASTER_PORT: "
            "start it with `mgpu-slurm submit` or torchrun"
        )
    served_elsewhere = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            address,
            int(port),
            facts.world_size,
            is_master=listener is not None or (facts.rank == 0 and not served_elsewhere),
            timeout=timeout,
            wait_for_workers=False,
            **torch_versions.serving_on(listener),
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise RendezvousError(f"rank {facts.rank} cannot reach the rendezvous at {address}:{port}: {error}") from None
    return PrefixStore("mgpu", signed(store, facts.rank, environ))


def is_served(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the store of this process's attempt still accepts connections."""
    address = environ.get("MASTER_ADDR", "")
    port = int(environ.get("MASTER_PORT", "0"))
    try:
        socket.create_connection((address, port), ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def _check_in(store: Store, facts: RankInfo, gpu: str | None, timeout: timedelta) -> dict[int, str]:
    """Report this rank's arrival, and return the warnings of all ranks, by rank.

    Rank 0 waits for all ranks and sends them its verdict, so that every rank fails with the same message.
    """
    import torch.distributed as dist

    store.set(f"arrived/{facts.rank}", json.dumps([facts.node_name, facts.world_size, gpu]))
    if facts.rank == 0:
        store.set("verdict", json.dumps(_verdict(store, facts, timeout)))
    try:
        # rank 0 may need its whole time-out before it answers
        store.wait(["verdict"], timeout * 1.2)
    except dist.DistStoreError:
        raise RendezvousError(
            f"rank 0 has not arrived after {timeout.total_seconds():.0f} s (reported by rank {facts.rank} on"
            f" {facts.node_name}): look at the log of rank 0"
        ) from None
    problem, warnings = json.loads(store.get("verdict"))
    if problem:
        raise RendezvousError(problem)
    return {int(rank): text for rank, text in warnings.items()}


def _verdict(store: Store, facts: RankInfo, timeout: timedelta) -> tuple[str, dict[int, str]]:
    """Return the problem, and warnings by rank; the problem is empty if all ranks arrived with the same world size."""
    import torch.distributed as dist

    keys = [f"arrived/{rank}" for rank in range(facts.world_size)]
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        names = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
        problem = f"rank {names} of {facts.world_size} has not arrived after {timeout.total_seconds():.0f} s"
        return f"{problem}: look at its log, and check that its node can reach this one", {}
    gpus = []
    for rank, key in enumerate(keys):
        node, world_size, gpu = json.loads(store.get(key))
        gpus.append((node, gpu))
        if world_size != facts.world_size:
            problem = f"rank {rank} on {node} expects {world_size} ranks, rank 0 expects"
            return f"{problem} {facts.world_size}: the ranks were not started by one launcher", {}
    return "", shared_gpu_warnings(gpus)
