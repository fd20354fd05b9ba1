"""`submit --dry-run --fit`: the memory that a job would take, and what would take less."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mgpu_slurm.core.files import read_json, write_json
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder.layout import RunFolder
from tests.support import Project

TRAIN = """
    import os

    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))

    def train(run, lr: float = 0.1, parts: bool = False, batch: int = 128):
        model = run.wrap(nn.Sequential(nn.Linear(256, 256), *(Block() for _ in range(8))), blocks=(Block,))
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        data = run.loader(torch.utils.data.TensorDataset(torch.randn(2 * batch, 256)), batch_size=batch)
        state = run.restore(model=model, optimizer=optimizer, data=data)
        for epoch in state.epochs(2):
            for (inputs,) in data:
                if parts:
                    run.gradients(lambda part: model(part).square().mean(), inputs)
                else:
                    run.backward(model(inputs).square().mean())
                run.update(optimizer)

    def abort(run, lr: float = 0.1):
        run.wrap(nn.Linear(8, 1))
        print("cannot continue", flush=True)
        os.abort()

    def fail(run, lr: float = 0.1):
        raise ValueError("no such data\\nor else")

    def select(run, lr: float = 0.1):
        outputs = run.wrap(nn.Linear(8, 1))(torch.randn(4, 8))
        outputs[outputs > 0].mean().backward()
"""


@pytest.fixture
def training(project: Project) -> Project:
    project.write("train.py", TRAIN)
    return project


def clusters(project: Project, memory: str) -> None:
    project.write("mgpu.yaml", f"clusters: {{local: {{gpu-memory: {memory}}}}}\n")


def fit(project: Project, *words: str) -> Any:
    return project.json("submit", "train.py", "--executor", "local", "--dry-run", "--fit", *words)["memory"]


def test_memory_is_shown_with_the_layers_and_nothing_is_left(training: Project) -> None:
    clusters(training, "1GiB")
    done = training.call("submit", "train.py", "--executor", "local", "--dry-run", "--fit", "--nodes", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.partition("nothing was started (--dry-run)\n\n")[2].splitlines()
    assert lines[0].startswith("memory    81.")
    assert lines[0].endswith("MiB per GPU (optimizer step, with 64 samples)")
    assert lines[1].strip().startswith("parameters 16.3 MiB, gradients 16.3 MiB, optimizer 4")
    assert lines[2:4] == ["gpu       1.0 GiB (gpu-memory in mgpu.yaml): fits", ""]
    assert [line.split() for line in lines[4:]] == [
        ["layer", "class", "output", "parameters", "memory"],
        ["0", "Linear", "64", "x", "256", "65,792", "64.0", "KiB"],
        ["1", "to", "8", "Block", "64", "x", "256", "4,204,544", "2.5", "MiB"],
    ]
    assert not training.runs.exists() or not list(training.runs.iterdir())


def test_memory_is_planned_as_if_nothing_were_compiled(training: Project) -> None:
    done = training.call("submit", "train.py", "--executor", "local", "--dry-run", "--fit", "--compile")
    assert done.returncode == 0, done.stderr
    assert "strategy  ddp  compile" in done.stdout
    assert "\n          as without --compile, with which activations usually take less\n" in done.stdout


@pytest.mark.long
def test_changes_are_tried_until_one_fits(training: Project) -> None:
    clusters(training, "70MB")
    facts = fit(training, "--nodes", "4")
    assert facts["fits"] is False
    (tried,) = facts["tried"]
    assert tried["change"] == "--strategy fsdp"
    assert tried["peak"] < facts["peak"] / 2


def test_job_that_splits_its_batches_is_told_the_size_that_fits(training: Project) -> None:
    clusters(training, "170MB")
    facts = fit(training, "parts=true", "batch=4096")
    assert facts["peak"] > 250e6
    (tried,) = facts["tried"]
    assert tried["change"] == "1024 samples at once, by run.gradients"
    assert tried["peak"] < 150e6


@pytest.mark.long
def test_memory_of_gpus_is_that_of_the_newest_run_there(training: Project) -> None:
    facts = fit(training)
    assert (facts["gpu_memory"], facts["fits"]) == (None, None)
    folders = []
    # the newest is one of another partition, and the oldest had another GPU
    for gpu, memory in (("A100", 40 << 30), ("H100", 80 << 30), ("L4", 24 << 30)):
        folder, _ = training.run("--", "true")
        write_json(folder / "state.json", read_json(folder / "state.json") | {"gpu": gpu, "gpu_memory": memory})
        folders.append(folder)
    other = RunFolder(folders[-1])
    spec = read_spec(other)
    replace(spec, resources=replace(spec.resources, partition="other")).write(other)
    done = training.call("submit", "train.py", "--executor", "local", "--dry-run", "--fit")
    assert f"gpu       80.0 GiB (H100 in run {folders[1].name}): fits" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.py:abort"], "--fit: the process that ran the job ended with SIGABRT: cannot continue"),
        (["train.py:fail"], "--fit: train.py:{fail}: ValueError: no such data"),
        (
            ["train.py:select"],
            "--fit: train.py:{select}: an operation depends on the values of a tensor, which --fit does not compute",
        ),
        (["--", "true"], "--fit needs a job function: a command runs code that is not known"),
        (["train.py", "--strategy", "dp"], "--fit does not support --strategy dp, which uses the first GPU most"),
        (["train.py", "--precision", "fp8"], "--fit does not support --precision fp8: use bf16, which takes more"),
    ],
)
def test_job_that_cannot_be_planned_is_an_error_of_one_line(training: Project, words: list[str], message: str) -> None:
    lines = (training.folder / "train.py").read_text().splitlines()
    places = {
        "fail": next(number for number, line in enumerate(lines, 1) if "no such data" in line),
        "select": next(number for number, line in enumerate(lines, 1) if "outputs[" in line),
    }
    done = training.call("submit", "--executor", "local", "--dry-run", "--fit", *words)
    assert done.returncode == 2
    *progress, error = done.stderr.splitlines()
    assert error.startswith(f"mgpu-slurm: {message.format(**places)}")
    assert progress in ([], ["mgpu-slurm: --fit: running the job on tensors without values"])


def test_fit_needs_a_dry_run(training: Project) -> None:
    done = training.call("submit", "train.py", "--fit")
    assert (done.returncode, done.stderr) == (2, "mgpu-slurm: --fit only works with --dry-run\n")


def test_size_of_gpu_memory_in_the_cluster_file_is_checked(training: Project) -> None:
    clusters(training, "lots")
    done = training.call("submit", "train.py", "--executor", "local", "--dry-run")
    assert done.returncode == 2
    assert "gpu-memory: size 'lots': expected a number" in done.stderr
