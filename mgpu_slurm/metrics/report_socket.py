"""How a script of a sweep reports: to the worker's rank that started it, over a socket of its node.

The script's rank 0 says a line of JSON, `{"progress": 3, "metrics": {...}}`, and hears one, `{"given_up": null}` or why
the study gives the trial up. A name of Linux's abstract namespace reaches through launchers that close descriptors.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
from collections.abc import Callable
from typing import Any

from mgpu_slurm.job.socket_handoff import user_of

VARIABLE = "MGPU_REPORTS"
"""Where scripts report: the name of the socket, without its leading zero byte."""


class ReportServer:
    """The worker's side: it hears reports and answers them."""

    def __init__(self, judge: Callable[[int, dict[str, float]], str | None]) -> None:
        """
        Args:
            judge: hears the progress and its metrics; answers why the training is to end, or None.
        """
        self._judge = judge
        self.name = f"mgpu-{secrets.token_hex(16)}"
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._door.bind(f"\0{self.name}")
        self._door.listen(8)
        self._door.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._heard: dict[socket.socket, bytes] = {}

    def watch(self, descriptor: int) -> None:
        """Ends a wait when this descriptor has something to read."""
        self._selector.register(descriptor, selectors.EVENT_READ)

    def serve(self, seconds: float) -> None:
        """Answers what is asked in this time, or until a watched descriptor has something to read, or one answer."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._door:
                self._let_in()
            elif isinstance(key.fileobj, socket.socket):
                self._hear(key.fileobj)

    def close(self) -> None:
        for caller in self._heard:
            caller.close()
        self._door.close()
        self._selector.close()

    def _let_in(self) -> None:
        caller, _ = self._door.accept()
        if user_of(caller) != os.getuid():
            # the names of the abstract namespace are open to all
            caller.close()
            return
        self._heard[caller] = b""
        self._selector.register(caller, selectors.EVENT_READ)

    def _hear(self, caller: socket.socket) -> None:
        try:
            data = caller.recv(1 << 16)
            *lines, self._heard[caller] = (self._heard[caller] + data).split(b"\n")
            questions = [json.loads(line) for line in lines]
            for said in questions:
                answer = {"given_up": self._judge(said["progress"], said["metrics"])}
                caller.sendall(f"{json.dumps(answer)}\n".encode())
        except (ConnectionError, ValueError):
            # it was ended, or speaks otherwise
            data = b""
        if not data:
            self._selector.unregister(caller)
            del self._heard[caller]
            caller.close()


class ReportClient:
    """The script's side: a judge as `Run` takes one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stream: Any = None

    def __call__(self, progress: int, metrics: dict[str, float]) -> str | None:
        if self._stream is None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(f"\0{self._name}")
                if user_of(connection) != os.getuid():
                    raise ConnectionError(
                        "the worker that started this script is gone, and another user has its socket"
                    )
                # keeps the connection open
                self._stream = connection.makefile("rw", encoding="utf-8")
        self._stream.write(json.dumps({"progress": progress, "metrics": metrics}) + "\n")
        self._stream.flush()
        line = self._stream.readline()
        if not line:
            raise ConnectionError("the worker that started this script is gone")
        given_up: str | None = json.loads(line)["given_up"]
        return given_up
