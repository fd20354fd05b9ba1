"""A run that was interrupted ends as one that was not: bit for bit on as many ranks, and close on others."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mgpu_slurm.runtime.run import Run
from mgpu_slurm.runtime.stopping import Stop
from tests.runtime.ranks import run_ranks

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
    data = run.loader(TensorDataset(features, torch.arange(SAMPLES)), batch_size=BATCH, shuffle=True)
    meter = run.meter("loss")
    state = run.restore(model=model, optimizer=optimizer, data=data)
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
                    run._steering.stop.asked = Stop.END
            squares = [net(batch).square().sum().item() for (batch, _) in run.shard(data._loader.dataset, 8)]
            losses[epoch] = run.mean(sum(squares), SAMPLES / run.world_size)
            means[epoch] = meter.mean()
    except BaseException as stopped:
        if type(stopped).__name__ != "RunStopped":
            raise
    return {
        "weights": [parameter.tolist() for parameter in net.parameters()],
        "seen": seen,
        "losses": losses,
        "means": means,
    }


@pytest.mark.parametrize("stop_at", [3, 13])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_weights_are_equal_bit_for_bit(ranks: int, stop_at: int, tmp_path: Path) -> None:
    whole = run_ranks(trains, ranks, None, 0.2, folder=tmp_path / "whole")
    begun = run_ranks(trains, ranks, stop_at, 0.2, folder=tmp_path / "parts")
    rest = run_ranks(trains, ranks, None, 0.2, folder=tmp_path / "parts")
    for one, first, other in zip(whole, begun, rest, strict=True):
        assert one["weights"] == other["weights"]
        # of all of an epoch, which was interrupted
        assert one["means"] == first["means"] | other["means"]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (1, 4)])
def test_on_other_ranks_each_sample_counts_once_and_the_losses_are_close(
    before: int, after: int, tmp_path: Path
) -> None:
    whole = run_ranks(trains, before, None, 0.0, folder=tmp_path / "whole")
    parts = run_ranks(trains, before, 10, 0.0, folder=tmp_path / "parts")
    parts += run_ranks(trains, after, None, 0.0, folder=tmp_path / "parts")
    seen = Counter(place for part in parts for place in part["seen"])
    assert seen == Counter({(epoch, number): 1 for epoch in range(1, EPOCHS + 1) for number in range(SAMPLES)})
    losses = parts[0]["losses"] | parts[-1]["losses"]
    assert losses == pytest.approx(whole[0]["losses"], rel=1e-4)
    means = parts[0]["means"] | parts[-1]["means"]
    assert means == pytest.approx(whole[0]["means"], rel=1e-4)
