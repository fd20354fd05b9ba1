"""Whole runs on a GPU, through the program."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support import REPOSITORY, Project, log

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
    folder = project.submit(*words, "train.py")
    assert project.finish(folder, patience=300)["state"] == "COMPLETED", log(folder, 0)
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

    def limit(run, gib):
        whole = torch.cuda.get_device_properties(run.device).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(gib * 2**30 / whole)

    def train(run, rows: int = 4096, gib: float = 0.0, steps: int = 6, short_from: int = 0):
        run.seed(0)
        model = run.wrap(nn.Sequential(*(Block(1024) for _ in range(12))), blocks=(Block,))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        features = torch.randn(rows * 2, 1024, generator=torch.Generator().manual_seed(1))
        data = run.loader(torch.utils.data.TensorDataset(features), batch_size=rows)
        for epoch in range(1, steps // 2 + 1):
            for (batch,) in data:
                if gib and run.rank == 1 and run.step == short_from:
                    limit(run, gib)
                run.gradients(lambda part: model(part).square().mean(), batch)
                run.update(optimizer)
            run.report(epoch, loss=0.0)
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()]
        norm = sum(each.detach().double().square().sum() for each in whole).sqrt().item()
        return {"allocated": allocated, "reserved": reserved, "norm": norm}
"""


KNOWN = """
    import torch
    from jobs import gpt
    from mgpu_slurm import import_torchvision
    from torch import nn
    from torch.nn.functional import cross_entropy


    def train(
        run,
        model: str = "resnet50",
        batch_size: int = 64,
        channels_last: bool = False,
        layers: int = 12,
        width: int = 768,
        recompute: bool = False,
    ):
        run.seed(0)
        if model == "resnet50":
            layout = torch.channels_last if channels_last else torch.contiguous_format
            net = run.wrap(import_torchvision().models.resnet50().to(memory_format=layout))
            inputs = torch.randn(batch_size, 3, 224, 224).to(memory_format=layout)
            targets = torch.randint(1000, (batch_size,))
        else:
            shape = gpt.Config(context=1024, layers=layers, heads=width // 64, width=width)
            net = run.wrap(gpt.GPT(shape), blocks=(gpt.Block,), recompute=recompute)
            inputs, targets = torch.randint(256, (2, batch_size, 1024))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
        for features, wanted in 3 * [*run.loader(torch.utils.data.TensorDataset(inputs, targets), batch_size)]:
            scores = net(features)
            loss = cross_entropy(scores, wanted) if model == "resnet50" else gpt.next_token_loss(scores, wanted)
            run.backward(loss)
            run.update(optimizer)
        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
"""

PLANNED = {
    "mlp": (MEMORY, ()),
    "mlp, bf16": (MEMORY, ("--precision", "bf16")),
    "resnet": (KNOWN, ()),
    "resnet, 256": (KNOWN, ("batch_size=256",)),
    "resnet, bf16": (KNOWN, ("--precision", "bf16")),
    "resnet, bf16, 256, channels_last": (KNOWN, ("--precision", "bf16", "batch_size=256", "channels_last=true")),
    "gpt": (KNOWN, ("model=gpt", "batch_size=8")),
    "gpt, bf16, recomputed": (KNOWN, ("--precision", "bf16", "model=gpt", "batch_size=16", "recompute=true")),
    # two ranks share the GPU
    "gpt, sharded": (KNOWN, ("--ntasks-per-node", "2", "--strategy", "fsdp", "model=gpt", "batch_size=8")),
    # 1.4 billion parameters
    "large gpt, bf16": (KNOWN, ("--precision", "bf16", "model=gpt", "batch_size=2", "layers=28", "width=2048")),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", PLANNED)
def test_planned_memory_is_what_the_gpu_holds(project: Project, case: str) -> None:
    job, options = PLANNED[case]
    project.write("train.py", job)
    shutil.copytree(REPOSITORY / "jobs", project.folder / "jobs", ignore=shutil.ignore_patterns("__pycache__"))
    # options come before the job, and its config after it
    config = [word for word in options if "=" in word]
    words = ("--gpus-per-node", "1", *(word for word in options if "=" not in word), "train.py", *config)
    planned = project.json("submit", "--executor", "local", "--dry-run", "--fit", *words)["memory"]["peak"]
    folder = project.submit(*words)
    assert project.finish(folder, patience=300)["state"] == "COMPLETED", log(folder, 0)
    found = json.loads((folder / "result.json").read_text())["result"]
    assert planned == pytest.approx(found["allocated"], rel=0.1)
    assert planned == pytest.approx(found["reserved"], rel=0.1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("strategy", "step"), [("ddp", 0), ("fsdp", 0), ("fsdp", 5)])
def test_gpu_that_is_full_on_one_rank_makes_all_ranks_split_their_batches(
    project: Project, strategy: str, step: int
) -> None:
    """Two ranks share a GPU, of which one may use only a small part, from a step on."""
    project.write("train.py", MEMORY)
    words = ("--gpus-per-node", "1", "--ntasks-per-node", "2", "--strategy", strategy)
    whole = run(project, *words)
    # parameters, gradients and optimizer state take 2 GiB, and the activations of 16,384 rows 8 GiB
    short = run(project, *words, "rows=32768", "gib=4", f"short_from={step}")
    assert (short / "memory.json").exists()
    assert not (whole / "memory.json").exists()
    unlimited = run(project, *words, "rows=32768")
    norms = [json.loads((folder / "result.json").read_text())["result"]["norm"] for folder in (short, unlimited)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_profile_shows_kernels(training: Project) -> None:
    folder = run(training, "--gpus-per-node", "1", "--profile", "3-5")
    recorded = training.json("profile", folder.name)
    (trace,) = recorded["ranks"]
    assert (trace["steps"], trace["on_gpu"]) == (3, True)
    assert 0 < trace["computes"] < 1
    assert Path(trace["file"]).stat().st_size < 10 << 20


def test_use_of_the_gpu_is_shown(project: Project) -> None:
    project.write("train.py", MEMORY)
    folder, facts = project.run("--gpus-per-node", "1", "train.py", "steps=400")
    assert facts["state"] == "COMPLETED", log(folder, 0)
    curves = facts["curves"]
    assert 0 < curves["gpu/utilization"] <= 1
    assert curves["gpu/power_watts"] > 0
    assert curves["gpu/memory_gib"] >= curves["memory/peak_allocated_gib"] > 0
    # not known of every GPU
    assert 0 < curves.get("speed/mfu", 0.5) < 1
