"""The store through which the ranks of an attempt find each other, the socket it listens on, and the attempt's secret.

The batch step (locally: the process that starts the ranks) binds a port before any rank is told about it, serves
torch's TCPStore on that socket, and gives its address to the ranks the way torchrun's agent does. So no port is
guessed, no two attempts share one, and a script written for torchrun works unchanged.

Any user of the nodes can reach the rendezvous. The secret's file is readable only by the run's owner and exists only
during the attempt.
"""

from __future__ import annotations

import hmac
import json
import os
import random
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mgpu_slurm.core.errors import RendezvousError
from mgpu_slurm.core.processes import TRIAL_VARIABLE
from mgpu_slurm.request.spec import ATTEMPT_VARIABLE

_LOWEST_PORT = 10000


def bind(address: str, reachable: range | None = None) -> socket.socket:
    """Return a listening socket on a random port outside Linux's ephemeral range, so no outgoing connection uses it.

    Args:
        address: Interface to listen on; an empty string for all. Several nodes need all, because it is unknown which
            of this node's addresses the others use. Torch's store has no authentication: anyone who can connect to
            the port can read and overwrite its content. So ranks sign what they store (see `signed_store`).
        reachable: Ports that firewalls leave open, if the site has configured them.
    """
    low, high = _ephemeral_range()
    ports = [port for port in range(_LOWEST_PORT, 65536) if not low <= port <= high]
    for port in random.SystemRandom().sample(reachable or ports, k=min(200, len(reachable or ports))):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind((address, port))
            # ranks may connect before the store runs: they wait in the backlog
            listener.listen(4096)
            return listener
        except OSError:
            listener.close()
    where = f"of SrunPortRange {reachable[0]}-{reachable[-1]}" if reachable else f"outside {low}-{high}"
    raise RendezvousError(f"no port {where} could be bound on {address or 'any interface'}")


def _ephemeral_range() -> tuple[int, int]:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:
        return 32768, 60999
    return int(low), int(high)


def exports(address: str, port: int) -> dict[str, str]:
    """Return the ranks' environment variables; the last one tells torch that another process serves the store."""
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


# -- the secret with which ranks sign their messages to each other (see `rank.signed_store`)


SECRET_VARIABLE = "MGPU_SECRET"
"""Variable with the path of the secret's file."""

_OF_A_STORE = (ATTEMPT_VARIABLE, TRIAL_VARIABLE, "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
"""Variables that identify a store within an attempt: the run's own, a trial's, or that of a script's launcher."""


def create_secret(path: Path) -> None:
    """Write a new secret to the file.

    Raises:
        OSError: The file cannot be written.
    """
    with suppress(FileNotFoundError):
        # left by a forgotten attempt of the same number
        path.unlink()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
        file.flush()
        os.fsync(file.fileno())


def key_of_store(environ: Mapping[str, str]) -> bytes | None:
    """Return the key that signs the entries of this process's store, or None if this is not a process of a run.

    Entries signed for another store, such as that of an earlier attempt, are invalid in this one.

    Raises:
        RendezvousError: The secret cannot be read.
    """
    path = environ.get(SECRET_VARIABLE)
    if path is None:
        return None
    try:
        secret = Path(path).read_bytes()
    except OSError as error:
        raise RendezvousError(f"cannot read the attempt's secret: {error}") from None
    return hmac.digest(secret, json.dumps([environ.get(name) for name in _OF_A_STORE]).encode(), "sha256")
