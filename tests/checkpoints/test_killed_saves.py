"""A rank that is killed in any phase of a save costs nothing: what goes on ends as if it had not been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mgpu_slurm.checkpoints import folder as checkpoints
from mgpu_slurm.run_folder.checkpoint_names import complete_checkpoints
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.training.run import Run
from tests.dying import OF_RANK_0, PHASES, die_in
from tests.ranks import KILLED, run_ranks


def trains(run: Run, phase: str | None, killed: int) -> list[list[float]]:
    """Saves at every third step; from the third save on, a rank dies in the phase."""
    run.seed(1)
    net = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.2), nn.Linear(32, 1))
    model = run.wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    features = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    data = run.loader(TensorDataset(features), batch_size=8, shuffle=True)
    state = run.restore(model=model, optimizer=optimizer, data=data)
    run.checkpoints(every_steps=3, best="loss", direction="minimize")
    for epoch in state.epochs(4):
        for (batch,) in data:
            loss = model(batch).square().mean()
            run.backward(loss)
            run.update(optimizer)
            if phase is not None and run.step == 8 and run.rank == killed:
                die_in(phase)
        run.report(epoch, loss=run.mean(loss.detach(), 1))
    return [parameter.tolist() for parameter in net.parameters()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(trains, 2, None, 0, folder=tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    ("phase", "killed"), [(phase, rank) for phase in PHASES for rank in (0, 1) if rank == 0 or phase not in OF_RANK_0]
)
def test_resume_after_a_killed_save_gives_equal_weights(
    phase: str, killed: int, undisturbed: Any, tmp_path: Path
) -> None:
    answers = run_ranks(trains, 2, phase, killed, folder=tmp_path, may_fail=True)
    assert answers[killed] == KILLED
    assert answers[1 - killed] != undisturbed[0]
    assert run_ranks(trains, 2, None, 0, folder=tmp_path) == undisturbed
    run = RunFolder(tmp_path)
    for path in complete_checkpoints(run):
        assert checkpoints.problem(path, [0, 1]) is None
    assert not list(run.checkpoints.glob(".*"))
    assert (run.checkpoints / "best").resolve() in complete_checkpoints(run)
