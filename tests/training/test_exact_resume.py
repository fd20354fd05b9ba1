"""A run that was interrupted ends as one that was not: bit for bit on as many ranks, and close on others."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks

EPOCHS, SAMPLES, BATCH = 3, 52, 8


def trains(run: Run, stop_at: int | None, dropout: float) -> dict[str, Any]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(48, 48), nn.Tanh(), nn.Dropout(dropout))]
    net = nn.Sequential(*layers, nn.Linear(48, 1))
    # the same start whatever the rank
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.2)
    run.seed(5, deterministic=True)
    model = run.wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    features = torch.randn(SAMPLES, 48, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(features, torch.arange(SAMPLES))
    data = run.loader(dataset, batch_size=BATCH, shuffle=True)
    meter = run.meter("loss")
    state = run.restore(model=model, optimizer=optimizer, data=data)
    began, was_stopped = state.step, False
    seen: list[tuple[int, int]] = []
    losses: dict[int, float] = {}
    means: dict[int, float] = {}
    try:
        for epoch in state.epochs(EPOCHS):
            for batch, numbers in data:
                total = model(batch).square().mean()
                run.backward(total)
                run.update(optimizer, clip=1.0)
                meter.add(total)
                seen += [(epoch, number) for number in numbers.tolist()]
                if run.step == stop_at and run.rank == run.world_size - 1:
                    run._loop_control.stop.asked = Stop.END
            squares = [net(batch).square().sum().item() for (batch, _) in run.shard(dataset, 8)]
            losses[epoch] = run.mean(sum(squares), SAMPLES / run.world_size)
            means[epoch] = meter.mean()
    except BaseException as stopped:
        if type(stopped).__name__ != "RunStopped":
            raise
        was_stopped = True
    return {
        "began": began,
        "ended": run.step,
        "was stopped": was_stopped,
        "weights": [parameter.tolist() for parameter in net.parameters()],
        "seen": seen,
        "losses": losses,
        "means": means,
    }


def assert_continued(begun: list[dict[str, Any]], rest: list[dict[str, Any]], stop_at: int) -> None:
    """A second part that starts anew would come to the same weights."""
    assert all(part["was stopped"] and part["began"] == 0 for part in begun)
    # the other ranks may be a step ahead of the one that was told to stop; in an evaluation all leave from before it
    (began,) = {part["began"] for part in rest}
    assert began in (stop_at, stop_at + 1)
    assert {part["ended"] for part in begun} <= {began, began + 1}
    assert not any(part["was stopped"] for part in rest)


@pytest.mark.parametrize("stop_at", [3, 13])
@pytest.mark.parametrize("ranks", [2, 4])
def test_resume_gives_bitwise_equal_weights(ranks: int, stop_at: int, tmp_path: Path) -> None:
    whole = run_ranks(trains, ranks, None, 0.2, folder=tmp_path / "whole")
    begun = run_ranks(trains, ranks, stop_at, 0.2, folder=tmp_path / "parts")
    rest = run_ranks(trains, ranks, None, 0.2, folder=tmp_path / "parts")
    assert_continued(begun, rest, stop_at)
    for one, first, other in zip(whole, begun, rest, strict=True):
        assert one["weights"] == other["weights"]
        # of all of an epoch, which was interrupted
        assert one["means"] == first["means"] | other["means"]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (1, 4)])
def test_resume_on_other_ranks_sees_each_sample_once_with_close_losses(before: int, after: int, tmp_path: Path) -> None:
    whole = run_ranks(trains, before, None, 0.0, folder=tmp_path / "whole")
    begun = run_ranks(trains, before, 10, 0.0, folder=tmp_path / "parts")
    rest = run_ranks(trains, after, None, 0.0, folder=tmp_path / "parts")
    assert_continued(begun, rest, 10)
    parts = begun + rest
    seen = Counter(place for part in parts for place in part["seen"])
    assert seen == Counter({(epoch, number): 1 for epoch in range(1, EPOCHS + 1) for number in range(SAMPLES)})
    losses = parts[0]["losses"] | parts[-1]["losses"]
    assert losses == pytest.approx(whole[0]["losses"], rel=1e-4)
    means = parts[0]["means"] | parts[-1]["means"]
    assert means == pytest.approx(whole[0]["means"], rel=1e-4)
