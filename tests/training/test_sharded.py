"""Models that are sharded over ranks: no rank waits for another one that has fewer samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.utils.data import TensorDataset

from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks

FEATURES = torch.randn(23, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False).eval(), nn.Linear(4, 1)).double()


def trained(run: Run, how: str, count: int = 3) -> dict[str, Any]:
    """Trains in micro-batches of uneven shares, the last of no sample on one rank; and evaluates unevenly."""
    model = net()
    if how != "whole":
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    if how == "wrapped":
        assert run.wrap(model) is model
    elif how == "restored":
        run.restore(model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = []
    for samples in (23, 17):
        for (batch,) in run.loader(TensorDataset(FEATURES[:samples]), batch_size=8):
            parts.append(0)
            for micro in run.accumulate(batch, count):
                run.backward(model(micro).square().mean())
                parts[-1] += 1
            run.update(optimizer)
    # of which rank 0's count
    model[1].running_mean.fill_(run.rank)
    sizes: dict[int, list[int]] = {}
    total = torch.zeros((), dtype=torch.float64)
    for samples in (5, 1):
        shard = run.shard(TensorDataset(FEATURES[:samples], torch.arange(samples)), batch_size=1)
        sizes[samples] = []
        with torch.no_grad():
            for batch, labels in shard:
                total += model(batch).square().sum()
                assert len(batch) == len(labels)
                sizes[samples].append(len(batch))
        assert len(shard) == len(sizes[samples])
    weights = [getattr(each, "full_tensor", lambda each=each: each)().tolist() for each in model.parameters()]
    return {"weights": weights, "parts": parts, "sizes": sizes, "mean": run.mean(total, 1 / run.world_size)}


@pytest.mark.needs_torch("2.7")
@pytest.mark.parametrize("how", ["wrapped", "restored"])
def test_ranks_with_fewer_samples_stay_in_step(how: str) -> None:
    (alone,) = run_ranks(trained, 1, "whole")
    first, second = answers = run_ranks(trained, 2, how)
    for answer in answers:
        for found, expected in zip(answer["weights"], alone["weights"], strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=1e-12)
        # of shares of 3 and 4, and of 0 and 1
        assert answer["parts"] == [3, 3, 3, 3, 3, 1]
        assert answer["mean"] == pytest.approx(alone["mean"])
    assert first["sizes"] == {5: [1, 1, 0], 1: [0]}
    assert second["sizes"] == {5: [1, 1, 1], 1: [1]}


@pytest.mark.needs_torch("2.7")
@pytest.mark.parametrize("parts", [1, 4])
def test_sharded_weights_match_one_process_for_any_number_of_parts(parts: int) -> None:
    """Four parts are as many as the larger share of a batch has samples."""
    (alone,) = run_ranks(trained, 1, "whole", parts)
    for answer in run_ranks(trained, 2, "wrapped", parts):
        for found, expected in zip(answer["weights"], alone["weights"], strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=1e-12)


def wraps_by_the_first_fsdp(run: Run) -> None:
    run.wrap(nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 1), device_id=run.device)))


def test_fsdp1_is_rejected() -> None:
    for answer in run_ranks(wraps_by_the_first_fsdp, 2, may_fail=True):
        assert answer.startswith("UserError: run.wrap(Sequential): FullyShardedDataParallel is not supported")


def trained_in_half_precision(run: Run) -> list[float]:
    """From a list of batches, which the model casts before it computes."""
    model = nn.Linear(1, 1, bias=False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    run.wrap(model)
    found = []
    values = torch.tensor([1.0, 2.0, 25.0, 8.0, 16.0]).unsqueeze(1)
    for (batch,) in list(run.loader(TensorDataset(values), batch_size=3)):
        run.backward(model(batch).mean())
        (weight,) = model.parameters()
        found.append(weight.grad.full_tensor().item())  # type: ignore[union-attr]
        weight.grad = None
    return found


@pytest.mark.needs_torch("2.7")
def test_batches_cast_by_mixed_precision_are_recognized() -> None:
    assert run_ranks(trained_in_half_precision, 2) == [pytest.approx([28 / 3, 12.0], rel=1e-2)] * 2
