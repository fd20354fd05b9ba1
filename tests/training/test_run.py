"""The primitives of `Run` on real ranks: what the world computes is what one process would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.records import read_state
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks

FEATURES = torch.randn(23, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def weights_after(run: Run, samples: int, batch_size: int, parts: int) -> list[float]:
    """Three epochs of plain gradient descent; the weights at the end."""
    run.seed(0)
    torch.manual_seed(5)
    model = run.wrap(nn.Linear(5, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = run.loader(TensorDataset(FEATURES[:samples]), batch_size=batch_size, shuffle=True)
    for _ in range(3):
        for (batch,) in data:
            for micro in run.accumulate(batch, parts):
                run.backward(model(micro).square().mean())
            run.update(optimizer)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


@pytest.mark.parametrize(
    ("samples", "world_size", "parts"),
    [
        (23, 2, 1),  # the last batch of 7 is shared out 3 and 4
        (17, 2, 1),  # the last batch of 1 leaves a rank without a sample
        (23, 3, 1),  # 8 samples over 3 ranks in every batch
        (23, 2, 3),  # micro-batches of different sizes
        (17, 3, 2),
    ],
)
def test_any_number_of_ranks_gives_the_weights_of_one_process(samples: int, world_size: int, parts: int) -> None:
    (alone,) = run_ranks(weights_after, 1, samples, 8, 1)
    for weights in run_ranks(weights_after, world_size, samples, 8, parts):
        assert weights == pytest.approx(alone, rel=1e-12)


def seen_in_two_epochs(run: Run, drop_last: bool) -> list[list[int]]:
    run.seed(7)
    data = run.loader(TensorDataset(torch.arange(23)), batch_size=8, shuffle=True, drop_last=drop_last)
    return [[int(sample) for (batch,) in data for sample in batch] for _ in range(2)]


def test_each_epoch_sees_every_sample_once_in_a_new_order() -> None:
    per_rank = run_ranks(seen_in_two_epochs, 2, False)
    for epoch in range(2):
        assert sorted(per_rank[0][epoch] + per_rank[1][epoch]) == list(range(23))
    assert per_rank[0][0] != per_rank[0][1]


def test_drop_last_drops_the_smaller_batch() -> None:
    per_rank = run_ranks(seen_in_two_epochs, 2, True)
    first = per_rank[0][0] + per_rank[1][0]
    assert len(first) == len(set(first)) == 16


def random_numbers_of_workers(run: Run) -> tuple[list[float], list[float]]:
    """Return those of two epochs, and those of the first one once more."""
    found = []
    for epochs in (2, 1):
        run.seed(7)
        data = run.loader(_Drawing(), batch_size=4, num_workers=1)
        found.append([float(value) for _ in range(epochs) for batch in data for value in batch])
    return found[0], found[1]


class _Drawing(torch.utils.data.Dataset[torch.Tensor]):
    """Each sample is a number drawn when it is fetched, as an augmentation is."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def test_worker_random_numbers_differ_by_rank_and_epoch_reproducibly() -> None:
    (first, first_again), (second, second_again) = run_ranks(random_numbers_of_workers, 2)
    assert (first[:4], second[:4]) == (first_again, second_again)
    assert len({*first, *second}) == 16


def evaluated(run: Run) -> tuple[list[int], float, float]:
    seen = [int(sample) for (batch,) in run.shard(TensorDataset(torch.arange(23)), batch_size=4) for sample in batch]
    return seen, run.mean(sum(seen), len(seen)), run.mean(torch.tensor(0.0), 0)


def test_shard_has_no_duplicates_and_mean_is_weighted_by_count() -> None:
    answers = run_ranks(evaluated, 3)
    assert sorted(sample for seen, _, _ in answers for sample in seen) == list(range(23))
    for _, mean, of_nothing in answers:
        assert mean == 11.0
        assert of_nothing != of_nothing


def batch_norm_evaluated_unevenly(run: Run) -> list[float]:
    model: Any = run.wrap(nn.BatchNorm1d(1))
    model(torch.randn(8, 1, generator=torch.Generator().manual_seed(run.rank)))
    model.eval()
    # ranks see different numbers of batches, and nothing waits for the rank that has more
    for (batch,) in run.shard(TensorDataset(torch.ones(3, 1)), batch_size=1):
        model(batch)
    return [float(model.running_mean), run.mean(model.running_mean, 1)]


def test_uneven_evaluation_uses_batch_norm_statistics_of_rank_0() -> None:
    of_rank_0 = nn.BatchNorm1d(1)
    of_rank_0(torch.randn(8, 1, generator=torch.Generator().manual_seed(0)))
    assert of_rank_0.running_mean is not None
    expected = float(of_rank_0.running_mean)
    for own, mean in run_ranks(batch_norm_evaluated_unevenly, 2):
        assert (own, mean) == pytest.approx((expected, expected))


