"""From real runs to one curve: `aggregate`, as a person calls it."""

from __future__ import annotations

import csv
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import Project

JOB = """
    import os
    from dataclasses import dataclass
    from pathlib import Path

    import torch

    from mgpu_slurm import Run


    @dataclass
    class Config:
        lr: float = 0.1
        epochs: int = 4
        seed: int = 0
        fails_after: int = 0
        fails_for: int = -1


    def train(run: Run, config: Config):
        model = run.wrap(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
        first = int(os.environ["MGPU_ATTEMPT"]) == 1
        state = run.restore(model=model, optimizer=optimizer)
        for epoch in range(1, config.epochs + 1):
            run.backward(model(torch.ones(1, 1)).sum())
            run.update(optimizer)
            # what an attempt reports tells it from the others
            run.report(epoch, loss=config.lr * epoch + config.seed, first=float(first))
            if first and epoch == config.fails_after and config.seed == config.fails_for:
                raise RuntimeError("as asked")
"""


@pytest.fixture
def trained(project: Project) -> Project:
    project.write("train.py", JOB)
    return project


def test_group_is_averaged_and_repeated_steps_count_once(trained: Project) -> None:
    folder = trained.submit("--seeds", "3", "train.py", "fails_after=3", "fails_for=1")
    assert trained.call("wait", folder.name).returncode == 1
    facts = trained.json("aggregate")
    assert Path(facts["folder"]) == trained.folder / f"aggregate-{folder.name}"
    assert facts["files"] == ["curves.csv", "curves.parquet", "tensorboard/"]
    assert facts["notes"] == [f"loss, first: 1 of 3 runs end before step 4: {folder.name}/1 (FAILED) at 3"]
    (group,) = facts["groups"]
    assert [run["state"] for run in group["runs"]] == ["COMPLETED", "FAILED", "COMPLETED"]
    loss = group["metrics"]["loss"]
    assert (loss["step"], loss["count"]) == (3, 3)
    assert loss["final"]["max"] == pytest.approx(0.1 * 4 + 2)
    assert (loss["best"]["direction"], loss["best"]["min"]) == ("minimize", pytest.approx(0.1))
    # it starts again from its first step, and says all of that again
    assert trained.call("resume", folder.name, "--no-follow").returncode == 0
    assert trained.call("wait", folder.name).returncode == 0
    assert trained.json("aggregate", folder.name, "--on", "progress")["notes"] == []
    text = (trained.folder / f"aggregate-{folder.name}" / "curves.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    rows_of_loss = [row for row in rows if row["metric"] == "loss"]
    assert [(int(row["progress"]), int(row["count"])) for row in rows_of_loss] == [(epoch, 3) for epoch in range(1, 5)]
    for epoch, row in enumerate(rows_of_loss, start=1):
        values = [0.1 * epoch + seed for seed in range(3)]
        assert float(row["mean"]) == pytest.approx(statistics.fmean(values))
        assert float(row["std"]) == pytest.approx(statistics.stdev(values))
    # of the run that was resumed only the second attempt is left
    assert [float(row["mean"]) for row in rows if row["metric"] == "first"] == pytest.approx([2 / 3] * 4)


@pytest.mark.long
def test_groups_are_distinguished_by_config_and_listed_in_a_table(trained: Project) -> None:
    for lr in ("0.1", "0.5"):
        folder = trained.submit("--seeds", "2", "train.py", f"lr={lr}")
        assert trained.call("wait", folder.name).returncode == 0
    done = trained.call("aggregate", "runs", "--out", "both")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split()[:4] for line in lines[1:7]] == [
        [f"lr={lr}", *words]
        for lr in ("0.1", "0.5")
        for words in (["loss", "step", "4"], ["loss", "lowest", "of"], ["first", "step", "4"])
    ]
    assert lines[-2:] == [
        "written   both/: curves.csv curves.parquet tensorboard/",
        f"curves    {sys.executable} -m mgpu_slurm tensorboard both",
    ]
    assert len(trained.json("aggregate", "runs", "--by", "epochs")["groups"]) == 1
    # a folder of results is none of runs
    assert (
        trained.json("aggregate", ".", "--out", "all")["groups"]
        == json.loads((trained.folder / "both" / "aggregate.json").read_text())["groups"]
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    return done.stderr


def test_invalid_aggregate_calls_are_refused_with_one_line(project: Project) -> None:
    assert "no group found: name runs" in refused(project.call("aggregate"))
    assert "there is no run 'nothing'" in refused(project.call("aggregate", "nothing"))
    assert "has neither a run nor event files" in refused(project.call("aggregate", "."))
    project.write("mine/notes.txt", "")
    assert "exists and was not written by" in refused(project.call("aggregate", "--out", "mine"))
    assert "--by: expected names of config values" in refused(project.call("aggregate", "--by", ","))
    folder, _ = project.run("--", "true")
    assert f"no metrics yet of {folder.name}: see" in refused(project.call("aggregate", folder.name))
