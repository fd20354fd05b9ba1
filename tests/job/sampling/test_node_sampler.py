"""Samples of what ranks use: nothing that they had is missing, and nothing that fails is noticed by them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mgpu_slurm.core import node_gpus
from mgpu_slurm.core.process_usage import TreeReader
from mgpu_slurm.job.sampling import node_sampler, sampler_thread
from mgpu_slurm.job.sampling.node_sampler import ChildRank, ChildSampling, NodeSampler
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.usage_records import GpuUse, NodeUsage, read_usage
from tests.support import REPOSITORY, wait_until

MB = 1 << 20
ALLOCATES = "bytearray(b'x') * (200 << 20)"
"""Has so much memory for a moment."""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_thread, "FIRST_SECONDS", 0.0)


Make = Callable[..., NodeSampler]


@pytest.fixture
def sampler(folder: RunFolder) -> Iterator[Make]:
    made: list[NodeSampler] = []

    def make(*pids: int, gpus: Mapping[str, str] | None = None) -> NodeSampler:
        made.append(NodeSampler(folder, 1, "n1", lambda: pids, gpus))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.close()


def only(folder: RunFolder) -> NodeUsage:
    (found,) = read_usage(folder)
    return found


def child(script: str) -> subprocess.Popen[str]:
    """Start a process that prints a line after a script, and ends with its input."""
    words = [sys.executable, "-c", f"import subprocess, sys\n{script}\nprint('.', flush=True)\nsys.stdin.read()"]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ready(running: subprocess.Popen[str]) -> subprocess.Popen[str]:
    assert running.stdout is not None
    assert running.stdout.readline() == ".\n"
    return running


def end(running: subprocess.Popen[str]) -> None:
    assert running.stdin is not None
    running.stdin.close()
    running.wait()
    assert running.stdout is not None
    running.stdout.close()


def test_rank_that_allocates_between_two_samples_has_its_peak(folder: RunFolder, sampler: Make, at_once: None) -> None:
    running = child("input()\n" + ALLOCATES)
    own = sampler(running.pid)
    wait_until(lambda: any(found.peak > 0 for found in read_usage(folder)))
    assert only(folder).peak < 100 * MB
    assert running.stdin is not None
    running.stdin.write("\n")
    running.stdin.flush()
    ready(running)
    # the next sample would be due in ten seconds
    own.close()
    end(running)
    assert [sample.ranks for sample in only(folder).samples] == [1, 1]
    assert only(folder).samples[-1].rss < 100 * MB
    assert 200 * MB < only(folder).peak < 300 * MB


@pytest.mark.parametrize("script", [ALLOCATES, f"subprocess.run([sys.executable, '-c', {ALLOCATES!r}], check=True)"])
def test_rank_that_has_ended_before_a_sample_has_its_peak(folder: RunFolder, script: str) -> None:
    # in a separate process: the kernel counts for a child what its parent had when it started it
    code = """
import os, subprocess, sys
from pathlib import Path
from mgpu_slurm.job.sampling.node_sampler import ChildRank, ChildSampling
from mgpu_slurm.run_folder.layout import RunFolder
child = subprocess.Popen([sys.executable, "-c", sys.argv[2]])
sampling = ChildSampling(RunFolder(Path(sys.argv[1])), 1, {child.pid: ChildRank(3, "n2", None)})
_, _, used = os.wait4(child.pid, 0)
sampling.ended(child.pid, used)
sampling.close()
"""
    run(code, str(folder.path), f"import subprocess, sys\n{script}")
    (found,) = read_usage(folder)
    assert (found.node, found.samples, [*found.ends]) == ("n2", [], [3])
    assert 200 * MB < found.peak < 300 * MB
    assert found.cpu > 0


def test_own_end_has_the_peak_of_a_process_that_no_sample_has_seen(folder: RunFolder) -> None:
    code = f"""
