"""Hands the rendezvous socket from the batch step to rank 0, which runs on the same node.

The batch step binds the port, because its address has to be known before any rank starts. The process that serves
torch's store has to import torch, and rank 0 of a job function does so anyway: this saves the node an import of one or
two seconds. If rank 0 does not take the socket, the batch step serves the store itself.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct

VARIABLE = "MGPU_LISTENER"
"""Variable with the name of the handoff socket in Linux's abstract namespace, without its leading zero byte."""

ANSWER_SECONDS = 60.0
"""Seconds that rank 0 waits for the batch step to hand over the socket."""

_CREDENTIALS = struct.Struct("iII")


class SocketOffer:
    """The batch step's side."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._name = f"mgpu-{secrets.token_hex(16)}"
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._door.bind(f"\0{self._name}")
        self._door.listen(1)

    def variables(self) -> dict[str, str]:
        return {VARIABLE: self._name}

    def is_taken(self) -> bool:
        """Block until rank 0 has taken the socket; return False if a rank connects to it first and must be served."""
        with self._door:
            while True:
                ready, _, _ = select.select([self._door, self._listener], [], [])
                if self._door not in ready:
                    return False
                if self._gave():
                    self._listener.close()
                    return True

    def _gave(self) -> bool:
        """Hand the socket to a process of this user; any user can connect to a name in the abstract namespace."""
        asking, _ = self._door.accept()
        with asking:
            if user_of(asking) != os.getuid():
                return False
            try:
                socket.send_fds(asking, [b"."], [self._listener.fileno()])
            except OSError:
                # it has ended meanwhile, and its end explains more than this error
                return False
            return True


def user_of(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    return credentials_of(connection)[1]


def credentials_of(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and user id of the process that connected or, at the other end, has bound the socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return int(pid), int(user)


def take(rank: int) -> int | None:
    """Return the descriptor of the bound socket on rank 0; None if there is no socket to take."""
    name = os.environ.pop(VARIABLE, None)
    if name is None or rank != 0:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.settimeout(ANSWER_SECONDS)
        try:
            door.connect(f"\0{name}")
            if user_of(door) != os.getuid():
                # the batch step has closed its socket, and another user has taken the name
                return None
            _, descriptors, _, _ = socket.recv_fds(door, 1, 1)
        except OSError:
            # another network namespace, or another process was faster
            return None
    return descriptors[0] if descriptors else None
