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


MEMORY = """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(self.norm(x))))

    def train(run, rows: int = 4096, gib: float = 0.0, steps: int = 6):
        if gib and run.rank == 1:
            whole = torch.cuda.get_device_properties(run.device).total_memory
            torch.cuda.set_per_process_memory_fraction(gib * 2**30 / whole)
        run.seed(0)
        model = run.wrap(nn.Sequential(*(Block(1024) for _ in range(12))), blocks=(Block,))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        features = torch.randn(rows * 2, 1024, generator=torch.Generator().manual_seed(1))
        data = run.loader(torch.utils.data.TensorDataset(features), batch_size=rows)
        state = run.restore(model=model, optimizer=optimizer, data=data)
        for epoch in state.epochs(steps // 2):
            for (batch,) in data:
                run.gradients(lambda part: model(part).square().mean(), batch)
                run.update(optimizer)
            run.report(epoch, loss=0.0)
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        norm = sum(each.detach().double().square().sum() for each in model.parameters()).sqrt().item()
        return {"allocated": allocated, "reserved": reserved, "norm": norm}
"""


@pytest.mark.parametrize("options", [(), ("--precision", "bf16")], ids=["fp32", "bf16"])
def test_planned_memory_is_what_the_gpu_holds(project: Project, options: tuple[str, ...]) -> None:
    project.write("train.py", MEMORY)
    words = ("train.py", "--gpus-per-node", "1", *options)
    planned = project.json("submit", "--executor", "local", "--dry-run", "--fit", *words)["memory"]["peak"]
    folder = run(project, *words[1:])
    found = json.loads((folder / "result.json").read_text())["result"]
    assert planned == pytest.approx(found["allocated"], rel=0.1)
    assert planned == pytest.approx(found["reserved"], rel=0.1)


def test_gpu_that_is_full_on_one_rank_makes_all_ranks_split_their_batches(project: Project) -> None:
    """Two ranks share a GPU, of which one may use only a small part."""
    project.write("train.py", MEMORY)
    words = ("--gpus-per-node", "1", "--ntasks-per-node", "2")
    whole = run(project, *words)
    # parameters, gradients and optimizer state take 2 GiB, and the activations of 16,384 rows 8 GiB
    short = run(project, *words, "rows=32768", "gib=4")
    assert (short / "memory.json").exists()
    assert not (whole / "memory.json").exists()
    unlimited = run(project, *words, "rows=32768")
    norms = [json.loads((folder / "result.json").read_text())["result"]["norm"] for folder in (short, unlimited)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
