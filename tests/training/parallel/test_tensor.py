"""How `run.wrap(plan=...)` divides layers, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mgpu_slurm.request.parallelism import Parallelism
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks


class Text(nn.Module):
    """An embedding and an output layer, which may be one tensor."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 7, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.layers[1](torch.relu(self.layers[0](x)))
        return self.head(x)  # type: ignore[no-any-return]


PLANS = {
    "all": {"embedding": "embedding", "layers.0": "column", "layers.1": "row", "head": "output"},
    "some": {"layers.0": "column", "layers.1": "row"},
    "unknown name": {"layer.*": "column"},
    "unknown style": {"head": "collumn"},
    "no linear layer": {"layers": "column"},
    "two styles": {"layers.0": "column", "layers.*": "row"},
    "half of a tie": {"head": "output"},
    "none": None,
}


def outputs(run: Run, name: str, is_tied: bool) -> list[Any]:
    torch.manual_seed(run.rank)
    model = run.wrap(Text(is_tied), plan=PLANS[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        run.backward(model(torch.arange(7)).square().mean())
        run.update(optimizer, clip=0.1)
    return [model(torch.arange(7)).tolist(), sum(1 for _ in model.parameters())]


@pytest.mark.parametrize("is_tied", [False, True])
def test_embedding_and_output_layer_are_divided(is_tied: bool) -> None:
    ((alone, count),) = run_ranks(outputs, 1, "all", is_tied)
    found = run_ranks(outputs, 2, "all", is_tied, layout=Parallelism(tensor=2).layout(2, 2))
    assert found[0] == found[1]
    # a tie that was broken would leave one parameter more
    assert found[0][1] == count
    assert torch.tensor(found[0][0]).allclose(torch.tensor(alone), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("unknown name", "run.wrap: plan names 'layer.*', which matches nothing (did you mean 'layers.*'?)"),
        ("unknown style", "run.wrap(plan=...): 'head': 'collumn' is none of column, row, embedding, output (did you"),
        ("no linear layer", "run.wrap: plan names 'layers', a ModuleList: only nn.Linear and nn.Embedding can be div"),
        ("two styles", "run.wrap: plan has two styles for 'layers.0': column and row"),
        ("half of a tie", "run.wrap: plan divides 'embedding.weight' and 'head.weight' differently, but they are on"),
        ("none", "run.wrap: --tensor 2 needs plan={...}, how the ranks divide the model's layers"),
    ],
)
def test_plan_that_does_not_fit_is_an_error(name: str, error: str) -> None:
    layout = Parallelism(tensor=2).layout(2, 2)
    for answer in run_ranks(outputs, 2, name, True, may_fail=True, layout=layout):
        assert answer.startswith(f"UserError: {error}")


def use_pipeline(run: Run) -> None:
    run.pipeline([nn.Linear(1, 1)], lambda outputs, targets: outputs, micro_batches=1)


def test_pipeline_without_the_option_is_an_error() -> None:
    for answer in run_ranks(use_pipeline, 2, may_fail=True, layout=Parallelism(tensor=2).layout(2, 2)):
        assert answer == "UserError: --tensor 2 needs run.wrap(model, plan=...) in place of run.pipeline"


def draw(run: Run) -> float:
    # user code that seeds each rank differently
    torch.manual_seed(run.rank)
    run.wrap(Text(False), plan=PLANS["all"])
    return float(torch.rand(()))


def test_ranks_that_compute_together_draw_the_same() -> None:
    first, second = run_ranks(draw, 2, layout=Parallelism(tensor=2).layout(2, 2))
    assert first == second


def whether_updated_together(run: Run, name: str) -> list[Any]:
    optimizer = torch.optim.AdamW(run.wrap(Text(is_tied=False), plan=PLANS[name]).parameters())
    run.restore(optimizer=optimizer)
    return [group["foreach"] for group in optimizer.param_groups]


def test_optimizer_with_some_divided_parameters_updates_one_at_a_time() -> None:
    """On a GPU, torch's optimizers update all together by default, by operations that refuse a mixture."""
    layout = Parallelism(tensor=2).layout(2, 2)
    assert run_ranks(whether_updated_together, 2, "all", layout=layout)[0] == [None]
    assert run_ranks(whether_updated_together, 2, "some", layout=layout)[0] == [False]
    failed = run_ranks(update_a_mixture, 2, may_fail=True, layout=layout)
    assert "got mixed torch.Tensor and DTensor" in failed[0]


def update_a_mixture(run: Run) -> None:
    model = run.wrap(Text(is_tied=False), plan=PLANS["some"])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    run.backward(model(torch.arange(7)).square().mean())
    run.update(optimizer)