import subprocess, sys
from pathlib import Path
from mgpu_slurm.job.sampling import node_sampler
from mgpu_slurm.run_folder.layout import RunFolder
bytearray(b"x") * (100 << 20)
subprocess.run([sys.executable, "-c", {ALLOCATES!r}], check=True)
node_sampler.note_own_end(RunFolder(Path(sys.argv[1])), 1, "n1", 0)
"""
    run(code, str(folder.path))
    (end,) = only(folder).ends.values()
    assert 100 * MB < end.peak < 200 * MB < end.child < 300 * MB
    # they may have had it at the same time
    assert only(folder).peak == end.peak + end.child


def run(code: str, *words: str) -> None:
    """Run Python code in a child of a small process: the kernel counts for a process what its parent had."""
    subprocess.run(["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", code, *words], check=True, cwd=REPOSITORY)


def test_ranks_of_two_nodes_are_sampled_apart(folder: RunFolder, at_once: None) -> None:
    running = [ready(child(f"x = bytearray(b'x') * ({size} << 20)")) for size in (50, 100)]
    places = {each.pid: ChildRank(rank, f"n{rank + 1}", None) for rank, each in enumerate(running)}
    sampling = ChildSampling(folder, 2, places)
    wait_until(lambda: len(read_usage(folder)) == 2 and all(each.samples for each in read_usage(folder)))
    sampling.close()
    for each in running:
        end(each)
    first, second = read_usage(folder)
    assert [(each.attempt, each.node) for each in (first, second)] == [(2, "n1"), (2, "n2")]
    assert 50 * MB < first.peak < 100 * MB < second.peak


def test_line_of_a_sample_is_short(folder: RunFolder, sampler: Make, at_once: None) -> None:
    # which ends with its input
    running = ready(child("below = subprocess.Popen(['cat'], stdin=subprocess.PIPE)"))
    own = sampler(running.pid)
    wait_until(lambda: folder.usage.exists() and bool(read_usage(folder)))
    own.close()
    assert (only(folder).samples[0].below or {}).keys() == {str(running.pid)}
    end(running)
    assert all(len(line) < 250 for line in folder.node_usage(1, "n1").read_text().splitlines())


def test_samples_are_written_in_pieces(
    folder: RunFolder, sampler: Make, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_thread, "SECONDS", 0.001)
    own = sampler(os.getpid())
    wait_until(lambda: len(own._samples) > 20)
    # the first one is there at once, the others come a minute later
    assert len(only(folder).samples) == 1
    own.close()
    assert len(only(folder).samples) > 20


# -- what fails


def test_disk_that_takes_nothing_costs_samples_only(folder: RunFolder, sampler: Make, at_once: None) -> None:
    folder.usage.write_text("no folder")
    running = ready(child(""))
    own = sampler(running.pid)
    wait_until(lambda: bool(own._samples))
    node_sampler.note_own_end(folder, 1, "n1", 0)
    # it is free again
    folder.usage.unlink()
    own.close()
    end(running)
    assert len(only(folder).samples) >= 2


def test_samples_that_no_disk_takes_do_not_fill_the_memory(
    folder: RunFolder, sampler: Make, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_thread, "SECONDS", 0.001)
    monkeypatch.setattr(node_sampler, "WRITE_SECONDS", 0.0)
    monkeypatch.setattr(node_sampler, "MOST_UNWRITTEN", 5)
    folder.usage.write_text("no folder")
    own = sampler(os.getpid())
    times: set[str] = set()
    wait_until(lambda: bool(times.update(each.time for each in list(own._samples))) or len(times) > 10)
    assert len(own._samples) <= 6


def test_look_that_fails_is_repeated(folder: RunFolder, sampler: Make, at_once: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(sampler_thread, "SECONDS", 0.01)
    read, failures = NodeSampler._sample, iter([ZeroDivisionError])

    def fails_once(*arguments: Any) -> Any:
        for error in failures:
            raise error
        return read(*arguments)

    monkeypatch.setattr(NodeSampler, "_sample", lambda own, measures_shared: fails_once(own, measures_shared))
    own = sampler(os.getpid())
    wait_until(lambda: bool(own._samples))


# -- GPUs


class Lost(Exception):
    """NVML's error for a GPU that does not answer."""


