"""A GPU of which only a part may be used: what a pass that runs out of memory leaves behind; `make gpu` runs this."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mgpu_slurm.rank import rank_info
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.signals import StopFlag
from mgpu_slurm.training.run import Run

pytestmark = pytest.mark.gpu

SAMPLES = 16
FRACTION = 0.1


@pytest.fixture
def part_of_a_gpu() -> Iterator[int]:
    """The bytes of the GPU that may be used."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(FRACTION)
    torch.use_deterministic_algorithms(True)
    yield int(FRACTION * torch.cuda.get_device_properties(0).total_memory)
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


class Greedy(nn.Module):
    """Takes much memory for a moment, in the forward or the backward pass."""

    def __init__(self, place: str, bytes_of_sample: int) -> None:
        super().__init__()
        self._place, self._bytes = place, bytes_of_sample

    def take(self, samples: int) -> None:
        torch.empty(samples * self._bytes, dtype=torch.uint8, device="cuda")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._place == "forward":
            self.take(len(x))
        elif x.requires_grad:
            samples = len(x)
            # without the tensor itself, of whose memory a cycle would not let go
            x.register_hook(lambda gradient: self.take(samples))
        return x


def trained(folder: Path, place: str, whole: int, limit: int | None, **options: Any) -> tuple[list[int], list[float]]:
    """Return the allocated bytes before each pass of a step that does not fit, and the weights after it."""
    run = Run(RankInfo(), folder, rank_info.choose_device(RankInfo()), 1, StopFlag())
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    # three quarters of what may be used fit, but not the whole
    greedy = Greedy(place, int(1.5 * whole / SAMPLES) if limit is None else 0)
    model = nn.Sequential(*layers, greedy, nn.Dropout(0.2), nn.Conv2d(64, 3, 3, padding=1))
    model = run.wrap(model.to(**options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.randn(SAMPLES, 3, 32, 32, device=run.device)
    run._parts.size.limit = limit
    allocated = []

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        if len(allocated) < 2:
            torch.cuda.synchronize()
            allocated.append(torch.cuda.memory_allocated())
        loss: torch.Tensor = (model(part) - part).square().mean()
        return loss

    run.gradients(loss_of, images)
    run.update(optimizer)
    found = run._parts.size.limit
    assert found is not None
    assert found < SAMPLES
    run.close()
    return allocated, [value for each in model.parameters() for value in each.detach().cpu().reshape(-1).tolist()]


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
def test_pass_that_failed_leaves_nothing_and_is_repeated_exactly(
    place: str, layout: torch.memory_format, part_of_a_gpu: int, tmp_path: Path
) -> None:
    (before, after), weights = trained(tmp_path / "found", place, part_of_a_gpu, None, memory_format=layout)
    assert abs(after - before) <= 1 << 20
    _, expected = trained(tmp_path / "given", place, part_of_a_gpu, SAMPLES // 2, memory_format=layout)
    assert weights == expected


def test_optimizer_that_does_not_fit_is_an_error(part_of_a_gpu: int, tmp_path: Path) -> None:
    run = Run(RankInfo(), tmp_path, rank_info.choose_device(RankInfo()), 1, StopFlag())
    # gradients fit next to the parameters, but not two more tensors of that size
    width = int((0.35 * part_of_a_gpu / 4) ** 0.5)
    model = run.wrap(nn.Linear(width, width, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.gradients(lambda inputs: model(inputs).square().mean(), torch.ones(2, width, device=run.device))
    with pytest.raises(torch.OutOfMemoryError):
        run.update(optimizer)
    run.close()


def test_model_over_a_gpu_and_main_memory_trains_as_on_one_device(tmp_path: Path) -> None:
    from jobs.resnet_split import OverDevices

    def losses(devices: list[torch.device]) -> list[float]:
        run = Run(RankInfo(), tmp_path, rank_info.choose_device(RankInfo()), 1, StopFlag())
        torch.manual_seed(0)
        layers = [nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)]
        model = run.wrap(OverDevices(layers, devices))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).to(run.device)
        found = []
        for _ in range(5):
            loss = model(inputs).square().mean()
            run.backward(loss)
            run.update(optimizer)
            found.append(loss.item())
        run.close()
        return found

    gpu = torch.device("cuda", 0)
    assert losses([gpu, torch.device("cpu")]) == pytest.approx(losses([gpu]), rel=1e-4)
