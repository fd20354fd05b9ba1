"""Optimizer states by the names of parameters, and states in 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mgpu_slurm import Run, UserError
from mgpu_slurm.checkpoints.state import optimizer_state
from mgpu_slurm.request.parallelism import Parallelism
from tests.ranks import run_ranks


def make(order: tuple[int, ...] = (0, 1)) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Return a model, and an optimizer with a group for each of its layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    groups = [{"params": model[layer].parameters(), "lr": 0.1 * (layer + 1)} for layer in order]
    return model, torch.optim.AdamW(groups)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 2)).square().mean().backward()
    optimizer.step()


def test_names_are_those_of_the_model() -> None:
    model, optimizer = make((1, 0))
    train(model, optimizer)
    names = optimizer_state.parameter_names({"model": model, "optimizer": optimizer})
    state = optimizer_state.named(optimizer.state_dict(), optimizer, names)
    assert optimizer_state.is_named(state)
    assert list(state["state"]) == ["model.1.weight", "model.1.bias", "model.0.weight", "model.0.bias"]
    assert [group["params"] for group in state["param_groups"]] == [
        ["model.1.weight", "model.1.bias"],
        ["model.0.weight", "model.0.bias"],
    ]
    back = optimizer_state.numbered(state, optimizer, names)
    assert back == optimizer.state_dict()


def test_optimizer_of_unknown_parameters_keeps_its_numbers() -> None:
    model, optimizer = make()
    for names in ({}, optimizer_state.parameter_names({"model": model[0]})):
        assert optimizer_state.named(optimizer.state_dict(), optimizer, names) == optimizer.state_dict()
    assert not optimizer_state.is_named(optimizer.state_dict())
    assert not optimizer_state.is_named({"count": 1})


def test_each_parameter_keeps_its_options_in_other_groups() -> None:
    model, optimizer = make((1, 0))
    train(model, optimizer)
    names = optimizer_state.parameter_names({"model": model})
    state = optimizer_state.named(optimizer.state_dict(), optimizer, names)
    other = torch.optim.AdamW([{"params": [each], "lr": 1.0} for each in model.parameters()])
    other.load_state_dict(optimizer_state.numbered(state, other, names))
    # 0.1 times the number of the layer
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.1, 0.2, 0.2]
    for parameter in model.parameters():
        assert torch.equal(other.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])
    with pytest.raises(
        UserError, match=r"has 'model\.0\.weight' in a group with other options than those that are in its"
    ):
        optimizer_state.numbered(state, torch.optim.AdamW(model.parameters()), names)


def train_with_rates(run: Run, steps: int) -> list[float]:
    layers = [nn.Linear(2, 2) for _ in range(4)]
    pipe = run.pipeline(layers, lambda outputs, targets: (outputs - targets).square().mean(), micro_batches=2)
    groups = [{"params": layer.parameters(), "lr": 0.1 / 2 ** int(name)} for name, layer in pipe.named_children()]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    run.restore(model=pipe, optimizer=optimizer)
    while run.step < steps:
        pipe.gradients(torch.ones(2, 2), torch.zeros(2, 2))
        run.update(optimizer)
    run.save()
    run.finish()
    return [group["lr"] for group in optimizer.param_groups]


def test_groups_of_stages_keep_their_options(tmp_path: Path) -> None:
    two = Parallelism(pipeline=2).layout(2, 2)
    for ranks, layout in ((2, two), (2, two), (1, None), (2, two)):
        found = run_ranks(train_with_rates, ranks, 2, folder=tmp_path, layout=layout)
        assert [rate for rates in found for rate in rates] == [0.1, 0.05, 0.025, 0.0125]


def test_state_of_other_parameters_is_an_error() -> None:
    model, optimizer = make()
    names = optimizer_state.parameter_names({"model": model})
    state = optimizer_state.named(optimizer.state_dict(), optimizer, names)
    other = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1))
    other_names = optimizer_state.parameter_names({"model": other})
    other_optimizer = torch.optim.AdamW(other.parameters())
    theirs = optimizer_state.named(other_optimizer.state_dict(), other_optimizer, other_names)
    fix = r"'model\.2\.bias' and 1 more: create it with the same parameters as at that time, including frozen ones"
    with pytest.raises(UserError, match=f"has other parameters: only the one in the new one has {fix}"):
        optimizer_state.numbered(state, other_optimizer, other_names)
    with pytest.raises(UserError, match=f"has other parameters: only the one in the checkpoint has {fix}"):
        optimizer_state.numbered(theirs, optimizer, names)


def unfreeze_and_add(run: Run, steps: int) -> dict[str, Any]:
    """Train the head; give the optimizer the stem, with its own rate, after two steps."""
    run.seed(0, deterministic=True)
    torch.manual_seed(0)
    model = run.wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), blocks=(nn.Linear,))
    model[0].requires_grad_(False)  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.1)  # type: ignore[operator]
    run.restore(model=model, optimizer=optimizer)
    while run.step < steps:
        if run.step == 2:
            model[0].requires_grad_(True)  # type: ignore[operator]
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})  # type: ignore[operator]
        run.backward(model(torch.full((2, 4), run.rank + 1.0)).square().mean())
        run.update(optimizer)
    run.save()
    run.finish()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]
    weights = [getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()]
    return {"weights": [value for each in weights for value in each.detach().reshape(-1).tolist()]}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_groups_added_later_are_restored(tmp_path: Path, strategy: str) -> None:
    layout = Parallelism(strategy).layout(2, 2)
    run_ranks(unfreeze_and_add, 2, 3, folder=tmp_path / "a", layout=layout)
    resumed = run_ranks(unfreeze_and_add, 2, 5, folder=tmp_path / "a", layout=layout)
    assert resumed == run_ranks(unfreeze_and_add, 2, 5, folder=tmp_path / "b", layout=layout)


def test_earlier_checkpoint_is_named_by_the_order_of_parameters() -> None:
    state = {
        "state": {"!": "dict", "of": [[1, {"step": 3}]]},
        "param_groups": [{"lr": 0.1, "params": [0, 1]}],
    }
    named = optimizer_state.named_by_order(state, ["a", "b"])
    assert named == {"state": {"b": {"step": 3}}, "param_groups": [{"lr": 0.1, "params": ["a", "b"]}]}
    with pytest.raises(UserError, match="this checkpoint does not name the optimizer's parameters"):
        optimizer_state.named_by_order(state, ["a", "b", "c"])


def train_in_8_bits(run: Run, steps: int) -> dict[str, Any]:
    # each step would compile for minutes
    torch.compile = lambda function, **_: function  # type: ignore[assignment]
    from torchao.optim import AdamW8bit

    run.seed(0)
    torch.manual_seed(0)
    model = run.wrap(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4)), blocks=(nn.Linear,))
    optimizer = AdamW8bit(model.parameters(), lr=1e-2)
    data = run.loader(TensorDataset(torch.randn(32, 64, generator=torch.Generator().manual_seed(1))), batch_size=8)
    state = run.restore(model=model, optimizer=optimizer, data=data)
    began = state.step
    for epoch in state.epochs(steps // 4):
        for (batch,) in data:
            run.backward(model(batch).square().mean())
            run.update(optimizer)
        run.report(epoch, loss=0.0)
    states = [value for entry in optimizer.state.values() for value in entry.values()]
    parts = [getattr(each, "_local_tensor", each) for each in states]
    weights = [getattr(each, "_local_tensor", each).tolist() for each in model.parameters()]
    return {"began": began, "weights": weights, "kinds": {type(each).__name__ for each in parts}}


@pytest.mark.parametrize(("ranks", "options"), [(1, {}), (2, {}), (2, {"strategy": "fsdp"})])
def test_state_in_8_bits_resumes_bit_for_bit(ranks: int, options: dict[str, Any], tmp_path: Path) -> None:
    layout = Parallelism(**options).layout(ranks, ranks)
    whole = run_ranks(train_in_8_bits, ranks, 8, layout=layout)
    run_ranks(train_in_8_bits, ranks, 4, folder=tmp_path, layout=layout)
    rest = run_ranks(train_in_8_bits, ranks, 8, folder=tmp_path, layout=layout)
    for undisturbed, resumed in zip(whole, rest, strict=True):
        assert resumed["began"] == 4
        assert "OptimState8bit" in resumed["kinds"]
        assert resumed["weights"] == undisturbed["weights"]


NOT_DIVIDED = "UserError: the checkpoint's optimizer keeps its state in 8 bits, which cannot be divided in another way"


@pytest.mark.needs_torch("2.7")
@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        ((2, "fsdp"), (2, "ddp"), NOT_DIVIDED),
        ((2, "ddp"), (2, "fsdp"), NOT_DIVIDED),
        (
            (2, "fsdp"),
            (1, "ddp"),
            "UserError: checkpoint step-000000004 has a separate 'optimizer' for each of 2",
        ),
    ],
)
def test_state_in_8_bits_is_not_divided_in_another_way(
    before: tuple[int, Any], after: tuple[int, Any], error: str, tmp_path: Path
) -> None:
    for (ranks, strategy), steps in ((before, 4), (after, 8)):
        layout = Parallelism(strategy).layout(ranks, ranks)
        answers = run_ranks(train_in_8_bits, ranks, steps, folder=tmp_path, may_fail=True, layout=layout)
    for answer in answers:
        assert str(answer).startswith(error)
