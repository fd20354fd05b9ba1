"""Measure the network between two nodes that are in different jobs: plain TCP, in both directions."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

SPAN = 0.5
"""Seconds of sending in each direction."""

CONNECT_WITHIN = 5.0
SILENT = 15.0
"""Seconds without a byte after which the other node counts as gone."""

_BLOCK = bytes(1 << 20)


def serve(listener: socket.socket) -> None:
    """Let other nodes measure with this one, in a thread, until the listener is closed.

    Anybody can connect, but only bytes without meaning come and go.
    """
    threading.Thread(target=_accept, args=(listener,), name="bandwidth", daemon=True).start()


def _accept(listener: socket.socket) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            # one that ends early is the other node's problem, which reports it
            with connection, suppress(OSError):
                connection.settimeout(SILENT)
                receive(connection)
                send(connection)


def measure(address: str, port: int) -> float:
    """Return the bytes per second in the slower direction.

    Raises:
        OSError: the other node cannot be reached, or is gone.
    """
    with socket.create_connection((address, port), CONNECT_WITHIN) as connection:
        connection.settimeout(SILENT)
        begun = time.perf_counter()
        sent = send(connection)
        # its first byte comes once it has received all
        first = len(connection.recv(1))
        turned = time.perf_counter()
        received = first + receive(connection)
        if not received:
            raise ConnectionError("it closed the connection")
        return min(sent / (turned - begun), received / (time.perf_counter() - turned))


def send(connection: socket.socket) -> int:
    """Send for a while, then the end; return the number of bytes."""
    sent = 0
    end = time.perf_counter() + SPAN
    while time.perf_counter() < end:
        sent += connection.send(_BLOCK)
    connection.shutdown(socket.SHUT_WR)
    return sent


def receive(connection: socket.socket) -> int:
    """Receive to the end; return the number of bytes."""
    buffer = bytearray(1 << 20)
    received = 0
    while size := connection.recv_into(buffer):
        received += size
    return received
