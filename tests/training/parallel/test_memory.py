"""Options of `run.wrap` that save memory leave the results as they are."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from mgpu_slurm.request.parallelism import Parallelism
from mgpu_slurm.training.parallel.data_parallel import memory_text
from mgpu_slurm.training.parallel.recompute import recompute_blocks
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(x))))


def train(run: Run, options: dict[str, bool]) -> dict[str, Any]:
    """Train a few steps; return the weights, and the bytes of activations that are kept for the backward pass."""
    run.seed(0)
    torch.manual_seed(0)
    layers = nn.Sequential(Block(), Block(), nn.Linear(8, 1))
    model = run.wrap(layers, blocks=(Block,), plan={"*.up": "column", "*.down": "row"}, **options)
    torch.manual_seed(run.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    kept = 0

    def keep(tensor: Any) -> Any:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(torch.randn(32, 8)).square().mean()
        run.backward(loss)
        run.update(optimizer, clip=1.0)
    weights = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return {"weights": [each.tolist() for each in weights], "names": list(model.state_dict()), "kept": kept}


LAYOUTS: dict[str, tuple[int, Parallelism]] = {
    "one": (1, Parallelism()),
    "ddp": (2, Parallelism()),
    "fsdp": (2, Parallelism("fsdp")),
    "tensor": (2, Parallelism(tensor=2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_recomputation_keeps_less_and_changes_nothing(name: str) -> None:
    ranks, options = LAYOUTS[name]
    layout = options.layout(ranks, ranks)
    plain = run_ranks(train, ranks, {}, layout=layout)
    for before, after in zip(plain, run_ranks(train, ranks, {"recompute": True}, layout=layout), strict=True):
        # bit for bit, with dropout
        assert after["weights"] == before["weights"]
        assert after["names"] == before["names"]
        assert after["kept"] < before["kept"] / 2


@pytest.mark.parametrize("name", ["fsdp", "ddp"])
def test_offload_changes_nothing(name: str) -> None:
    ranks, options = LAYOUTS[name]
    layout = options.layout(ranks, ranks)
    plain = run_ranks(train, ranks, {}, layout=layout)
    for before, after in zip(plain, run_ranks(train, ranks, {"offload": True}, layout=layout), strict=True):
        assert after["weights"] == before["weights"]


def test_recomputed_blocks_can_be_copied_and_pickled_as_state() -> None:
    model = nn.Sequential(Block(), Block()).eval()
    recompute_blocks([model[0], model[1]])
    recompute_blocks([model[0]])
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    x = torch.ones(2, 8)
    assert torch.equal(copied(x), x)
    assert not torch.equal(model(x), x)
    assert isinstance(model[0], Block)
    assert pickle.loads(pickle.dumps(model.state_dict())).keys() == model.state_dict().keys()


def test_recomputation_updates_the_statistics_of_batch_norm_once() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    recomputed = copy.deepcopy(plain)
    recompute_blocks([recomputed])
    x = torch.randn(4, 2)
    for model in (plain, recomputed):
        model(x).sum().backward()
    assert all(map(torch.equal, plain.buffers(), recomputed.buffers()))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), recomputed.parameters(), strict=True))  # type: ignore[arg-type]


def recompute_nothing(run: Run) -> None:
    run.wrap(nn.Linear(1, 1), recompute=True)


def test_recomputation_without_blocks_is_an_error() -> None:
    (answer,) = run_ranks(recompute_nothing, 1, may_fail=True)
    assert answer.startswith("UserError: run.wrap: recompute=True needs blocks=(...), the classes of the model's repe")


def train_spread(run: Run) -> tuple[int, list[str]]:
    """Wrap a model that lies on several devices; on a CPU, the meta device stands for another one."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].to("meta")
    wrapped = run.wrap(model)
    return len(run.devices), [each.device.type for each in wrapped.parameters()]


def test_model_on_several_devices_stays_there() -> None:
    assert run_ranks(train_spread, 1) == [(1, ["cpu", "cpu", "meta", "meta"])]


def train_data_parallel(run: Run) -> dict[str, Any]:
    calls = []
    forward = nn.DataParallel.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return forward(self, *args, **kwargs)

    nn.DataParallel.forward = counted
    return train(run, {}) | {"calls": len(calls)}


def test_data_parallel_trains_like_one_process_on_a_cpu() -> None:
    (alone,) = run_ranks(train, 1, {})
    (found,) = run_ranks(train_data_parallel, 1, layout=Parallelism("dp").layout(1, 1))
    assert found["calls"] > 0
    assert found["weights"] == alone["weights"]


def test_data_parallel_tells_how_unevenly_gpus_are_used() -> None:
    assert memory_text([14_200_000_000, 9_800_000_000, 9_700_000_000]) == (
        "DataParallel: GPU 0 held up to 14.2 GB, the others 9.8 GB: GPU 0 also gathers the outputs of all, and copies"
        " the model to them in each step. --strategy ddp, with one process per GPU, does neither"
    )
