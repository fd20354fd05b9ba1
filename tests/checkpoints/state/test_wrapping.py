"""A checkpoint does not depend on how a model was wrapped or compiled when it was written."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from mgpu_slurm.checkpoints.state.wrapping import Wrapped
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.signals import StopFlag
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks

KINDS = ("wrapped", "compiled", "compiled inside", "part compiled")
RANKS = (1, 2)


class Net(nn.Module):
    """With attributes called as wrappers call theirs."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        for number, parameter in enumerate(self.parameters()):
            nn.init.constant_(parameter, value + number)
        self._orig_mod[0].register_buffer("running_mean", torch.full((2,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._orig_mod(self.module(x))
        return found


def made(run: Run, kind: str, value: float) -> dict[str, Any]:
    """What a job restores."""
    net: Any = Net(value)
    if kind == "compiled inside":
        model = run.wrap(torch.compile(net, backend="eager"))
    elif kind == "part compiled":
        net.module = torch.compile(net.module, backend="eager")
        model = run.wrap(net)
    else:
        model = run.wrap(net)
    if kind == "compiled":
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    return {"model": model, "average": AveragedModel(model)}


def values_of(objects: dict[str, Any]) -> list[Any]:
    """All tensors, by the order in the modules."""
    return [tensor.tolist() for each in objects.values() for tensor in each.state_dict().values()]


def in_folder(run: Run, folder: Path) -> Run:
    """Another run of the same ranks."""
    facts = RankInfo(run.rank, run.world_size, run.rank, run.world_size)
    return Run(facts, folder, run.device, 1, StopFlag(), run._collectives)


def saves(run: Run, folder: Path) -> list[Any]:
    for number, kind in enumerate(KINDS):
        own = in_folder(run, folder / f"{kind}-{run.world_size}")
        objects = made(own, kind, 10.0 * number + 1)
        for epoch in own.restore(**objects).epochs(1):
            own.report(epoch)
        own.close()
    return values_of(objects)


def loads(run: Run, folder: Path) -> dict[str, list[Any]]:
    found = {}
    for before in folder.iterdir():
        for kind in KINDS:
            own = in_folder(run, before)
            objects = made(own, kind, 0.0)
            own.restore(**objects)
            found[f"{before.name} {kind}"] = values_of(objects)
            own.close()
    return found


def test_checkpoint_of_any_wrapping_loads_into_any_other(tmp_path: Path) -> None:
    for ranks in RANKS:
        run_ranks(saves, ranks, tmp_path)
    own = ("_orig_mod.0.bias", "_orig_mod.0.num_batches_tracked", "_orig_mod.0.running_mean", "_orig_mod.0.running_var")
    own += ("_orig_mod.0.weight", "_orig_mod.1.bias", "_orig_mod.1.weight", "module.bias", "module.weight")
    names = {"average.n_averaged", *(f"average.module.{name}" for name in own), *(f"model.{name}" for name in own)}
    for folder in tmp_path.iterdir():
        stored = load_file(RunFolder(folder).checkpoint(0) / "rank-00000.safetensors")
        assert {name for name in stored if not name.startswith("rank-0.")} == names
    for ranks in RANKS:
        for answer in run_ranks(loads, ranks, tmp_path):
            for case, values in answer.items():
                number = KINDS.index(case.partition("-")[0])
                assert values == expected(10.0 * number + 1), case


def expected(value: float) -> list[Any]:
    net = Net(value)
    return values_of({"model": net, "average": AveragedModel(net)})


def wraps_one_after_the_other(run: Run) -> int:
    models = [weakref.ref(run.wrap(nn.Linear(1, 1))) for _ in range(3)]
    gc.collect()
    return sum(model() is not None for model in models)


def test_single_rank_run_does_not_keep_wrapped_models_alive() -> None:
    assert run_ranks(wraps_one_after_the_other, 1) == [0]


class Compared(Wrapped):
    """Counts how often it compares a moving average."""

    times = 0

    def _averages(self, average: AveragedModel) -> bool:
        self.times += 1
        return super()._averages(average)


def test_averaged_model_is_compared_once_not_per_name() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(50)))
    average, wrapped = AveragedModel(model), Compared()
    wrapped.add(model)
    reached = wrapped.reaches(average)
    assert all(reached(name) for name in average.state_dict())
    assert wrapped.times == 1
    assert not any(map(wrapped.reaches(AveragedModel(nn.Linear(1, 1))), ("n_averaged", "module.weight")))


OLD = Path(__file__).parent / "version_0_1"


def continues(run: Run, is_compiled: bool) -> list[Any]:
    """The job that wrote the checkpoint of version 0.1, with or without the compiler; its state before it goes on."""
    run.seed(1 + run.rank)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model: Any = run.wrap(net)
    average = AveragedModel(model)
    if is_compiled:
        model = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    data = run.loader(TensorDataset(torch.ones(16, 2)), batch_size=4)
    state = run.restore(model=model, average=average, optimizer=optimizer, scheduler=scheduler, data=data)
    moments = [each["exp_avg"].clone() for each in optimizer.state.values()]
    found = [*net.state_dict().values(), *average.state_dict().values(), *moments]
    values = [state.step, *(tensor.tolist() for tensor in found)]
    for epoch in state.epochs(2):
        for (batch,) in data:
            run.backward(net(batch).square().mean())
            run.update(optimizer)
        run.report(epoch)
    assert run.step == 8
    return values


@pytest.mark.parametrize(("ranks", "is_compiled"), [(2, True), (2, False), (1, True), (1, False)])
def test_version_0_1_checkpoint_resumes_with_rank_0_state(ranks: int, is_compiled: bool, tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    stored = load_file(OLD / "checkpoints" / "step-000000003" / "rank-00000.safetensors")
    layers = ("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked")
    layers += ("2.weight", "2.bias")
    names = [f"model._orig_mod.module.{layer}" for layer in layers]
    names += ["average.n_averaged", *(f"average.module.module.{layer}" for layer in layers)]
    names += [f"optimizer.state.{number}.exp_avg" for number in range(6)]
    for answer in run_ranks(continues, ranks, is_compiled, folder=tmp_path):
        assert answer == [3, *(stored[name].tolist() for name in names)]
    record = json.loads((RunFolder(tmp_path).checkpoint(8) / "rank-00000.json").read_text())
    assert record["shared"]["differing"] == []
