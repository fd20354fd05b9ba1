"""Who is told to stop in an evaluation leaves soon, and goes on as if it had not been told."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mgpu_slurm.checkpoints import folder as checkpoints
from mgpu_slurm.core.errors import RunStopped
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.run_folder.checkpoint_names import checkpoint_step, newest_checkpoint
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks
from tests.support import wait_until

EPOCHS, STEPS = 4, 3
EVALUATED = 80
"""Samples, in batches of two on each rank."""


def has_reached(folder: Path, rank: int, epoch: int, batch: int) -> bool:
    file = folder / f"evaluated-1-{rank}"
    # which may be about to be written
    return file.exists() and (text := file.read_text()) != "" and [*map(int, text.split())] >= [epoch, batch]


def has_heard_of_a_stop(run: Run) -> bool:
    sync = run._collectives._step_sync
    return sync is not None and sync._stop is Stop.END


def trains(run: Run, how: str, stop_in: int, after: int) -> dict[str, Any]:
    """Stops the last rank in the evaluation of an epoch, after some batches; no epoch is the one behind them all."""
    run.seed(3)
    # run.shard brings rank 0's statistics of batch norm to all ranks, and a loader does not
    norm = nn.BatchNorm1d(16) if how == "shard" else nn.LayerNorm(16)
    net = nn.Sequential(nn.Linear(4, 16), norm, nn.Dropout(0.3), nn.Linear(16, 1))
    model = run.wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    features = torch.randn(8 * STEPS, 4, generator=torch.Generator().manual_seed(0))
    data = run.loader(TensorDataset(features), batch_size=8, shuffle=True)
    held = TensorDataset(torch.ones(EVALUATED + run.world_size - 1, 4))
    state = run.restore(model=model, optimizer=optimizer, scheduler=scheduler, data=data)
    run.checkpoints(every_minutes=None)

    def evaluation(epoch: int) -> Iterator[torch.Tensor]:
        batches = run.shard(held, batch_size=2) if how == "shard" else run.loader(held, batch_size=2 * run.world_size)
        for number, (batch,) in enumerate(batches):
            if (epoch, number, run.rank, run.attempt) == (stop_in, after, run.world_size - 1, 1):
                run._loop_control.stop.asked = Stop.END
            (run.folder / f"evaluated-{run.attempt}-{run.rank}").write_text(f"{epoch} {number}")
            if (epoch, number, run.attempt) == (stop_in, after + 1, 1) and run.rank != run.world_size - 1:
                wait_until(functools.partial(has_reached, run.folder, run.world_size - 1, epoch, after))
                if how == "loader":
                    # on a busy machine this rank could be through with the evaluation before it hears of the stop
                    wait_until(functools.partial(has_heard_of_a_stop, run))
            if number == 0:
                # an evaluation may do anything
                net[0].bias.data *= 0.9
            net.eval()
            with torch.no_grad():
                yield net(batch).sum()
            net.train()

    for epoch in state.epochs(EPOCHS):
        for (batch,) in data:
            run.backward(model(batch).square().mean())
            run.update(optimizer, clip=1.0)
        # between the pass and its evaluation, so that nobody may do it twice
        scheduler.step()
        total = sum(evaluation(epoch), torch.zeros(()))
        run.report(epoch, loss=run.mean(total, 1), draw=torch.rand(1).item())
    last = run.mean(sum(evaluation(EPOCHS + 1), torch.zeros(())), 1)
    return {
        "weights": [each.tolist() for each in net.parameters()],
        "last": last,
        "rate": scheduler.get_last_lr(),
    }


def curve(folder: Path) -> list[tuple[int, int, float, float]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(each["progress"], each["step"], each["metrics"]["loss"], each["metrics"]["draw"]) for each in records]


def goes_on(run: Run, *arguments: Any) -> Any:
    run.attempt = 2
    return trains(run, *arguments)


@pytest.mark.parametrize(
    ("ranks", "how", "stop_in", "at"),
    [
        (1, "loader", 3, 3 * STEPS - 1),
        (1, "shard", EPOCHS + 1, EPOCHS * STEPS),
        (2, "loader", 1, STEPS - 1),
        (2, "loader", EPOCHS + 1, EPOCHS * STEPS),
        (2, "shard", 3, 3 * STEPS - 1),
    ],
)
def test_stop_in_evaluation_resumes_from_last_batch_of_previous_pass(
    ranks: int, how: str, stop_in: int, at: int, tmp_path: Path
) -> None:
    undisturbed, stopped = tmp_path / "undisturbed", tmp_path / "stopped"
    undisturbed.mkdir()
    stopped.mkdir()
    expected = run_ranks(trains, ranks, how, 0, 0, folder=undisturbed)
    for answer in run_ranks(trains, ranks, how, stop_in, 3, folder=stopped):
        assert answer == "RunStopped: 143"
    newest = newest_checkpoint(RunFolder(stopped))
    assert newest is not None
    assert checkpoint_step(newest) == at
    for rank in range(ranks):
        # and soon: the other rank may do a few batches until it hears of it
        epoch, batch = map(int, (stopped / f"evaluated-1-{rank}").read_text().split())
        assert epoch == stop_in
        # a shard has as many batches as it has on this rank, so that ranks meet behind it
        assert how == "shard" or batch < EVALUATED // 2 // ranks - 1
    assert run_ranks(goes_on, ranks, how, 0, 0, folder=stopped) == expected
    assert curve(stopped) == curve(undisturbed)


def loops_otherwise(run: Run, how: str, stop_in: int) -> tuple[list[Any], int]:
    """Passes in which the run cannot stop at the last batch, or that have no evaluation; is told to stop in that of an
    epoch, and does so many batches of it."""
    run.seed(5)
    model = run.wrap(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = run.loader(TensorDataset(torch.randn(24, 4)), batch_size=4, shuffle=True)
    state = run.restore(model=model, optimizer=optimizer, data=data)
    evaluated = 0
    with contextlib.suppress(RunStopped):
        for epoch in state.epochs(5):
            for (batch,) in data:
                run.backward(model(batch).square().mean())
                if how == "leaves":
                    run.update(optimizer)
                    if data.batch == 3:
                        break
                elif how != "accumulates" or data.batch in (3, 5):
                    run.update(optimizer)
            if how == "now and then" and epoch % 2:
                continue
            for _ in run.loader(TensorDataset(torch.ones(80, 1)), batch_size=2 * run.world_size):
                if epoch == stop_in:
                    evaluated += 1
                    run._loop_control.stop.asked = Stop.END
    return [each.tolist() for each in model.parameters()], evaluated


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("how", "steps", "last"), [("leaves", 4, 3), ("accumulates", 2, 1), ("now and then", 6, 5)])
def test_stop_in_evaluation_resumes_from_last_possible_boundary(
    how: str, steps: int, last: int, ranks: int, tmp_path: Path
) -> None:
    undisturbed = run_ranks(loops_otherwise, ranks, how, 0, folder=tmp_path / "undisturbed")
    # the second time in the attempt that has gone on
    for epoch in (2, 4):
        if (how, epoch) == ("now and then", 2):
            # nobody knows of evaluations before the first one
            continue
        for _, evaluated in run_ranks(loops_otherwise, ranks, how, epoch, folder=tmp_path / "stopped"):
            assert evaluated < 10
        newest = newest_checkpoint(RunFolder(tmp_path / "stopped"))
        assert newest is not None
        assert checkpoint_step(newest) == (epoch - 1) * steps + last
    assert run_ranks(loops_otherwise, ranks, how, 0, folder=tmp_path / "stopped") == undisturbed


def evaluates_after_an_epoch(run: Run, is_lost: bool) -> int:
    """Is told to stop in an evaluation after the last epoch; the batches that it did all the same."""
    model = run.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = run.loader(TensorDataset(torch.ones(8, 1)), batch_size=2)
    state = run.restore(model=model, optimizer=optimizer, data=data)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for _ in state.epochs(1):
        for (batch,) in data:
            run.backward(model(batch).mean())
            run.update(optimizer)
        if is_lost and run.rank == run.world_size - 1:
            checkpoints.write_part = full
    done = 0
    with contextlib.suppress(RunStopped):
        for _ in run.loader(TensorDataset(torch.ones(20, 1)), batch_size=2):
            run._loop_control.stop.asked = Stop.END
            done += 1
    return done


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("is_lost", "batches"), [(False, 1), (True, 10)])
def test_evaluation_is_not_cut_short_if_the_checkpoint_failed(
    is_lost: bool, batches: int, ranks: int, tmp_path: Path
) -> None:
    assert run_ranks(evaluates_after_an_epoch, ranks, is_lost, folder=tmp_path) == [batches] * ranks
