"""A script's reports to the worker that started it: exact both ways, from whichever process asks."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator

import pytest

from mgpu_slurm.metrics.report_socket import CONTINUE, PAUSE, ReportClient, ReportServer, Verdict


class Study:
    """Answers as it is told to, and keeps what it heard."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, dict[str, float]]] = []
        self.answer = CONTINUE

    def judge(self, progress: int, metrics: dict[str, float]) -> Verdict:
        self.heard.append((progress, metrics))
        return self.answer


@pytest.fixture
def study() -> Study:
    return Study()


@pytest.fixture
def server(study: Study) -> Iterator[ReportServer]:
    server = ReportServer(study.judge)
    stopped = threading.Event()

    def serve() -> None:
        while not stopped.is_set():
            server.serve(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    yield server
    stopped.set()
    thread.join()
    server.close()


def test_numbers_arrive_exactly_and_the_answer_is_returned(server: ReportServer, study: Study) -> None:
    client = ReportClient(server.name)
    assert client(1, {"loss": 0.1 + 0.2}) == CONTINUE
    study.answer = Verdict("worse than the other trials: ü")
    assert client(2**60, {"loss": float("inf"), "x": 5e-324}) == study.answer
    assert study.heard == [(1, {"loss": 0.30000000000000004}), (2**60, {"loss": math.inf, "x": 5e-324})]
    study.answer = PAUSE
    assert client(3, {"loss": float("nan")}) == PAUSE
    assert math.isnan(study.heard[-1][1]["loss"])


def test_client_that_disconnects_does_not_block_others(server: ReportServer, study: Study) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        visitor.connect(f"\0{server.name}")
        visitor.sendall(b'{"progress": 1, ')
    clients = [ReportClient(server.name) for _ in range(3)]
    assert [client(place, {}) for place, client in enumerate(clients)] == [CONTINUE] * 3
    assert study.heard == [(0, {}), (1, {}), (2, {})]


def test_report_to_a_closed_server_raises_connection_error() -> None:
    server = ReportServer(Study().judge)
    client = ReportClient(server.name)
    answered: list[BaseException | Verdict] = []

    def ask() -> None:
        try:
            answered.append(client(1, {}))
        except ConnectionError as error:
            answered.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    # the first time it comes in, and its question is not answered any more
    server.serve(5)
    server.close()
    asking.join()
    assert isinstance(answered[0], ConnectionError)
