"""Sweeps whose trials pause at rungs and continue elsewhere: their weights are those of trainings without pauses."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mgpu_slurm.checkpoints import folder as checkpoints
from mgpu_slurm.checkpoints.reader import StoredTensors
from mgpu_slurm.run_folder.checkpoint_names import newest_checkpoint
from mgpu_slurm.run_folder.layout import RunFolder
from tests.end_to_end.test_sweeps import facts_of, trials_of, wait
from tests.support import Project, processes_of, wait_until

# dropout, shuffling and momentum: all that a checkpoint has to bring back
JOB = """
    import time
    from dataclasses import dataclass

    import torch
    from torch import nn
    from torch.nn.functional import mse_loss
    from torch.utils.data import TensorDataset


    @dataclass
    class Config:
        lr: float = 0.05
        epochs: int = 9
        saves: bool = True
        pause: float = 0.0
        dropout: float = 0.25


    def train(run, config: Config):
        run.seed(7)
        points = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
        model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Dropout(config.dropout), nn.Linear(8, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
        data = run.loader(TensorDataset(points, points.sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
        loss_of = run.meter("loss")
        state = run.restore(model=model, optimizer=optimizer, data=data) if config.saves else None
        for epoch in state.epochs(config.epochs) if state else range(1, config.epochs + 1):
            for x, y in data:
                loss = mse_loss(model(x), y)
                run.backward(loss)
                run.update(optimizer)
                loss_of.add(loss)
            time.sleep(config.pause)
            run.report(epoch, loss=loss_of.mean())
        return run.last_metrics["loss"]
"""

Tensors = dict[str, torch.Tensor]

ASHA = {"name": "asha", "min_resource": 1, "max_resource": 9, "reduction_factor": 3}


def start(project: Project, **values: Any) -> Path:
    project.write("job.py", JOB)
    base = {"study": "study", "job": "job.py", "metric": "loss", "direction": "minimize", "pruner": ASHA,
            "sampler": {"name": "tpe", "seed": 1}, "space": {"lr": {"float": [1e-3, 0.1], "log": True}}}  # fmt: skip
    project.write("sweep.yaml", yaml.safe_dump(base | values))
    done = project.call("sweep", "sweep.yaml", "--executor", "local", "--no-follow")
    assert done.returncode == 0, done.stderr
    return project.runs / "study"


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    """Return the tensors of a run's newest checkpoint: of the model and the optimizer."""
    newest = newest_checkpoint(run)
    assert newest is not None
    stored = StoredTensors(checkpoints.tensor_files(newest), like={})
    return {name: stored[name] for name in stored}


def of_model(tensors: Tensors) -> Tensors:
    return {name: each for name, each in tensors.items() if name.startswith("model.")}


def difference(run: RunFolder, other: RunFolder, choose: Callable[[Tensors], Tensors] = dict) -> float:
    found, expected = (choose(weights(each)) for each in (run, other))
    assert found.keys() == expected.keys()
    return max(float((found[name].double() - each.double()).abs().max()) for name, each in expected.items())


def complete(folder: Path) -> list[int]:
    return [trial.number for trial in trials_of(folder) if trial.state.name == "COMPLETE"]


def attempts(folder: Path, number: int) -> int:
    events = (folder / "trials" / str(number) / "attempts.jsonl").read_text().splitlines()
    return sum(json.loads(line)["event"] == "started" for line in events)


def undisturbed(project: Project, folder: Path, number: int, *options: str) -> RunFolder:
    """Train the configuration of a trial in one go, and return the folder of that run."""
    config = folder / "trials" / str(number) / "config.yaml"
    run, facts = project.run("job.py", *options, "--config", str(config))
    assert facts["state"] == "COMPLETED", facts
    return RunFolder(run)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_weights_with_pauses_are_those_without_on_two_ranks(project: Project) -> None:
    folder = start(project, trials=9, resources={"nodes": 2})
    assert wait(project).returncode == 0
    number, *_ = paused = [number for number in complete(folder) if attempts(folder, number) > 1]
    assert paused, "no trial has paused"
    once = undisturbed(project, folder, number, "--nodes", "2")
    assert difference(RunFolder(folder).of_trial(number), once) == 0.0
    told = json.loads((once.path / "result.json").read_text())["result"]
    assert trials_of(folder)[number].value == told["value"]


def paused_now(project: Project) -> int:
    return int(facts_of(project)["trials"]["PAUSED"])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_paused_trial_continues_on_another_number_of_ranks(project: Project) -> None:
    folder = start(project, trials=9, resources={"nodes": 2}, fixed={"pause": 0.1, "dropout": 0.0})
    wait_until(lambda: paused_now(project) >= 2)
    project.call("cancel", "study")
    wait(project)
    done = project.call("sweep", "sweep.yaml", "resources.nodes=1", "--no-follow")
    assert done.returncode == 0, done.stderr
    assert wait(project).returncode == 0
    trials = {number: folder / "trials" / str(number) for number in complete(folder)}
    # they have a log of the second rank from their first attempt only
    moved = [
        number for number, path in trials.items() if (path / "logs/1-1.log").exists() and attempts(folder, number) > 1
    ]
    assert moved, [trial.state.name for trial in trials_of(folder)]
    once = undisturbed(project, folder, moved[0], "--nodes", "1")
    assert difference(RunFolder(folder).of_trial(moved[0]), once, of_model) <= 1e-6


def test_job_that_cannot_continue_fails_with_the_first_trial(project: Project) -> None:
    folder = start(project, trials=3, fixed={"saves": False})
    assert wait(project).returncode == 1
    failed = json.loads((folder / "trials/0/failure.json").read_text())
    assert failed["message"] == (
        "SweepError: the job does not call run.restore, so that a paused trial could not continue: call it, or start a"
        " study with a pruner that needs no checkpoints (none; without `seeds` also asha with `pause: false`)"
    )
    (facts,) = project.json("status", "study")
    assert facts["state"] == "FAILED"
    # the other worker may have begun one
    assert len(list(folder.glob("trials/*"))) <= 2


def pauses(folder: Path) -> int:
    """Return how often a trial has paused so far."""
    return sum(path.read_text().count('"paused at') for path in folder.glob("trials/*/attempts.jsonl"))


def has_paused_more(folder: Path, before: int) -> bool:
    return pauses(folder) > before


def is_gone(task: Path) -> bool:
    return processes_of(task) == []


@pytest.mark.long
@pytest.mark.timeout(300)
def test_pausing_sweep_survives_killed_workers(project: Project) -> None:
    folder = start(project, trials=9, workers=2, max_retries=9, fixed={"pause": 0.2})
    for _ in range(3):
        wait_until(partial(has_paused_more, folder, pauses(folder)))
        for task in (folder / "tasks").iterdir():
            supervisor = json.loads((task / "state.json").read_text())["supervisor"][0]
            for pid in (supervisor, *processes_of(task)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_until(partial(is_gone, task))
        done = project.call("resume", "study", "--no-follow")
        assert done.returncode == 0, done.stderr
    assert wait(project).returncode == 0
    found = [trial.state.name for trial in trials_of(folder)]
    assert len(found) == 9
    assert "COMPLETE" in found
    assert not {"RUNNING", "FAIL"} & set(found)
    for trial in trials_of(folder):
        # each epoch was reported once, up to a rung
        steps = sorted(trial.intermediate_values)
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) in (1, 3, 9)


SCRIPT = """
    import argparse

    import torch

    import mgpu_slurm

    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    lr = parser.parse_args().lr
    run = mgpu_slurm.attach()
    model = run.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    state = run.restore(model=model, optimizer=optimizer)
    for epoch in state.epochs(9):
        run.backward(model(torch.ones(4, 1)).mean())
        run.update(optimizer)
        run.report(epoch, loss=lr / epoch)
    run.finish()
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_script_that_attaches_pauses_and_continues(project: Project) -> None:
    project.write("script.py", SCRIPT)
    command = {"command": "python script.py --lr {lr}"}
    folder = start(project, trials=3, job=command, resources={"nodes": 2})
    assert wait(project).returncode == 0
    (number, *_) = complete(folder)
    assert attempts(folder, number) > 1
    trial = trials_of(folder)[number]
    assert sorted(trial.intermediate_values) == list(range(1, 10))
    assert trial.value == pytest.approx(trial.params["lr"] / 9)