LIBRARY = SimpleNamespace(
    NVMLError=Lost,
    nvmlDeviceGetCount=lambda: 3,
    nvmlDeviceGetHandleByIndex=lambda index: index,
    nvmlDeviceGetUUID=lambda index: f"GPU-{'abc'[index]}1",
    nvmlDeviceGetUtilizationRates=lambda index: SimpleNamespace(gpu=10 * (index + 1)),
    nvmlDeviceGetPowerUsage=lambda index: 100_000 * (index + 1),
    nvmlDeviceGetMemoryInfo=lambda index: SimpleNamespace(used=index + 1),
)


@pytest.mark.parametrize(
    ("named", "expected"),
    [(None, [0, 1, 2]), ("2,0", [2, 0]), ("GPU-b1", [1]), ("GPU-c", [2]), ("", []), ("7", []), ("MIG-x", [])],
)
def test_gpus_of_a_run_are_those_that_it_can_see(named: str | None, expected: list[int]) -> None:
    assert node_gpus.visible_handles(LIBRARY, {} if named is None else {"CUDA_VISIBLE_DEVICES": named}) == expected


def test_gpus_are_sampled_with_the_processes(
    folder: RunFolder, sampler: Make, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_gpus, "load", lambda: LIBRARY)
    own = sampler(os.getpid(), gpus={"CUDA_VISIBLE_DEVICES": "0,2"})
    wait_until(lambda: folder.usage.exists() and bool(read_usage(folder)))
    own.close()
    assert only(folder).samples[0].gpu == (GpuUse(0.1, 1, 100.0), GpuUse(0.3, 3, 300.0))


def test_processes_are_sampled_if_nvml_is_missing(
    folder: RunFolder, sampler: Make, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise OSError("no library")

    monkeypatch.setattr(node_gpus, "load", missing)
    own = sampler(os.getpid(), gpus={})
    wait_until(lambda: folder.usage.exists() and bool(read_usage(folder)))
    own.close()
    assert only(folder).samples[0].gpu == ()
    assert only(folder).samples[0].rss > 0


def test_job_without_gpus_does_not_load_nvml(
    folder: RunFolder, sampler: Make, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[int] = []
    monkeypatch.setattr(node_gpus, "load", lambda: loads.append(1))
    own = sampler(os.getpid())
    wait_until(lambda: folder.usage.exists() and bool(read_usage(folder)))
    own.close()
    assert loads == []


# -- shared memory


def test_shared_memory_is_measured_when_it_has_changed(
    folder: RunFolder, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_sampler, "WRITE_SECONDS", 0.0)
    fork = "import os, time\nx = bytearray(b'x') * (100 << 20)\ninput()\nif not os.fork(): time.sleep(3600)"
    running = child(f"{fork}\nprint('.', flush=True)\ninput()")
    own = NodeSampler(folder, 1, "n1", lambda: [running.pid], None)
    wait_until(lambda: TreeReader().read([running.pid])[running.pid].rss > 100 * MB)
    own.look()
    own.look()
    assert running.stdin is not None
    running.stdin.write("\n")
    running.stdin.flush()
    ready(running)
    own.look()
    own.look()
    for pid in TreeReader().read([running.pid])[running.pid].pids[1:]:
        os.kill(pid, 9)
    end(running)
    alone, as_before, both, as_before_too = only(folder).samples
    assert alone.pss == alone.rss
    assert both.pss is not None
    assert 100 * MB < both.pss < 150 * MB < 200 * MB < both.rss
    assert as_before.pss is as_before_too.pss is None
