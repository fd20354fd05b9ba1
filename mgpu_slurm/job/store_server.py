"""The store through which the ranks of an attempt find each other, and the socket it listens on.

The batch step (locally: the process that starts the ranks) binds a port before any rank is told about it, serves
torch's TCPStore on that socket, and gives its address to the ranks the way torchrun's agent does. So no port is
guessed, no two attempts share one, and a script written for torchrun works unchanged.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_slurm.core.errors import RendezvousError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

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


def serve(listener: socket.socket) -> TCPStore:
    """Serve the store on the bound socket for the lifetime of the returned object."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = listener.getsockname()
    return TCPStore(
        address or "localhost", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
