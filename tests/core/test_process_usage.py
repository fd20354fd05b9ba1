"""What processes use, read from the kernel while they do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core import process_usage
from mgpu_slurm.core.process_usage import TreeReader, TreeUsage
from tests.support import wait_until

MB = 1 << 20


@contextmanager
def process(script: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a Python process that has printed a line; it ends when its input does."""
    command = [
        sys.executable,
        "-c",
        f"import os, subprocess, sys, threading, time\n{script}\nprint('.', flush=True)\nsys.stdin.read()",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options) as running:  # type: ignore[call-overload]
        assert running.stdout is not None
        assert running.stdout.readline() == ".\n"
        yield running
        assert running.stdin is not None
        running.stdin.close()


def read(pid: int) -> TreeUsage:
    return TreeReader().read([pid])[pid]


def test_memory_that_a_process_had_for_a_moment_is_known_later() -> None:
    with process("bytearray(b'x') * (200 << 20)") as running:
        found = read(running.pid)
    assert found.rss < 100 * MB
    assert 200 * MB < found.peak < 300 * MB
    assert found.pids == [running.pid]


def test_processes_below_a_process_count_also_if_a_thread_has_started_them() -> None:
    child = "[sys.executable, '-c', \"x = bytearray(b'x') * (100 << 20); print('.', flush=True); input()\"]"
    script = f"""
def start():
    child = subprocess.Popen({child}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    done.set()
    time.sleep(3600)
done = threading.Event()
threading.Thread(target=start, daemon=True).start()
done.wait()
"""
    with process(script) as running:
        found = read(running.pid)
        below = found.below
    assert len(found.pids) == 2
    assert found.rss > 100 * MB
    assert below.keys() == {running.pid}
    assert 100 * MB < below[running.pid] < 150 * MB
    assert found.rss - below[running.pid] < 100 * MB


def test_cpu_time_of_processes_that_have_ended_stays() -> None:
    busy = "subprocess.run([sys.executable, '-c', 'import time\\nwhile time.process_time() < 0.5: pass'], check=True)"
    with process(busy) as running:
        found = read(running.pid)
    assert found.cpu >= 0.5
    assert len(found.pids) == 1


def test_threads_that_wait_for_a_core_are_counted_since_the_last_reading() -> None:
    two = """
def spin():
    while True:
        pass
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
if not os.fork():
    spin()
threading.Thread(target=spin, daemon=True).start()
"""
    reader = TreeReader()
    with process(two) as running:
        reader.read([running.pid])
        before = read(running.pid).cpu
        # two of them share a core
        wait_until(lambda: read(running.pid).cpu > before + 0.4)
        waited = reader.read([running.pid])[running.pid].wait
        at_once = reader.read([running.pid])[running.pid].wait
        for pid in read(running.pid).pids[1:]:
            os.kill(pid, 9)
    assert waited is not None
    assert waited > 0.2
    assert at_once is not None
    assert at_once < waited


def test_bytes_to_the_disk_are_counted(tmp_path: Path) -> None:
    path = str(tmp_path / "written")
    script = f"file = open({path!r}, 'wb', buffering=0); file.write(bytes(5 << 20)); os.fsync(file.fileno())"
    with process(script) as running:
        found = read(running.pid)
    if not found.wrote:
        pytest.skip("this file system is in memory")
    assert found.wrote >= 5 * MB


def test_process_that_has_ended_uses_nothing() -> None:
    running = subprocess.Popen(["true"])
    wait_until(lambda: (read(running.pid).pids) == [])
    running.wait()
    assert read(running.pid) == TreeUsage()


def test_shared_memory_counts_once() -> None:
    script = "x = bytearray(b'x') * (100 << 20)\nif not os.fork(): time.sleep(3600)"
    with process(script) as running:
        wait_until(lambda: len(read(running.pid).pids) == 2)
        found = read(running.pid)
        once = process_usage.shared_once(found.pids, most=500 * MB)
        too_large = process_usage.shared_once(found.pids, most=50 * MB)
        os.kill(found.pids[1], 9)
    assert found.rss > 200 * MB
    assert once is not None
    assert 100 * MB < once < 150 * MB
    assert too_large is None


def test_processes_are_found_by_their_environment_without_those_below_them() -> None:
    environ = os.environ | {"MGPU_TEST_JOB": "1", "MGPU_TEST_STEP": str(time.monotonic())}
    entries = [f"{name}={environ[name]}" for name in ("MGPU_TEST_JOB", "MGPU_TEST_STEP")]
    with process("subprocess.Popen(['sleep', '3600'], stdout=subprocess.DEVNULL)", env=environ) as running:
        assert process_usage.with_entries(entries) == [running.pid]
        assert process_usage.with_entries([*entries, "MGPU_TEST_NODE=n1"]) == []
        for pid in read(running.pid).pids[1:]:
            os.kill(pid, 9)
