"""Sweeps whose trials are trained with several seeds, by real processes."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from mgpu_slurm.run_folder.layout import RunFolder
from tests.end_to_end.test_pausing_sweeps import ASHA, difference
from tests.end_to_end.test_sweeps import trials_of, wait
from tests.support import Project

JOB = """
    from dataclasses import dataclass

    import torch
    from torch import nn
    from torch.nn.functional import mse_loss
    from torch.utils.data import TensorDataset


    @dataclass
    class Config:
        lr: float = 0.05
        epochs: int = 9
        seed: int = 0


    def train(run, config: Config):
        run.seed(config.seed)
        points = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
        model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.25), nn.Linear(8, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
        data = run.loader(TensorDataset(points, points.sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
        loss_of = run.meter("loss")
        state = run.restore(model=model, optimizer=optimizer, data=data)
        for epoch in state.epochs(config.epochs):
            for x, y in data:
                loss = mse_loss(model(x), y)
                run.backward(loss)
                run.update(optimizer)
                loss_of.add(loss)
            run.report(epoch, loss=loss_of.mean())
        return run.last_metrics["loss"]
"""

SCRIPT = """
import argparse

import mgpu_slurm

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--seed", type=int)
given = parser.parse_args()
run = mgpu_slurm.attach()
state = run.restore()
for epoch in state.epochs(3):
    run.report(epoch, loss=given.lr * (1 + given.seed) / epoch)
run.finish()
"""


def start(project: Project, **values: Any) -> Path:
    base = {"study": "study", "metric": "loss", "direction": "minimize", "seeds": 2, "workers": 2,
            "sampler": {"name": "tpe", "seed": 1}, "space": {"lr": {"float": [1e-3, 0.02], "log": True}}}  # fmt: skip
    project.write("sweep.yaml", yaml.safe_dump(base | values))
    done = project.call("sweep", "sweep.yaml", "--executor", "local", "--no-follow")
    assert done.returncode == 0, done.stderr
    return project.runs / "study"


def reports(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["progress"]: line["metrics"]["loss"] for line in lines}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_rungs_have_the_means_of_the_seeds_and_each_seed_trains_as_alone(project: Project) -> None:
    project.write("job.py", JOB)
    folder = start(project, job="job.py", pruner=ASHA, trials=6)
    assert wait(project).returncode == 0
    trials = trials_of(folder)
    assert len(trials) == 6
    for trial in trials:
        seeds = [reports(folder / "trials" / str(trial.number) / "seeds" / str(seed)) for seed in (0, 1)]
        for progress, value in trial.intermediate_values.items():
            assert value == pytest.approx(fmean(each[progress] for each in seeds))
        assert seeds[0] != seeds[1]
    best = project.json("best", "study")
    complete = RunFolder(folder / "trials" / str(best["number"]))
    results = [json.loads((complete.of_seed(seed).result).read_text())["value"] for seed in (0, 1)]
    assert best["value"] == pytest.approx(fmean(results))
    assert "--seeds 2" in best["command"]
    # a run of its own, without pauses
    run, facts = project.run("job.py", "--config", str(complete.config), "seed=1")
    assert facts["state"] == "COMPLETED", facts
    assert difference(RunFolder(run), complete.of_seed(1)) < 1e-6


@pytest.mark.long
def test_script_is_trained_with_each_seed(project: Project) -> None:
    project.write("train.py", SCRIPT)
    command = {"command": "python train.py --lr {lr} --seed {seed}"}
    pruner = {"name": "hyperband", "min_resource": 1, "max_resource": 3}
    folder = start(project, job=command, pruner=pruner, trials=3, workers=1)
    assert wait(project).returncode == 0
    for trial in trials_of(folder):
        lr = trial.params["lr"]
        assert trial.intermediate_values[1] == pytest.approx(1.5 * lr)
        if trial.state.name == "COMPLETE":
            assert trial.value == pytest.approx(0.5 * lr)
    assert "COMPLETE" in {trial.state.name for trial in trials_of(folder)}
    told = project.json("best", "study")["command"]
    assert "--seeds 2 -- python train.py --lr " in told
    assert told.endswith("--seed '{seed}'")


def test_job_without_a_seed_is_refused(project: Project) -> None:
    project.write("job.py", JOB.replace("seed: int = 0", "sede: int = 0").replace("config.seed", "config.sede"))
    project.write("sweep.yaml", yaml.safe_dump({
        "study": "study", "job": "job.py", "metric": "loss", "direction": "minimize", "seeds": 2, "trials": 1,
        "space": {"lr": {"float": [0.1, 0.2]}},
    }))  # fmt: skip
    done = project.call("sweep", "sweep.yaml", "--executor", "local")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "seeds: the job's config has no `seed`: add `seed: int = 0` to it" in done.stderr
