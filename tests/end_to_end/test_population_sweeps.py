"""Population based training on the local executor: copies continue from others' checkpoints with their own values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.study.snapshots import copy_of
from tests.end_to_end.test_sweeps import trials_of, wait
from tests.support import Project

JOB = """
    import json
    from dataclasses import dataclass

    import torch
    from torch import nn


    @dataclass
    class Config:
        lr: float = 0.05
        width: int = 2
        epochs: int = 6


    def train(run, config: Config):
        run.seed(1)
        model = run.wrap(nn.Sequential(nn.Linear(4, config.width), nn.Linear(config.width, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        state = run.restore(model=model, optimizer=optimizer, scheduler=scheduler)
        first = float(next(model.parameters()).detach().sum())
        with open(run.folder / "saw.jsonl", "a") as file:
            rate = optimizer.param_groups[0]["lr"]
            file.write(json.dumps({"progress": state.progress, "lr": rate, "first": first}) + "\\n")
        for epoch in state.epochs(config.epochs):
            loss = (model(torch.ones(8, 4)) - 1).square().mean()
            run.backward(loss)
            run.update(optimizer)
            scheduler.step()
            run.report(epoch, loss=float(loss.detach()))
        return run.last_metrics["loss"]
"""

PBT = {"name": "pbt", "population": 8, "interval": 2, "max_resource": 6, "perturb": ["lr"]}


def swept(project: Project, **values: Any) -> Path:
    project.write("job.py", JOB)
    base = {"study": "study", "job": "job.py", "metric": "loss", "direction": "minimize", "pruner": PBT, "workers": 2,
            "sampler": {"name": "random", "seed": 3}, "space": {"lr": {"float": [1e-4, 0.2], "log": True}}}  # fmt: skip
    project.write("sweep.yaml", yaml.safe_dump(base | values))
    done = project.call("sweep", "sweep.yaml", "--executor", "local", "--no-follow")
    assert done.returncode == 0, done.stderr
    wait(project)
    return project.runs / "study"


def saw(folder: Path, number: int) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / f"trials/{number}/saw.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_copies_continue_from_a_checkpoint_with_their_own_rate(project: Project) -> None:
    folder = swept(project)
    trials = trials_of(folder)
    assert [trial.state.name for trial in trials].count("COMPLETE") == 8
    copies = {trial.number: found for trial in trials if (found := copy_of(trial)) is not None}
    assert copies, "no trial was replaced"
    for number, found in copies.items():
        began = saw(folder, number)[0]
        assert began["progress"] >= 2
        # scheduled as for the source, from the rate of its own
        assert began["lr"] == pytest.approx(trials[number].params["lr"] * 0.5 ** began["progress"])
        assert trials[number].params["lr"] != trials[found.source].params["lr"]
        assert trials[found.trial].state.name == "PRUNED"
        # its weights are not those of a new model
        assert began["first"] != saw(folder, found.trial)[0]["first"]
    (facts,) = project.json("status", "study")
    assert (facts["state"], facts["trials"]["PRUNED"]) == ("COMPLETED", len(copies))
    assert not list(RunFolder(folder).copies.glob("*"))


@pytest.mark.long
def test_parameter_that_changes_shapes_is_named(project: Project) -> None:
    space = {"lr": {"float": [1e-4, 0.2], "log": True}, "width": {"int": [2, 64]}}
    folder = swept(project, pruner=PBT | {"perturb": ["lr", "width"]}, space=space)
    said = "SweepError: this trial is a copy of another one, whose checkpoint does not fit: remove"
    failed = [json.loads(path.read_text())["message"] for path in folder.glob("trials/*/failure.json")]
    # each worker may have begun one
    assert len(failed) in (1, 2)
    assert all(message.startswith(said) for message in failed)
    (facts,) = project.json("status", "study")
    assert facts["state"] == "FAILED"
    assert said in facts["reason"]
