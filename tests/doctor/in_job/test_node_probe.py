"""What one node measures: real sockets and files, and GPUs behind a stand-in for NVML."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mgpu_slurm.core.files import append_jsonl
from mgpu_slurm.core.processes import RUN_VARIABLE
from mgpu_slurm.doctor import partners
from mgpu_slurm.doctor.in_job import bandwidth, node_probe
from mgpu_slurm.job import store_server
from mgpu_slurm.run_folder.layout import RunFolder


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(bandwidth, "SPAN", 0.05)
    with closing(store_server.bind("127.0.0.1")) as listener:
        bandwidth.serve(listener)
        yield listener.getsockname()[1]


def test_network_is_measured_again_and_again_with_one_listener(port: int) -> None:
    for _ in range(2):
        assert bandwidth.measure("127.0.0.1", port) > 1e6


def test_slower_direction_counts(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    send = bandwidth.send

    def slowly(connection: socket.socket) -> int:
        if threading.current_thread().name == "bandwidth":
            # the other node sends a byte, and the rest a second later
            connection.send(b"x")
            time.sleep(1)
            return 1
        return send(connection)

    monkeypatch.setattr(bandwidth, "send", slowly)
    assert bandwidth.measure("127.0.0.1", port) < 1e3


def test_node_that_cannot_be_reached_is_a_problem_not_a_failure() -> None:
    with closing(store_server.bind("127.0.0.1")) as listener:
        nobody = listener.getsockname()[1]
    measured = node_probe.measured("127.0.0.1", nobody)
    assert measured == {"rate": None, "problem": f"[Errno {errno.ECONNREFUSED}] Connection refused"}


def test_orders_are_followed_until_the_node_may_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    partners.prepare(folder)
    orders = node_probe.followed_orders(folder)
    append_jsonl(partners.orders(folder), {"node": "n2", "port": 1})
    assert next(orders) == {"node": "n2", "port": 1}
    append_jsonl(partners.orders(folder), {"node": "n3", "port": 2}, {"leave": True})
    assert list(orders) == [{"node": "n3", "port": 2}]
    # a `doctor` that is gone gives no orders
    monkeypatch.setattr(node_probe, "ORDERED_WITHIN", 0.0)
    assert list(node_probe.followed_orders(folder)) == []


def test_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    free, rate = node_probe.disk(str(tmp_path))
    assert 0 < free <= os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert rate > 0
    assert list(tmp_path.iterdir()) == []


def test_temporary_folder_that_takes_no_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    found = node_probe.node_facts(asked_gpus=0)
    assert found.broken == (f"cannot write to {tmp_path}/scratch: No such file or directory",)
    assert (found.free, found.write, found.folder) == (None, None, f"{tmp_path}/scratch")
    assert found.memory > 0


def test_missing_gpus_break_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_probe, "disk", lambda place: (1, 1.0))
    for here, words in ((0, "none"), (6, "6")):
        gpus = [node_probe.GpuFacts("NVIDIA H200")] * here
        monkeypatch.setattr(node_probe, "gpu_facts", lambda gpus=gpus: (gpus, "", [], []))
        assert node_probe.node_facts(asked_gpus=8).broken == (f"torch sees {words} of 8 GPUs",)


class Unsupported(Exception):
    """NVML's error for what a kind of GPU does not report."""


class Library:
    """NVML with two GPUs, of which one is throttled and has had memory errors."""

    NVMLError = Unsupported
    NVML_CLOCK_SM = 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = NVML_TEMPERATURE_GPU = 0
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80
    nvmlClocksThrottleReasonHwSlowdown = 0x8

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, index: int) -> str:
        return ["GPU-a", "GPU-b"][index]

    def nvmlDeviceGetName(self, index: int) -> str:
        return "NVIDIA H200"

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"550.54.15"

    def nvmlDeviceGetClockInfo(self, index: int, kind: int) -> int:
        return [1980, 1200][index]

    def nvmlDeviceGetMaxClockInfo(self, index: int, kind: int) -> int:
        raise Unsupported

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, index: int) -> int:
        return [0, 0x40][index]

    def nvmlDeviceGetTotalEccErrors(self, index: int, *kinds: int) -> int:
        return [0, 3][index]

    def nvmlDeviceGetComputeRunningProcesses(self, index: int) -> list[Any]:
        return [SimpleNamespace(pid=os.getpid(), usedGpuMemory=0)]

    def __getattr__(self, name: str) -> Any:
        def unsupported(*_: Any) -> None:
            raise Unsupported

        return unsupported


def test_clocks_and_health_are_read_for_the_gpus_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_VARIABLE, "/runs/doctor")
    driver, clocks, broken, slow = node_probe.read_gpus(Library(), ["b", "a", "c"])
    assert driver == "550.54.15"
    assert clocks == [(1200, None), (1980, None), (None, None)]
    assert broken == ["GPU GPU-b (NVIDIA H200) has had 3 uncorrectable memory errors since its driver was loaded"]
    assert slow == ["GPU GPU-b (NVIDIA H200) is throttled: thermal slowdown (hardware)"]


@pytest.mark.gpu
def test_real_gpus_are_measured_under_load() -> None:
    found, driver, _, _ = node_probe.gpu_facts()
    assert driver
    for gpu in found:
        assert gpu.clock is not None
        assert gpu.highest_clock is not None
        assert 0 < gpu.clock <= gpu.highest_clock
        assert gpu.flops is not None
        assert gpu.flops > 1e12
