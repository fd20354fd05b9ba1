"""Memory that runs out where no step can be repeated: the next attempt computes fewer samples at once.

The error is raised as torch would, as there is no GPU that could run out of it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core.files import read_jsonl
from tests.support import Project, log

TRAIN = """
    import torch
    from mgpu_slurm import attach
    from mgpu_slurm.training.memory import agreement
    from torch import nn
    from torch.utils.data import TensorDataset

    PLAN = {"0": "column", "2": "row"}

    class Limited(nn.Module):
        # fails on the last rank with more samples than fit
        def __init__(self, run, most):
            super().__init__()
            self.most = most if run.rank == run.world_size - 1 else 1000

        def forward(self, x):
            if len(x) > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return x

    def loss_of(outputs, targets):
        return (outputs - targets).square().mean()

    def train(run, most: int = 100, how: str = "gradients", parts: int = 1):
        run.seed(0)
        torch.manual_seed(0)
        if how == "quiet":
            agreement.SETTLED_AFTER, agreement.LARGEST_COST = 1, 0.0
        layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), Limited(run, 1000), nn.Linear(4, 1)]
        if how == "pipeline":
            model = run.pipeline(layers, loss_of, micro_batches=2 * parts)
        else:
            model = run.wrap(nn.Sequential(*layers), plan=PLAN)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        features = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
        dataset = TensorDataset(features, features.sum(1, keepdim=True))
        data = run.loader(dataset, batch_size=16, shuffle=True, drop_last=True)
        run.checkpoints(every_steps=1)
        state = run.restore(model=model, optimizer=optimizer, data=data)
        limited = Limited(run, most)
        for epoch in state.epochs(2):
            for inputs, targets in data:
                # the first steps fit
                layers[3].most = 1000 if run.step < (2 if how == "quiet" else 1) else limited.most
                if how == "accumulate":
                    for x, y in run.accumulate((inputs, targets), parts):
                        run.backward(loss_of(model(x), y))
                elif how == "pipeline":
                    model.gradients(inputs, targets)
                elif how == "backward":
                    run.backward(loss_of(model(inputs), targets))
                else:
                    run.gradients(lambda x, y: loss_of(model(x), y), inputs, targets)
                run.update(optimizer)
            run.report(epoch, loss=0.0)
        whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()]
        return {str(at): each.double().square().sum().item() for at, each in enumerate(whole)}

    if __name__ == "__main__":
        train(attach(), most=2, how="accumulate", parts=2)
"""


@pytest.fixture
def training(project: Project) -> Project:
    project.write("train.py", TRAIN)
    return project


def result(folder: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((folder / "result.json").read_text())["result"]
    return found


def retries(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_jsonl(folder / "attempts.jsonl") if line["event"] == "retried"]


@pytest.mark.parametrize(
    ("words", "whole", "halved"),
    [
        # 16 samples in the first attempt, the next of which begins at its checkpoint
        pytest.param(["--tensor", "2"], ["how=gradients", "most=4"], [8, 4], marks=pytest.mark.long),
        # 8 samples of each rank, in two parts
        pytest.param([], ["how=accumulate", "parts=2", "most=2"], [2], marks=pytest.mark.long),
        (["--pipeline", "2"], ["how=pipeline", "most=4"], [4]),
        # 8 samples of each rank, after the ranks have stopped telling each other
        pytest.param([], ["how=quiet", "most=4"], [4], marks=pytest.mark.long),
    ],
    ids=["tensor", "accumulate", "pipeline", "quiet"],
)
def test_attempt_that_ran_out_of_memory_is_repeated_in_smaller_parts(
    training: Project, words: list[str], whole: list[str], halved: list[int]
) -> None:
    folder, facts = training.run("train.py", "--nodes", "2", *words, *whole)
    assert facts["state"] == "COMPLETED", log(folder, 0)
    assert facts["attempts"] == len(halved) + 1
    at_once = [line["why"].rpartition("; ")[2] for line in retries(folder)]
    assert at_once == [f"next with {number} samples at once" for number in halved]
    # not one step that was saved is lost
    assert {line["checkpoint"] for line in retries(folder)} == {2 if "how=quiet" in whole else 1}
    shown = training.call("status", folder.name).stdout
    assert re.search(rf"^memory    {halved[-1]} samples at once fit \(cpu, ddp, .*fp32\)$", shown, re.MULTILINE)
    # the same batches
    other, facts = training.run("train.py", "--nodes", "2", *words, whole[0], *whole[1:-1])
    assert facts["attempts"] == 1
    assert result(folder) == pytest.approx(result(other), rel=1e-5)


@pytest.mark.long
def test_attached_script_begins_with_the_size_that_fits(training: Project) -> None:
    folder, facts = training.run("--nodes", "2", "--", "python", "train.py")
    assert facts["state"] == "COMPLETED", log(folder, 0)
    assert facts["attempts"] == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["how=backward", "most=2"], "compute the batch by `run.gradients`"),
        (["how=accumulate", "most=0", "--retries", "0"], "compute the batch by `run.gradients`"),
        (["how=accumulate", "parts=8", "most=0"], "compute the batch by `run.gradients`"),
    ],
    ids=["nothing to split", "no retries", "one sample"],
)
def test_attempt_that_could_not_do_better_is_not_repeated(training: Project, words: list[str], why: str) -> None:
    folder, facts = training.run("train.py", "--nodes", "2", *words)
    assert (facts["state"], facts["attempts"]) == ("FAILED", 1)
    assert why in training.call("why", folder.name).stdout
    if "parts=8" in words:
        assert "out of memory with a single sample: use --strategy fsdp" in log(folder, 1)
    assert "out of memory: parameters 3" in log(folder, 1)
