"""A script's reports to the worker that started it: exact both ways, from whichever process asks."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator

import pytest

from mgpu_slurm.metrics.report_socket import Caller, Desk


class Study:
    """Answers as it is told to, and keeps what it heard."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, dict[str, float]]] = []
        self.answer: str | None = None

    def judge(self, progress: int, metrics: dict[str, float]) -> str | None:
        self.heard.append((progress, metrics))
        return self.answer


@pytest.fixture
def study() -> Study:
    return Study()


@pytest.fixture
def desk(study: Study) -> Iterator[Desk]:
    desk = Desk(study.judge)
    stopped = threading.Event()

    def serve() -> None:
        while not stopped.is_set():
            desk.serve(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    yield desk
    stopped.set()
    thread.join()
    desk.close()


def test_numbers_arrive_as_they_are_and_the_answer_comes_back(desk: Desk, study: Study) -> None:
    caller = Caller(desk.name)
    assert caller(1, {"loss": 0.1 + 0.2}) is None
    study.answer = "hopeless beside the others: ü"
    assert caller(2**60, {"loss": float("inf"), "x": 5e-324}) == study.answer
    assert study.heard == [(1, {"loss": 0.30000000000000004}), (2**60, {"loss": math.inf, "x": 5e-324})]
    caller(3, {"loss": float("nan")})
    assert math.isnan(study.heard[-1][1]["loss"])


def test_one_that_comes_and_goes_keeps_nobody_from_asking(desk: Desk, study: Study) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        visitor.connect(f"\0{desk.name}")
        visitor.sendall(b'{"progress": 1, ')
    callers = [Caller(desk.name) for _ in range(3)]
    assert [caller(place, {}) for place, caller in enumerate(callers)] == [None] * 3
    assert study.heard == [(0, {}), (1, {}), (2, {})]


def test_a_worker_that_is_gone_is_an_error() -> None:
    desk = Desk(Study().judge)
    caller = Caller(desk.name)
    answered: list[BaseException | str | None] = []

    def ask() -> None:
        try:
            answered.append(caller(1, {}))
        except ConnectionError as error:
            answered.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    # the first time it comes in, and its question is not answered any more
    desk.serve(5)
    desk.close()
    asking.join()
    assert isinstance(answered[0], ConnectionError)
