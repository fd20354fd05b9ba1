"""Models divided over the devices of a rank, and over ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jobs import resnet_split
from mgpu_slurm import import_torchvision
from tests.support import Project, log


@pytest.fixture
def user(project: Project) -> Project:
    """A project with the jobs in it."""
    jobs = Path(resnet_split.__file__).parent
    shutil.copytree(jobs, project.folder / "jobs", ignore=shutil.ignore_patterns("__pycache__"))
    # with another number of threads, sums differ in the last bits, and batch norm of few images amplifies that
    project.environ["OMP_NUM_THREADS"] = "1"
    return project


def run(user: Project, *words: str) -> float:
    small = ("images=16", "batch_size=8", "epochs=1")
    folder, facts = user.run("jobs.resnet_split", *words, *small)
    assert facts["state"] == "COMPLETED", log(folder, 0)
    return float(json.loads((folder / "result.json").read_text())["result"]["loss"])


@pytest.mark.parametrize("name", ["resnet50", "alexnet"])
def test_divided_model_equals_that_of_torchvision(name: Any) -> None:
    config = resnet_split.Config(model=name)
    torch.manual_seed(0)
    whole = import_torchvision().models.get_model(name, weights=None, num_classes=10)
    torch.manual_seed(0)
    divided = resnet_split.OverDevices(resnet_split.make_layers(config), [torch.device("cpu")] * 2)
    assert len(divided.parts) == 2
    images = torch.randn(2, 3, 64, 64)
    # the same random numbers for dropout
    torch.manual_seed(1)
    expected = whole(images)
    torch.manual_seed(1)
    assert torch.equal(divided(images), expected)
    sizes = [sum(each.numel() for each in part.parameters()) for part in divided.parts]
    assert max(sizes) < 0.8 * sum(sizes)
    assert isinstance(divided, nn.Module)


@pytest.mark.long
def test_resnet_trains_on_the_devices_of_one_rank_and_of_two(user: Project) -> None:
    assert run(user, "--strategy", "single") > 0
    assert run(user, "--nodes", "2", "model=alexnet") > 0


@pytest.mark.long
def test_pipeline_trains_like_one_stage(user: Project) -> None:
    # with the same micro-batches, as batch norm computes the statistics of each
    words = ("mode=pipeline", "split_size=4")
    alone = run(user, *words)
    assert run(user, "--nodes", "2", "--pipeline", "2", *words) == pytest.approx(alone, rel=1e-3)


def test_pipeline_needs_its_mode(user: Project) -> None:
    folder, facts = user.run("jobs.resnet_split", "--nodes", "2", "--pipeline", "2", "images=16", "--retries", "0")
    assert facts["state"] == "FAILED"
    assert "UserError: mode=devices divides the model over the GPUs of one rank: use mode=pipeline with" in log(
        folder, 0
    )


def test_split_size_must_divide_the_batch(user: Project) -> None:
    folder, facts = user.run("jobs.resnet_split", "mode=pipeline", "split_size=3", "images=16")
    assert facts["state"] == "FAILED"
    assert "UserError: split_size=3 does not divide a rank's batch of 16 images" in log(folder, 0)