def lonely_evaluation(run: Run) -> None:
    if run.is_main:
        list(run.shard(TensorDataset(torch.ones(3, 1))))
    run.mean(1, 1)


def test_evaluation_on_only_one_rank_is_an_error() -> None:
    for answer in run_ranks(lonely_evaluation, 2, may_fail=True):
        assert "rank 0 at the start of a pass over run.shard(), rank 1 at run.mean()" in answer


def wrongly_reported(run: Run) -> None:
    run.report(1, loss=0.5)
    run.report(1, loss=0.4)


def test_progress_that_does_not_increase_fails_on_every_rank(tmp_path: Path) -> None:
    answers = run_ranks(wrongly_reported, 2, folder=tmp_path, may_fail=True)
    assert all("progress must increase, starting at 1 (last value: 1)" in answer for answer in answers)


class _Numbers(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def _loader(run: Run) -> Any:
    return run.loader(TensorDataset(torch.arange(3)), batch_size=1)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda run: run.loader(TensorDataset(torch.arange(3)), batch_size=0), "batch_size=0"),
        (lambda run: run.loader(TensorDataset(torch.arange(0)), batch_size=1), "empty"),
        (lambda run: run.loader(iter([1]), batch_size=1), "map-style"),
        (lambda run: run.loader(TensorDataset(torch.arange(3))), "batch_size=None"),
        (lambda run: run.loader(TensorDataset(torch.arange(3)), 1, batch_sampler=[[0]]), "it decides batch_size"),
        (lambda run: run.loader(TensorDataset(torch.arange(3)), 1, True, sampler=[0]), "shuffle=True"),
        (lambda run: run.loader(TensorDataset(torch.arange(3)), 1, sampler=iter([0])), "has no __len__"),
        (lambda run: next(iter(run.loader(TensorDataset(torch.arange(3)), batch_sampler=[[], [0]]))), "of 0 samples"),
        (lambda run: run.loader(_Numbers(), 1, shuffle=True), "shuffle there"),
        (lambda run: run.loader(_Numbers(), 1, sampler=[0]), r"sampler=...\): a stream is read from the start"),
        (lambda run: len(run.loader(_Numbers(), 1)), "_Numbers has no length"),
        (lambda run: run.loader(TensorDataset(torch.arange(3)), batch_size=4, drop_last=True), "drop_last"),
        (lambda run: run.restore(model=3), "int has no state_dict"),
        (
            lambda run: run.restore(a=_loader(run), b=_loader(run)),
            r"restore\(b=...\): 'a' is a loader already: pass only the one .*drives",
        ),
        (lambda run: next(run.accumulate(torch.ones(2), parts=0)), "parts=0"),
        (lambda run: [run.meter("loss") for _ in "12"], "'loss'.: a meter of that name exists"),
        (lambda run: (run.restore(), run.meter("loss")), "create it before"),
        (lambda run: run.meter("loss").add(torch.ones(2)), "pass the number"),
        (lambda run: run.meter("loss").add(torch.ones(2), 2), r"shape \[2\]"),
        (lambda run: next(run.accumulate({"mode": "text"}, parts=1)), "run.accumulate: .* nothing in it has an entry"),
    ],
)
def test_invalid_arguments_are_named_in_the_error(use: Any, words: str, run: Run) -> None:
    with pytest.raises((UserError, TypeError), match=words):
        use(run)


def metered(run: Run, samples: int) -> list[float]:
    meter = run.meter("square")
    data = run.loader(TensorDataset(FEATURES[:samples]), batch_size=8)
    found = []
    for _ in range(2):
        for (batch,) in data:
            for micro in run.accumulate(batch, 2):
                meter.add(micro.square().mean())
        found.append(meter.mean())
    return [*found, meter.mean()]


@pytest.mark.parametrize("world_size", [1, 3])
def test_meter_is_the_mean_over_all_samples_of_all_ranks(world_size: int) -> None:
    # of the last batch of one sample two of three ranks have none, and get the same one to go through the motions
    expected = FEATURES[:17].square().mean().item()
    for means in run_ranks(metered, world_size, 17):
        assert means == pytest.approx([expected, expected, float("nan")], nan_ok=True)


def test_non_numeric_metric_is_named_in_the_error(tmp_path: Path) -> None:
    (answer,) = run_ranks(_reports_text, 1, folder=tmp_path, may_fail=True)
    assert answer == "TypeError: metric 'loss': expected a number, got 'low'"


def _reports_with_total(run: Run, total: object) -> None:
    run.report(1, loss=0.5, total=total)
    run.close()


def test_report_takes_the_progress_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    run_ranks(_reports_with_total, 1, 40, folder=tmp_path)
    assert read_state(RunFolder(tmp_path)).total == 40
    # a metric of that name, which is no number of epochs
    (answer,) = run_ranks(_reports_with_total, 1, 0.25, folder=tmp_path, may_fail=True)
    assert "run.report(total=0.25): total must be an integer" in answer


def _reports_text(run: Run) -> None:
    run.report(1, loss="low")
