"""Models that compute in a lower precision, under each strategy."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mgpu_slurm.checkpoints.state.tensors import is_sharded
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.request.parallelism import Parallelism, Precision, Strategy
from mgpu_slurm.training.parallel.precision import autocast, in_float32, to_fp8
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks

SAMPLES, BATCH, EPOCHS = 24, 8, 4
STEPS = 12


class Block(nn.Module):
    """A layer that records the type in which it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.seen: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        self.seen.add(out.dtype)
        return x + torch.tanh(out)


def whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def train(run: Run, stop_at: int | None = None, infinite_at: int | None = None) -> dict[str, Any]:
    """Train with clipping; stop after a step, or make the last rank's gradients infinite in one, if requested."""
    run.seed(3, deterministic=True)
    torch.manual_seed(0)
    first, second = Block(), Block()
    model = run.wrap(nn.Sequential(nn.Linear(6, 16), first, second, nn.Linear(16, 1)), blocks=(Block,))
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0, momentum=0.9)
    features = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    data = run.loader(TensorDataset(features), batch_size=BATCH, shuffle=True)
    state = run.restore(model=model, optimizer=optimizer, data=data)
    began, batches = state.step, 0
    is_last = run.rank == run.world_size - 1
    types: set[torch.dtype] = set()
    try:
        for epoch in state.epochs(EPOCHS):
            for (batch,) in data:
                batches += 1
                out = model(batch)
                types.add(out.dtype)
                loss = 0.01 * out.square().mean()
                run.backward(loss * 1e38 if batches == infinite_at and is_last and not is_sharded(model) else loss)
                if batches == infinite_at and is_last and is_sharded(model):
                    # this rank's part alone
                    gradient: Any = next(model.parameters()).grad
                    gradient.to_local().fill_(float("inf"))
                run.update(optimizer, clip=0.005)
                if run.step == stop_at and is_last:
                    run._loop_control.stop.asked = Stop.END
            run.report(epoch, loss=0.0)
    except BaseException as stopped:
        if type(stopped).__name__ != "RunStopped":
            raise
    # a sharded model stays gathered after an evaluation
    weights = torch.cat([whole(each).reshape(-1) for each in model.parameters()]).tolist()
    types |= {each.dtype for each in model.parameters()}
    with torch.no_grad():
        types.add(model(features[:2]).dtype)
    scaler = run._loop_control.scaler
    return {
        "began": began,
        "step": run.step,
        "batches": batches,
        "weights": weights,
        "types": set(map(str, types)),
        "computed in": {str(each) for each in first.seen},
        "scale": None if scaler is None else scaler.factor,
    }


def run_in(precision: Precision, strategy: Strategy, ranks: int, *arguments: Any, folder: Path) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    layout = Parallelism(strategy, precision=precision).layout(ranks, ranks)
    return run_ranks(train, ranks, *arguments, folder=folder, layout=layout)


CASES = [("ddp", 1), ("ddp", 2), ("fsdp", 2), ("zero2", 2)]


@pytest.mark.parametrize(("strategy", "ranks"), CASES)
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 2e-2), ("fp16", 4e-3)])
def test_half_precision_trains_nearly_as_float32(
    precision: Precision, tolerance: float, strategy: Strategy, ranks: int, tmp_path: Path
) -> None:
    (exact,) = run_in("fp32", "ddp", 1, folder=tmp_path / "exact")
    assert exact["computed in"] == {"torch.float32"}
    answers = run_in(precision, strategy, ranks, folder=tmp_path / "half")
    for answer in answers:
        assert answer["step"] == STEPS
        # parameters and outputs, in training and in evaluation
        assert answer["types"] == {"torch.float32"}
        assert answer["computed in"] == {{"bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]}
        assert answer["weights"] == answers[0]["weights"]
        assert answer["weights"] == pytest.approx(exact["weights"], rel=0, abs=tolerance)
        assert answer["weights"] != exact["weights"]


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("fsdp", 2)])
def test_infinite_gradients_of_one_rank_skip_the_step_on_all(strategy: Strategy, ranks: int, tmp_path: Path) -> None:
    answers = run_in("fp16", strategy, ranks, None, 5, folder=tmp_path)
    for answer in answers:
        assert (answer["step"], answer["batches"]) == (STEPS - 1, STEPS)
        assert answer["scale"] == 2**15
        assert answer["weights"] == answers[0]["weights"]


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 1), ("fsdp", 2)])
def test_scaled_training_resumes_bit_for_bit(strategy: Strategy, ranks: int, tmp_path: Path) -> None:
    """The scale, which has been halved once, is part of the checkpoint."""
    undisturbed = run_in("fp16", strategy, ranks, None, 2, folder=tmp_path / "whole")
    run_in("fp16", strategy, ranks, 4, 2, folder=tmp_path / "parts")
    rest = run_in("fp16", strategy, ranks, folder=tmp_path / "parts")
    for one, other in zip(undisturbed, rest, strict=True):
        assert other["began"] in (4, 5)
        assert one["scale"] == other["scale"] == 2**15
        assert one["weights"] == other["weights"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_new_ranks_of_a_resumed_run_have_the_same_scale(strategy: Strategy, tmp_path: Path) -> None:
    run_in("fp16", strategy, 2, 4, 2, folder=tmp_path)
    answers = run_in("fp16", strategy, 4, folder=tmp_path)
    for answer in answers:
        assert answer["began"] in (4, 5)
        assert answer["scale"] == 2**15
        assert answer["weights"] == answers[0]["weights"]


def train_with_batch_norm(run: Run) -> list[float]:
    torch.manual_seed(0)
    model = run.wrap(nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)), blocks=(nn.Linear,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        run.backward(model(torch.randn(8, 6)).square().mean())
        run.update(optimizer)
    model.eval()
    with torch.no_grad():
        return [float(each) for each in model(torch.ones(2, 6))]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_batch_norm_can_be_sharded_in_half_precision(precision: Precision) -> None:
    layout = Parallelism("fsdp", precision=precision).layout(2, 2)
    assert all(abs(value) < 5 for answer in run_ranks(train_with_batch_norm, 2, layout=layout) for value in answer)


def step_by_hand(run: Run, what: str) -> None:
    model = run.wrap(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.backward(model(torch.ones(2, 2)).mean())
    if what == "by hand":
        optimizer.step()
    elif what == "late":
        other = run.wrap(nn.Linear(2, 1))
        late = torch.optim.SGD(other.parameters(), lr=0.1)
        run.restore(late=late)
        run.backward(other(torch.ones(2, 2)).mean())
        run.update(optimizer)
        run.backward(model(torch.ones(2, 2)).mean())
    else:
        run.update(Wrapper(optimizer))


class Wrapper:
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def step(self) -> None:
        self.inner.step()

    def zero_grad(self) -> None:
        self.inner.zero_grad()


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("by hand", "UserError: --precision fp16: the loss is scaled: call run.update(optimizer) instead of step()"),
        ("late", "UserError: --precision fp16: an optimizer still has gradients of an earlier run.backward, after"),
        ("wrapped", "UserError: --precision fp16: run.update needs a torch optimizer, not a Wrapper: use bf16, or"),
    ],
)
def test_step_that_would_use_scaled_gradients_is_an_error(what: str, error: str) -> None:
    (answer,) = run_ranks(step_by_hand, 1, what, may_fail=True, layout=Parallelism(precision="fp16").layout(1, 1))
    assert answer.startswith(error)


