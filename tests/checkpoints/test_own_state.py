"""What ranks have of their own comes back to each of them; what `run.wrap` returned is rank 0's on all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.run_folder.checkpoint_names import complete_checkpoints
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks


class Kept:
    """Anything with a state."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Helper(Kept):
    """An object of the user's around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(updates=0)
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.state, "tensors": [*self.model.parameters(), *self.model.buffers()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["own"]


def trains(run: Run, stop_at: int | None, leaves_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every rank has an expert, a buffer of samples and a stream of its own, beside a model of all."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = run.wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run.seed(5)
    expert, holder = nn.Linear(3, 1), nn.Sequential(net, nn.Linear(1, 1))
    expert_optimizer = torch.optim.AdamW(expert.parameters(), lr=0.1)
    buffer, stream, seen = Kept(samples=torch.zeros(0, 3)), Kept(place=0), Kept(steps=0, kinds={"a", "b", "c", "d"})
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "seen": seen, "average": AveragedModel(net)}
    objects |= {"expert": expert, "expert_optimizer": expert_optimizer, "buffer": buffer, "stream": stream}
    objects |= {"holder": holder, "helper": Helper(net)}
    features = torch.randn(36, 3, generator=torch.Generator().manual_seed(1))
    data = run.loader(TensorDataset(features), batch_size=8)
    state = run.restore(data=data, **{name: value for name, value in objects.items() if name not in leaves_out})
    began, statistics = state.step, net[1].running_mean.tolist()
    for _ in state.epochs(2):
        for (batch,) in data:
            run.backward(model(batch).square().mean())
            expert(batch).square().mean().backward()
            run.update(optimizer)
            expert_optimizer.step()
            expert_optimizer.zero_grad()
            objects["average"].update_parameters(net)
            seen.state["steps"] += 1
            stream.state["place"] += 1 + run.rank
            buffer.state["samples"] = torch.cat([buffer.state["samples"], batch + torch.rand(())])
            if run.step == stop_at and run.rank == 0:
                run._loop_control.stop.asked = Stop.END
    found = {name: value.state_dict() for name, value in objects.items()}
    # the rest of it is the wrapped model
    found["holder"] = {name: value for name, value in found["holder"].items() if name.startswith("1.")}
    torch.set_printoptions(precision=17, threshold=10**6)
    return {"began": began, "statistics": statistics} | {
        name: str({key: sorted(each) if isinstance(each, set) else each for key, each in state.items()})
        for name, state in found.items()
    }


OWN = ("expert", "expert_optimizer", "buffer", "stream", "holder")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that was stopped in the middle of an epoch."""
    folder: Path = tmp_path_factory.mktemp("stopped")
    for answer in run_ranks(trains, 2, 6, folder=folder):
        assert answer.startswith("RunStopped")
    return folder


def test_each_rank_restores_its_own_state(stopped: Path, tmp_path: Path) -> None:
    whole = run_ranks(trains, 2, None, folder=tmp_path)
    rest = run_ranks(trains, 2, None, folder=stopped)
    for one, other in zip(whole, rest, strict=True):
        assert other["began"] in (6, 8)
        assert {name: one[name] for name in (*OWN, "seen")} == {name: other[name] for name in (*OWN, "seen")}
    for name in OWN:
        assert rest[0][name] != rest[1][name]
    # statistics of batch norm are rank 0's, and were different on the ranks
    assert rest[0]["statistics"] == rest[1]["statistics"]
    assert whole[0]["model"] == rest[0]["model"] != whole[1]["model"]


