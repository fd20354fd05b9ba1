"""A web hook on this machine, which records what is posted to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any


@contextmanager
def web_hook(status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve a web hook; yield its address and what was posted."""
    posted: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))) | {"path": self.path})
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/hook", posted
        server.shutdown()
        thread.join()