def step_two_optimizers(run: Run) -> tuple[list[float], float | None]:
    """Step two optimizers after one backward pass; the gradients of the first are infinite in the first step."""
    first, second = (run.wrap(nn.Linear(1, 1, bias=False)) for _ in range(2))
    for model in (first, second):
        nn.init.ones_(next(model.parameters()))
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (first, second)]
    for factor in (1e38, 0.5):
        x = torch.full((1, 1), 0.25)
        run.backward((first(x) * factor).sum() + 0.5 * second(x).sum())
        for optimizer in optimizers:
            run.update(optimizer)
        # a step without gradients
        run.update(optimizers[0])
    scaler = run._loop_control.scaler
    return [next(model.parameters()).item() for model in (first, second)], scaler and scaler.factor


def test_optimizers_that_step_after_one_backward_pass_divide_by_its_scale() -> None:
    (found,) = run_ranks(step_two_optimizers, 1, layout=Parallelism(precision="fp16").layout(1, 1))
    assert found == ([0.875, 0.75], 2**15)


def autocasting() -> tuple[nn.Module, Block]:
    block = Block()
    model = nn.Sequential(block)
    autocast(model, torch.device("cpu"), torch.bfloat16)
    return model, block


def test_copies_of_a_model_compute_in_the_same_precision_with_their_own_weights() -> None:
    model, _ = autocasting()
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        nn.init.zeros_(made[0].linear.weight)
        nn.init.zeros_(made[0].linear.bias)
        made[0].seen.clear()
        x = torch.randn(3, 16)
        assert torch.equal(made(x), x)
        assert made[0].seen == {torch.bfloat16}
        assert not torch.equal(model(x), x)


def test_autocast_ends_with_the_model_even_if_it_fails() -> None:
    model, block = autocasting()
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 5))
    assert not torch.is_autocast_enabled("cpu")
    model(torch.ones(3, 16))
    assert not torch.is_autocast_enabled("cpu")
    assert block.seen == {torch.bfloat16}


def test_all_outputs_of_16_bits_become_float32() -> None:
    half, double = torch.ones(1, dtype=torch.float16), torch.ones(1, dtype=torch.float64)
    found = in_float32({"logits": half, "more": (half, [double]), "name": "x", "none": None})
    assert found["logits"].dtype == found["more"][0].dtype == torch.float32
    assert (found["more"][1][0].dtype, found["name"], found["none"]) == (torch.float64, "x", None)


def wrap(run: Run) -> None:
    run.wrap(nn.Linear(16, 16))


def test_fp8_on_a_cpu_is_an_error() -> None:
    (answer,) = run_ranks(wrap, 1, may_fail=True, layout=Parallelism(precision="fp8").layout(1, 1))
    assert answer == (
        "UserError: --precision fp8 needs a GPU such as an H100 or newer, and this rank's is a CPU: use bf16"
    )


def test_fp8_changes_large_linear_layers_only() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    expected = copy.deepcopy(model)
    parameters, names = list(model.parameters()), list(model.state_dict())
    to_fp8(model, torch.device("cpu"), emulate=True)
    assert [type(layer).__name__ for layer in model] == ["Float8Linear", "ReLU", "Linear"]
    assert all(old is new for old, new in zip(parameters, model.parameters(), strict=True))
    assert list(model.state_dict()) == names
    x = torch.randn(16, 32)
    model(x).square().mean().backward()
    expected(x).square().mean().backward()
    assert not torch.equal(model(x), expected(x))
    for changed, plain in zip(model.parameters(), expected.parameters(), strict=True):
        assert changed.grad is not None
        assert plain.grad is not None
        assert (changed.grad - plain.grad).norm() < 0.3 * plain.grad.norm()
