"""Use, power and memory of a rank's GPUs, as NVML reports them."""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mgpu_slurm.core import node_gpus
from mgpu_slurm.doctor.in_job import gpus, node_probe
from mgpu_slurm.job.sampling import sampler_thread
from mgpu_slurm.rank import rank_info
from mgpu_slurm.training.speed.gpu_sampler import GpuSample, GpuSampler, summary
from tests.support import wait_until


class Lost(Exception):
    """NVML's error for a GPU that does not answer."""


class Library:
    """NVML on a node with three GPUs, of which the last one is lost; an older binding returns bytes."""

    NVMLError = Lost

    def __init__(self) -> None:
        self.utilization = [10, 50, 90]

    def nvmlDeviceGetCount(self) -> int:
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 3:
            raise Lost
        return index

    def nvmlDeviceGetUUID(self, index: int) -> str | bytes:
        return ["GPU-a", b"GPU-b", "GPU-c"][index]

    def nvmlDeviceGetUtilizationRates(self, index: int) -> Any:
        return SimpleNamespace(gpu=self.utilization[index])

    def nvmlDeviceGetPowerUsage(self, index: int) -> int:
        if index == 2:
            # as on some laptops
            raise Lost
        return 300_000

    def nvmlDeviceGetMemoryInfo(self, index: int) -> Any:
        return SimpleNamespace(used=(index + 1) << 30)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setattr(node_gpus, "load", lambda: found)
    monkeypatch.setattr(rank_info, "gpu_identity", lambda device: "abc"[device.index] if device.index != 3 else "d")
    monkeypatch.setattr(sampler_thread, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(sampler_thread, "SECONDS", 0.01)
    return found


@pytest.fixture
def sampler(library: Library) -> Iterator[Callable[..., GpuSampler]]:
    made: list[GpuSampler] = []

    def make(*indices: int) -> GpuSampler:
        made.append(GpuSampler([torch.device("cuda", index) for index in indices]))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_gpus_of_other_jobs_on_the_node_are_ignored(library: Library) -> None:
    # torch leaves the prefix out
    assert list(node_gpus.handles(library, {"b", "c", "of another node"})) == [1, 2]


def test_own_gpus_are_sampled_again_and_again(library: Library, sampler: Callable[..., GpuSampler]) -> None:
    own = sampler(0, 1)
    wait_until(lambda: own.take() == GpuSample(0.3, 600.0, 2 << 30))
    library.utilization = [100, 100, 0]
    wait_until(lambda: own.take() == GpuSample(1.0, 600.0, 2 << 30))


def test_samples_are_averaged_but_for_the_peak_of_memory() -> None:
    assert summary([GpuSample(0.2, 100.0, 7), GpuSample(0.4, 300.0, 5)]) == GpuSample(pytest.approx(0.3), 200.0, 7)


def test_values_that_a_gpu_does_not_report_are_zero(library: Library, sampler: Callable[..., GpuSampler]) -> None:
    own = sampler(2)
    wait_until(lambda: own.take() == GpuSample(0.9, 0.0, 3 << 30))


def test_last_sample_holds_until_there_is_a_new_one(
    library: Library, sampler: Callable[..., GpuSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_thread, "SECONDS", 600.0)
    own = sampler(0)
    wait_until(lambda: own.take() != GpuSample())
    assert own.take() == own.take() == GpuSample(0.1, 300.0, 1 << 30)


@pytest.mark.parametrize("error", [ImportError("no pynvml"), OSError("no library")])
def test_node_without_nvml_has_no_samples(
    sampler: Callable[..., GpuSampler], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load() -> Any:
        raise error

    monkeypatch.setattr(node_gpus, "load", load)
    own = sampler(0)
    own.close()
    assert own.take() == GpuSample()


def test_gpu_that_nvml_does_not_list_has_no_samples(sampler: Callable[..., GpuSampler]) -> None:
    """As with MIG."""
    own = sampler(3)
    own.close()
    assert own.take() == GpuSample()


def test_cpu_has_no_thread() -> None:
    GpuSampler([torch.device("cpu")])
    assert "gpus" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.gpu
def test_nvml_lists_the_gpus_visible_to_torch() -> None:
    seen = rank_info.visible_gpu_identities()
    assert len(list(node_gpus.handles(node_gpus.load(), set(seen)))) == len(seen) > 0


@pytest.mark.gpu
def test_real_gpu_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_thread, "FIRST_SECONDS", 0.0)
    own = GpuSampler([torch.device("cuda", 0)])
    wait_until(lambda: own.take() != GpuSample())
    own.close()
    assert own.take().memory > 1 << 20


@pytest.mark.parametrize("module", [gpus, node_probe, node_gpus])
def test_pynvml_has_every_name_in_use(module: Any) -> None:
    binding = importlib.import_module("pynvml")
    used = set(re.findall(r"(?:library|nvml)\.(nvml\w+|NVML\w+)", Path(module.__file__).read_text()))
    assert used
    assert {name for name in used | set(gpus.THROTTLE_REASONS) if not hasattr(binding, name)} == set()
