"""A model with copies on other ranks stays the model that it was."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from mgpu_slurm.request.parallelism import Parallelism
from mgpu_slurm.training.parallel.data_parallel import Copied
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks
from tests.support import compiles_ddp


class Net(nn.Module):
    """With a method that calls the model, an attribute that its forward pass uses, and one that refers to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.gain = 1.0
        self.own = {"net": self}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.gain * self.head(self.stem(inputs))
        return outputs

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        return self(inputs).square().mean()


class Doubled(Net):
    """Calls itself on a part of its inputs."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) == 1:
            return super().forward(inputs)
        return torch.cat([self(inputs[:1]), super().forward(inputs[1:])])


def made(run: Run, kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    return run.wrap(kind(), blocks=(nn.Linear,))  # type: ignore[return-value]


def train(run: Run, how: str) -> list[float]:
    model = made(run, Doubled if how == "nested" else Net)
    called: Any = torch.compile(model, backend="eager") if how == "compiled" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.gain = 2.0
    for _ in range(3):
        # two samples on each of two ranks, or four on one
        first = 1.0 if run.world_size == 1 else 2 * run.rank + 1.0
        samples = torch.arange(first, first + 4 / run.world_size)[:, None].expand(-1, 4)
        run.backward(model.loss(samples) if how == "method" else called(samples).square().mean())
        run.update(optimizer)
    run.finish()
    return [value for each in model.parameters() for value in whole(each)]


def whole(tensor: Any) -> list[float]:
    values: list[float] = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).reshape(-1).tolist()
    return values


@pytest.mark.parametrize("how", ["called", "method", pytest.param("compiled", marks=compiles_ddp), "nested"])
def test_methods_and_attributes_of_a_copied_model_work_as_on_one_rank(how: str) -> None:
    one, other = run_ranks(train, 2, how)
    assert one == other
    assert one == pytest.approx(run_ranks(train, 1, how)[0], abs=1e-6)


def facts_of(run: Run) -> list[Any]:
    model = made(run)
    assert run.wrap(model) is model
    return [isinstance(model, Net), type(model).__name__, sorted(model.state_dict()), tuple(model.stem.weight.shape)]


def test_model_has_the_same_names_under_each_strategy() -> None:
    alone = run_ranks(facts_of, 1)
    assert run_ranks(facts_of, 2) == 2 * alone
    assert run_ranks(facts_of, 1, layout=Parallelism("dp").layout(1, 1)) == alone
    for names in run_ranks(facts_of, 2, layout=Parallelism("fsdp").layout(2, 2)):
        assert names[2:] == alone[0][2:]


class CopiesItself(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        other = type(self)(self.in_features, self.out_features)
        other.load_state_dict(self.state_dict())
        return other


def copies_of(run: Run) -> None:
    model = made(run)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(twin) is Net
        assert twin.own["net"] is twin
        # a copy computes with its own weights, and without the other ranks
        nn.init.zeros_(twin.head.weight)
        if run.is_main:
            assert torch.equal(twin(torch.ones(1, 4))[0], twin.head.bias)
    assert torch.count_nonzero(model.head.weight)
    kinds: list[nn.Module] = [CopiesItself(4, 1), torch.fx.symbolic_trace(Net()), torch.jit.script(nn.Linear(4, 1))]
    for kind in kinds:
        twin = copy.deepcopy(run.wrap(kind))
        assert not isinstance(twin, Copied)
        assert twin(torch.ones(2, 4)).shape == (2, 1)


def test_copy_of_a_copied_model_is_a_model_of_its_own() -> None:
    run_ranks(copies_of, 2)
