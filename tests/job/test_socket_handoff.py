from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from mgpu_slurm.job import socket_handoff, store_server
from mgpu_slurm.job.socket_handoff import SocketOffer
from mgpu_slurm.metrics import report_socket
from tests.forks import FORKS


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with store_server.bind("127.0.0.1") as listener:
        yield listener


def offered(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Thread, list[bool]]:
    """An offer that waits in a thread, as the batch step's does, and what it says in the end."""
    offer = SocketOffer(listener)
    (pair,) = offer.variables().items()
    monkeypatch.setenv(*pair)
    said: list[bool] = []
    thread = threading.Thread(target=lambda: said.append(offer.is_taken()))
    thread.start()
    return thread, said


def test_rank_0_takes_the_bound_socket_and_serves_on_it(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = listener.getsockname()
    thread, said = offered(listener, monkeypatch)
    descriptor = socket_handoff.take(0)
    thread.join()
    assert said == [True]
    assert socket_handoff.VARIABLE not in os.environ
    assert descriptor is not None
    # the batch step holds it no longer: once rank 0 is gone, nobody waits at a door that never opens
    assert listener.fileno() == -1
    with socket.socket(fileno=descriptor) as taken, socket.create_connection(address) as client:
        server, _ = taken.accept()
        with server:
            client.sendall(b"hello")
            assert server.recv(5) == b"hello"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_batch_step_keeps_the_socket_if_a_rank_connects_early(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, said = offered(listener, monkeypatch)
    with socket.create_connection(listener.getsockname()):
        thread.join()
    assert said == [False]
    assert socket_handoff.take(0) is None
    assert listener.fileno() != -1


def test_socket_can_still_be_taken_after_a_rank_disconnects(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = SocketOffer(listener)
    ((_, name),) = offer.variables().items()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.connect(f"\0{name}")
    said: list[bool] = []
    thread = threading.Thread(target=lambda: said.append(offer.is_taken()))
    thread.start()
    monkeypatch.setenv(socket_handoff.VARIABLE, name)
    descriptor = socket_handoff.take(0)
    thread.join()
    assert said == [True]
    assert descriptor is not None
    os.close(descriptor)


def test_ranks_other_than_0_take_no_socket(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    thread, said = offered(listener, monkeypatch)
    assert socket_handoff.take(1) is None
    assert socket_handoff.VARIABLE not in os.environ
    assert said == []
    with socket.create_connection(listener.getsockname()):
        thread.join()


def squats(name: str, there: Connection) -> None:
    """Another user takes a name that nobody has any more."""
    os.setuid(65534)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(f"\0{name}")
        door.listen()
        there.send("ready")
        there.recv()


@pytest.mark.skipif(os.getuid() != 0, reason="starts a process of another user")
def test_socket_name_taken_by_another_user_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"mgpu-test-{os.getpid()}"
    here, there = FORKS.Pipe()
    stranger = FORKS.Process(target=squats, args=(name, there))
    stranger.start()
    assert here.recv() == "ready"
    monkeypatch.setenv(socket_handoff.VARIABLE, name)
    assert socket_handoff.take(0) is None
    with pytest.raises(ConnectionError, match="another user has its socket"):
        report_socket.ReportClient(name)(1, {"loss": 0.5})
    here.send("over")
    stranger.join()
