"""Reports of a sweep's script to the worker rank that started it, over a Unix socket.

The script's rank 0 sends a line of JSON, `{"progress": 3, "metrics": {...}}`, and receives one, `{"given_up": null}`
or the reason why the trial is pruned, with `"pause"` and `"save"`, whether it is to pause or to be saved. A name in
Linux's abstract namespace works behind launchers that close file descriptors.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from mgpu_slurm.job.socket_handoff import user_of


@dataclass(frozen=True)
class Verdict:
    """What becomes of a trial after a report; by default it continues."""

    prune_reason: str | None = None
    """Why it is pruned."""
    pauses: bool = False
    """Whether it pauses at the next place where it can be saved."""
    saves: bool = False
    """Whether it is saved at the next place."""


CONTINUE, PAUSE, SAVE = Verdict(), Verdict(pauses=True), Verdict(saves=True)

JudgeCallback = Callable[[int, dict[str, float]], Verdict]
"""Called on rank 0 with the progress and metrics of a report; returns what becomes of the trial."""

VARIABLE = "MGPU_REPORTS"
"""Variable with the name of the socket for reports, without its leading zero byte."""


class ReportServer:
    """The worker's side: receives reports and answers them."""

    def __init__(self, judge: JudgeCallback) -> None:
        self._judge = judge
        self.name = f"mgpu-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(8)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._received: dict[socket.socket, bytes] = {}

    def watch(self, descriptor: int) -> None:
        """Make `serve` return when this descriptor is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ)

    def serve(self, seconds: float) -> None:
        """Wait for at most this time until there is something to read, and answer reports that have arrived."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.fileobj, socket.socket):
                self._receive(key.fileobj)

    def close(self) -> None:
        for connection in self._received:
            connection.close()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if user_of(connection) != os.getuid():
            # any user can connect to a name in the abstract namespace
            connection.close()
            return
        self._received[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 16)
            *lines, self._received[connection] = (self._received[connection] + data).split(b"\n")
            for report in map(json.loads, lines):
                verdict = self._judge(report["progress"], report["metrics"])
                answer = {"given_up": verdict.prune_reason, "pause": verdict.pauses, "save": verdict.saves}
                connection.sendall(f"{json.dumps(answer)}\n".encode())
        except (ConnectionError, ValueError):
            # it has ended, or does not follow the protocol
            data = b""
        if not data:
            self._selector.unregister(connection)
            del self._received[connection]
            connection.close()


class ReportClient:
    """The script's side: a callback for `Run`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stream: TextIO | None = None

    def __call__(self, progress: int, metrics: dict[str, float]) -> Verdict:
        """Report, and return what becomes of the trial; raise ConnectionError if the worker is gone."""
        stream = self._stream = self._stream or self._connect()
        try:
            return _ask(stream, progress, metrics)
        except OSError:
            # else the error's traceback keeps the stream in a cycle, and Python 3.12 may warn when it collects that
            self._stream = None
            with contextlib.suppress(OSError):
                stream.close()
            raise

    def _connect(self) -> TextIO:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(f"\0{self._name}")
            if user_of(connection) != os.getuid():
                raise ConnectionError("the worker that started this script is gone, and another user has its socket")
            # keeps the connection open
            return connection.makefile("rw", encoding="utf-8")


def _ask(stream: TextIO, progress: int, metrics: dict[str, float]) -> Verdict:
    stream.write(json.dumps({"progress": progress, "metrics": metrics}) + "\n")
    stream.flush()
    line = stream.readline()
    if not line:
        raise ConnectionError("the worker that started this script is gone")
    answer = json.loads(line)
    return Verdict(answer["given_up"], answer.get("pause", False), answer.get("save", False))