def test_equal_state_is_stored_once(stopped: Path) -> None:
    newest = complete_checkpoints(RunFolder(stopped))[0]
    stored: list[set[str]] = []
    for rank in (0, 1):
        with safe_open(newest / f"rank-{rank:05d}.safetensors", framework="pt") as file:
            stored.append({name for name in file.keys() if "random" not in name})  # noqa: SIM118
    assert {name.partition(".")[0] for name in stored[0]} >= {"model", "average", "expert", "buffer", "holder"}
    # of the holder only what is not the wrapped model's
    assert {name for name in stored[1] if "expert_optimizer" not in name} == {
        f"rank-1.objects.{name}"
        for name in ("expert.weight", "expert.bias", "buffer.samples", "holder.1.weight", "holder.1.bias")
    }


def test_per_rank_state_is_rejected_on_another_number_of_ranks(stopped: Path) -> None:
    (answer,) = run_ranks(trains, 1, None, folder=stopped, may_fail=True)
    assert answer.startswith("UserError: checkpoint step-0000000")
    assert "has a separate 'expert' and 'expert_optimizer' and 'buffer'" in answer
    (answer,) = run_ranks(trains, 1, None, OWN, folder=stopped)
    assert answer["began"] == 20


def names_differ(run: Run) -> None:
    run.restore(**{f"of-{run.rank}": Kept()})


def test_ranks_must_restore_the_same_names() -> None:
    for rank, answer in enumerate(run_ranks(names_differ, 2, may_fail=True)):
        assert answer == f"UserError: run.restore: every rank must pass the same names, and this one passed of-{rank}"


def changes(run: Run, epochs: int) -> dict[str, Any]:
    """An object that is the same on all ranks every other epoch."""
    kept = Kept(value=-1)
    state = run.restore(kept=kept)
    began = dict(kept.state)
    for epoch in state.epochs(epochs):
        kept.state["value"] = run.rank if epoch % 2 else epoch
        run.report(epoch)
    return began


def test_objects_are_compared_at_each_save(tmp_path: Path) -> None:
    run_ranks(changes, 2, 1, folder=tmp_path)
    assert run_ranks(changes, 2, 2, folder=tmp_path) == [{"value": 0}, {"value": 1}]
    assert run_ranks(changes, 1, 2, folder=tmp_path) == [{"value": 2}]


def maps_after_restore(run: Run) -> str:
    """An object that keeps what it is given, and an optimizer, which does so too; the files are deleted then."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    kept = Kept(values=torch.ones(1000), array=np.ones(1000))
    state = run.restore(kept=kept, model=model, optimizer=optimizer)
    if state.step:
        assert optimizer.state
        shutil.rmtree(Path(run.folder, "checkpoints"))
        return Path("/proc/self/maps").read_text()
    for _ in state.epochs(1):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    return ""


def test_checkpoint_files_are_not_left_mapped_after_loading(tmp_path: Path) -> None:
    run_ranks(maps_after_restore, 1, folder=tmp_path)
    (maps,) = run_ranks(maps_after_restore, 1, folder=tmp_path)
    assert "libtorch" in maps
    assert "safetensors (deleted)" not in maps


class Wide(nn.Module):
    """Parameters and buffers of several types, some not contiguous."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.trained = nn.Linear(2, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(2, 3).T, requires_grad=False)
        self.narrow = nn.Parameter(torch.randn(3, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("hidden", torch.randn(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def wraps(run: Run) -> list[list[Any]]:
    found = []
    models = (Wide(run.rank), Wide(run.rank).requires_grad_(False))
    for model in models:
        wrapped = run.wrap(model)
        found.append([each.tolist() for each in (*wrapped.parameters(), *wrapped.buffers())])
        model.get_buffer("hidden").fill_(run.rank)
    # it brings rank 0's buffers to all
    list(run.shard(TensorDataset(torch.ones(4, 2))))
    return [*found, [model.get_buffer("hidden").tolist() for model in models]]


def test_wrap_broadcasts_rank_0_tensors_including_frozen_ones() -> None:
    (alone,) = run_ranks(wraps, 1)
    assert [len(tensors) for tensors in alone] == [9, 9, 2]
    for found in run_ranks(wraps, 3):
        assert found == alone
