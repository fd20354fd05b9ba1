"""What a trial leaves in its process: put back, or seen."""

from __future__ import annotations

import gc
import math
import mmap
import os
import random
import select
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from mgpu_slurm.sweeps.worker import process_reset
from mgpu_slurm.sweeps.worker.process_reset import Reset, ResourceUsage, growth
from tests.forks import in_fork


@pytest.fixture
def reset() -> Iterator[Reset]:
    made = Reset()
    yield made
    made.apply()


def test_reset_restores_process_settings(reset: Reset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, path, arguments, threads = os.getcwd(), list(sys.path), list(sys.argv), torch.get_num_threads()
    filters, dtype = list(warnings.filters), torch.get_default_dtype()
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGUSR2)}
    os.chdir(tmp_path)
    os.environ["LEFT_BY_A_TRIAL"] = "1"
    home = os.environ.pop("HOME", None)
    sys.path.insert(0, str(tmp_path))
    sys.argv.append("--more")
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(threads + 1)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    for signum in handlers:
        signal.signal(signum, lambda *_: None)
    reset.apply()
    assert (os.getcwd(), sys.path, sys.argv, list(warnings.filters)) == (folder, path, arguments, filters)
    assert ("LEFT_BY_A_TRIAL" in os.environ, os.environ.get("HOME")) == (False, home)
    assert (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()) == (dtype, threads, True)
    assert torch.are_deterministic_algorithms_enabled() is False
    assert {signum: signal.getsignal(signum) for signum in handlers} == handlers


def test_reset_cancels_a_pending_timer(reset: Reset) -> None:
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 600)
    reset.apply()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_reset_of_unchanged_settings_imports_no_torch_module() -> None:
    code = (
        "import sys, torch.distributed; from mgpu_slurm.sweeps.worker.process_reset import Reset\n"
        "reset = Reset(); before = set(sys.modules); reset.apply()\n"
        "print(sorted(name for name in set(sys.modules) - before if name.startswith('torch')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_random_draws_differ_between_trials(reset: Reset) -> None:
    def draws_after_a_seeded_trial() -> tuple[float, float, float]:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        reset.apply()
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    assert len({*draws_after_a_seeded_trial(), *draws_after_a_seeded_trial()}) == 6


def test_freed_memory_is_reused_without_new_page_faults() -> None:
    """Blocks of half a megabyte, each of which costs 128 pages otherwise."""
    script = """if True:
        import resource
        import numpy as np
        from mgpu_slurm.sweeps.worker.process_reset import keep_freed_memory

        def faults():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(50):
                blocks = [np.ones(1 << 16) for _ in range(4)]
                del blocks
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        keep_freed_memory()
        faults()
        print(faults())
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 128


def new_memory(size: int) -> mmap.mmap:
    """Return memory of the system's own: an allocator may reuse what earlier tests have freed."""
    memory = mmap.mmap(-1, size)
    memory.write(b"1" * size)
    return memory


def leave_files() -> list[int]:
    return [os.open(os.devnull, os.O_RDONLY) for _ in range(process_reset.GROWTH_OF_FILES + 1)]


def leave_threads() -> None:
    for _ in range(process_reset.GROWTH_OF_THREADS + 1):
        threading.Thread(target=signal.pause, daemon=True).start()


def growth_by(leave: Callable[[], object]) -> str | None:
    before = ResourceUsage.now()
    leave()
    return growth(before, ResourceUsage.now())


def measured_growth(size: int) -> int:
    before = ResourceUsage.now()
    left = new_memory(size)
    grown = ResourceUsage.now().memory - before.memory
    left.close()
    return grown


class TestGrowth:
    def test_no_growth_is_reported_as_none(self) -> None:
        held = ResourceUsage.now()
        assert growth(held, held) is None

    @pytest.mark.parametrize(("leave", "found"), [(leave_files, "65 open files"), (leave_threads, "17 threads")])
    def test_growth_in_files_or_threads_is_reported(self, leave: Callable[[], object], found: str) -> None:
        """In a process of its own: threads and files that earlier tests have left may end at any time."""
        assert in_fork(growth_by, leave) == found

    def test_memory_of_the_process_is_measured(self) -> None:
        """In a process of its own: memory that earlier tests have left may be freed at any time."""
        assert in_fork(measured_growth, 64 << 20) == pytest.approx(64 << 20, rel=0.1)

    def test_growth_in_memory_is_reported_relative_to_process_size(self) -> None:
        assert growth(ResourceUsage(1 << 30, 0, 1, 1), ResourceUsage(5 << 30, 0, 1, 1)) == "4.0 GiB of memory"
        # for a process that is large by itself it is little
        assert growth(ResourceUsage(10 << 30, 0, 1, 1), ResourceUsage(14 << 30, 0, 1, 1)) is None

    def test_growth_in_gpu_memory_is_reported(self) -> None:
        assert growth(ResourceUsage(0, 0, 1, 1), ResourceUsage(0, 3 << 30, 1, 1)) == "3.0 GiB of GPU memory"


class Ring:
    """What only a collection frees."""

    def __init__(self, held: object = None) -> None:
        self.own = self
        self.held = held


def large_memory() -> object:
    return new_memory(2 * process_reset.LITTLE_MEMORY)


def is_collected(large: Callable[[], object]) -> bool:
    gc.disable()
    process_reset.COLLECT_EVERY = math.inf
    reset = Reset()
    reset.apply()
    ring = weakref.ref(Ring(large()))
    reset.apply()
    return ring() is None


class TestGarbageCollection:
    """Of objects that nothing refers to."""

    @pytest.fixture(autouse=True)
    def no_other_collection(self) -> Iterator[None]:
        gc.disable()
        yield
        gc.enable()

    @pytest.fixture
    def used(self, reset: Reset, monkeypatch: pytest.MonkeyPatch) -> Reset:
        """After its first trial, with a second that never ends."""
        reset.apply()
        monkeypatch.setattr(process_reset, "COLLECT_EVERY", math.inf)
        return reset

    def test_garbage_is_collected_after_the_first_trial(self, reset: Reset) -> None:
        ring = weakref.ref(Ring())
        reset.apply()
        assert ring() is None

    def test_short_trials_share_one_collection(self, used: Reset, monkeypatch: pytest.MonkeyPatch) -> None:
        # threads and files that earlier tests have left may end at any time, and a change of them does not wait
        held = ResourceUsage.now()
        monkeypatch.setattr(ResourceUsage, "now", lambda: held)
        used.apply()
        ring = weakref.ref(Ring())
        used.apply()
        assert ring() is not None
        monkeypatch.setattr(process_reset, "COLLECT_EVERY", 0)
        used.apply()
        assert ring() is None

    @pytest.mark.parametrize("large", [large_memory, select.epoll], ids=["memory", "file"])
    def test_large_memory_or_an_open_file_is_collected_at_once(self, large: Callable[[], object]) -> None:
        """In a process of its own: memory that earlier tests have left may be freed at any time."""
        assert in_fork(is_collected, large) is True
