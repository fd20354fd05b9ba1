"""Whole runs on a GPU, through the program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import Project, log

pytestmark = pytest.mark.gpu

TRAINING = """
    import os
    from pathlib import Path

    import torch
    from torch.utils.data import TensorDataset

    def train(run, config):
        run.seed(0)
        model = run.wrap(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        features = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        data = run.loader(TensorDataset(features), batch_size=16, shuffle=True)
        state = run.restore(model=model, optimizer=optimizer, data=data)
        for epoch in state.epochs(4):
            if epoch == 2 and Path("fail").exists():
                raise RuntimeError("as requested")
            for (batch,) in data:
                run.backward(model(batch).square().mean())
                run.update(optimizer)
            run.report(epoch + 1, loss=0.0)
            run.save()
        print("device", next(model.parameters()).device.type)
        return {f"weight{i}": value for i, value in enumerate(list(model.parameters())[-2][0][:4].tolist())}
"""


def weights(folder: Path) -> list[float]:
    return list(json.loads((folder / "result.json").read_text())["result"].values())


@pytest.fixture
def training(project: Project) -> Project:
    project.write("train.py", TRAINING)
    return project


def run(project: Project, *words: str) -> Path:
    folder, facts = project.run(*words, "train.py")
    assert facts["state"] == "COMPLETED", log(folder, 0)
    return folder


def test_ranks_that_share_a_gpu_train_as_one_rank_does(training: Project) -> None:
    alone = run(training, "--gpus-per-node", "1")
    shared = run(training, "--gpus-per-node", "1", "--ntasks-per-node", "2")
    assert "device cuda" in log(alone, 0)
    assert "device cuda" in log(shared, 1)
    assert "warning: ranks 0-1 compute on the same GPU, " in log(shared, 1)
    assert weights(shared) == pytest.approx(weights(alone), abs=1e-5)


def test_checkpoint_of_a_gpu_resumes_on_a_cpu(training: Project) -> None:
    whole = run(training, "--gpus-per-node", "1")
    training.write("fail", "")
    folder, facts = training.run("--gpus-per-node", "1", "--retries", "0", "train.py")
    assert facts["state"] == "FAILED"
    (training.folder / "fail").unlink()
    done = training.call("resume", folder.name, "--no-follow", "--gpus-per-node", "0", "--code", "new")
    assert done.returncode == 0, done.stderr
    assert training.finish(folder)["state"] == "COMPLETED"
    assert "device cpu" in log(folder, 0, attempt=2)
    assert weights(folder) == pytest.approx(weights(whole), abs=1e-5)
