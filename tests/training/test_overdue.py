"""A save that meets no boundary is made at the end, and who waits for one is told why there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.run_folder.checkpoint_names import newest_checkpoint
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.training.run import Run
from tests.ranks import run_ranks


def in_a_loop_of_its_own(run: Run, how: str) -> tuple[int, int]:
    """Eight steps over a plain DataLoader; from which step it began, and the epoch."""
    model = run.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = run.restore(model=model, optimizer=optimizer)
    began, epoch = state.step, 0
    if how == "every_steps":
        run.checkpoints(every_steps=5)
    for epoch in state.epochs(3) if how == "left" else [1]:  # noqa: B007
        for (batch,) in DataLoader(TensorDataset(torch.ones(8, 1))):
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if how == "each step" or (how == "on rank 1" and run.rank == 1):
                run.save()
        if how == "left":
            # before the end of the epoch
            run.checkpoints(best="loss", direction="minimize")
            run.report(state.progress + 1, loss=1.0)
            break
    if how == "last line":
        run.save()
    run.finish()
    return began, epoch


@pytest.mark.parametrize(
    ("how", "saved"),
    [("each step", 8), ("last line", 8), ("every_steps", 8), ("on rank 1", 8), ("left", 8), ("never", 0)],
)
def test_overdue_save_is_written_at_the_end(how: str, saved: int, tmp_path: Path) -> None:
    run_ranks(in_a_loop_of_its_own, 2, how, folder=tmp_path)
    newest = newest_checkpoint(RunFolder(tmp_path))
    assert (newest is None) == (saved == 0)
    again = run_ranks(in_a_loop_of_its_own, 2, how, folder=tmp_path)
    # an epoch that was left is over
    assert again == [(saved, 2 if how == "left" else 1)] * 2


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


REASONS = {
    "own loader": "the loop is not over a run.loader that was passed to run.restore",
    "no restore": "run.restore has not been called, so there is nothing to save",
    "uncounted": "each batch comes between run.backward and the optimizer step (only steps by",
}


@pytest.mark.parametrize("how", REASONS)
def test_reason_for_a_missing_boundary_is_warned_about_once(
    how: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = trained()
    dataset = TensorDataset(torch.ones(260, 1))
    data: Any = run.loader(dataset, batch_size=1) if how == "uncounted" else DataLoader(dataset)
    if how != "no restore":
        run.restore(model=model, **({"data": data} if how == "uncounted" else {}))
    told = {}
    for number, (batch,) in enumerate(data):
        if number in (1, 150):
            run.save()
        run.backward(model(batch).mean())
        if how != "uncounted":
            optimizer.step()
        said = capsys.readouterr().out
        if "WARNING" in said:
            told[number] = said
    ((number, said),) = told.items()
    # it is asked for at the second batch, before or after its own boundary
    assert number in (100, 101)
    assert REASONS[how] in said


def test_no_warning_if_there_are_boundaries(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained()
    data = run.loader(TensorDataset(torch.ones(120, 1)), batch_size=1)
    run.restore(model=model, data=data)
    for (batch,) in data:
        run.save()
        run.backward(model(batch).mean())
        run.update(optimizer)
    run.finish()
    assert "WARNING" not in capsys.readouterr().out


def test_requested_save_missing_at_exit_is_a_warning(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = trained()
    run.restore(model=model)
    run.save()
    run.close(waits=True)
    assert "WARNING: a requested checkpoint has not been written: call run.finish()" in capsys.readouterr().out


@pytest.mark.parametrize("progress", [np.int64(3), torch.tensor(3), True])
def test_progress_may_be_any_integer_type(progress: Any, run: Run) -> None:
    run.report(progress, loss=1.0)
    assert type(run.progress) is int
    assert run.progress == int(progress)


@pytest.mark.parametrize("progress", [3.0, "3", None, torch.tensor(3.0)])
def test_non_integer_progress_is_rejected(progress: Any, run: Run) -> None:
    with pytest.raises(UserError, match=r"run.report\(.*\): progress must be an integer, such as the epoch"):
        run.report(progress, loss=1.0)
