"""Runs, groups and sweeps in a real MLflow and in W&B offline, as a user starts them."""

from __future__ import annotations

import csv
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from mgpu_slurm.core.processes import SINK_VARIABLE, with_variable
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.trackers.outcome import read_sent
from mgpu_slurm.trackers.settled import Reports
from tests.support import Project, wait_until
from tests.trackers.reading import points

JOB = '''
    """Reports its loss of each epoch; the first attempt dies between the report and the checkpoint of the fourth."""
    import os
    import time
    from pathlib import Path

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset


    def train(run, epochs: int = 6, lr: float = 0.25, dies_after: str = ""):
        run.seed(1)
        model = run.wrap(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        data = run.loader(TensorDataset(torch.ones(8, 4)), batch_size=4)
        state = run.restore(model=model, optimizer=optimizer, data=data)
        for epoch in state.epochs(epochs):
            for (x,) in data:
                loss = (model(x) ** 2).mean()
                run.backward(loss)
                run.update(optimizer)
            run.report(epoch, loss=loss)
            if dies_after and epoch == 4 and run.attempt == 1:
                while not Path(dies_after).exists():
                    time.sleep(0.02)
                os.kill(os.getpid(), 9)
'''


@pytest.fixture
def project(project: Project, mlflow_file: Path) -> Project:
    mlflow_file.rename(project.folder / "mlflow.db")
    project.write("train.py", JOB)
    project.environ |= {"WANDB_MODE": "offline", "HOME": str(project.folder)}
    return project


def reported(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the points of each metric that no resume has taken back."""
    reports = Reports(RunFolder(folder))
    reports.read()
    found: dict[str, list[tuple[int, float]]] = {}
    for each in reports.standing:
        for name, value in each.values.items():
            found.setdefault(name, []).append((each.step, value))
    return found


def own(found: dict[str, Any]) -> dict[str, Any]:
    """Return what is the run's own, without the progress."""
    return {name: each for name, each in found.items() if name != "mgpu/progress"}


def tracker_process(folder: Path) -> int | None:
    """Return the id of the process that sends the run's reports."""
    found = [
        pid
        for pid in with_variable(SINK_VARIABLE, str(folder))
        if b"tracker" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    ]
    return found[0] if found else None


@pytest.mark.long
def test_a_resumed_run_is_in_both_trackers_once(project: Project) -> None:
    sinks = ["--sink", "mlflow=sqlite:///mlflow.db", "--sink", "wandb=digits"]
    folder = project.submit("train.py", f"dies_after={project.folder}/go", "--retries", "1", *sinks)
    run = RunFolder(folder)
    wait_until(lambda: [sent.reports for sent in read_sent(run)] == [3, 3])
    assert len(reported(folder)["loss"]) == 4
    # the fourth is in no checkpoint yet
    settled = {name: each[:3] for name, each in reported(folder).items()}
    assert own(points(project, folder, "mlflow")) == settled
    killed = tracker_process(folder)
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    (project.folder / "go").touch()
    state = project.finish(folder)
    assert (state["state"], state["attempts"]) == ("COMPLETED", 2)
    shown = project.call("wait", folder.name).stdout
    assert len(reported(folder)["loss"]) == 6
    assert own(points(project, folder, "mlflow")) == reported(folder)
    assert own(points(project, folder, "wandb")) == reported(folder)
    assert f"mlflow    sqlite:///{project.folder}/mlflow.db (run " in shown
    assert f"wandb     wandb sync {folder}/wandb/offline-run-*" in shown
    wait_until(lambda: tracker_process(folder) is None)


@pytest.mark.long
def test_a_tracker_that_never_answers(project: Project) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        folder = project.submit("train.py", "--sink", f"mlflow=http://127.0.0.1:{server.getsockname()[1]}")
        assert project.finish(folder)["state"] == "COMPLETED"
        # it has half a minute to end by itself
        hanging = tracker_process(folder)
        assert hanging is not None
        os.kill(hanging, signal.SIGKILL)
    done = project.json("export", folder.name, "--to", "mlflow=sqlite:///mlflow.db")
    assert [(each["reports"], each["new"], each["problem"]) for each in done] == [(6, 6, "")]
    assert own(points(project, folder, "mlflow")) == reported(folder)
    again = project.json("export", folder.name, "--to", "mlflow=sqlite:///mlflow.db")
    assert [(each["reports"], each["new"]) for each in again] == [(6, 0)]


SWEEP = """
    study: tuned
    job: train.py
    metric: loss
    direction: minimize
    sampler: random
    pruner: {name: asha, min_resource: 1, max_resource: 2, reduction_factor: 2}
    trials: 3
    workers: 1
    fixed: {epochs: 2}
    space:
      lr: {float: [0.01, 0.5]}
"""


@pytest.mark.long
def test_trials_of_a_sweep_are_runs_of_a_tracker_and_rows_of_a_table(project: Project) -> None:
    project.write("sweep.yaml", SWEEP)
    project.write("mgpu.yaml", "clusters: {local: {sinks: ['mlflow=sqlite:///mlflow.db']}}")
    done = project.call("sweep", "sweep.yaml", "--executor", "local", "--follow")
    assert done.returncode == 0, done.stderr
    assert "mlflow    has 3 of 3 trials" in done.stdout.splitlines()
    refused = project.call("sweep", "sweep.yaml", "trials=4", "--sink", "wandb")
    assert (refused.returncode, "export tuned --to wandb" in refused.stderr) == (2, True)
    trials = [project.runs / "tuned" / "trials" / str(number) for number in range(3)]
    for trial in trials:
        assert own(points(project, trial, "mlflow")) == reported(trial)
    for form in ("csv", "parquet"):
        assert project.call("export", "tuned", "--to", form).returncode == 0
    with open(project.folder / "tuned.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], int(row["step"]), float(row["metrics.loss"])) for row in rows] == [
        (f"tuned/trials/{trial.name}", step, value) for trial in trials for step, value in reported(trial)["loss"]
    ]
    assert (
        project.call("export", "tuned", "--to", "csv", "-o", "-").stdout == (project.folder / "tuned.csv").read_text()
    )
    lrs = {json.loads((trial / "parameters.json").read_text())["lr"] for trial in trials}
    assert {float(row["params.lr"]) for row in rows} == lrs
    table = pyarrow.parquet.read_table(project.folder / "tuned.parquet").to_pylist()
    assert [row["metrics.loss"] for row in table] == [float(row["metrics.loss"]) for row in rows]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sink", "mlflow"], "MLFLOW_TRACKING_URI is not set"),
        (["--sink", "mlflaw=x"], "did you mean 'mlflow'?"),
        (["--sink", "mlflow=./mlruns"], "no longer accepts folders"),
        (["--sink", "mlflow=http://me:secret@host"], "MLFLOW_TRACKING_PASSWORD"),
        (["--sink", "mlflow=sqlite:///none/mlflow.db"], "there is no folder"),
        (["--sink", "wandb", "--sink", "wandb=two"], "given twice"),
        (["--sink", "wandb=a/b/c"], "expected PROJECT or ENTITY/PROJECT"),
    ],
    ids=["no-uri", "misspelt", "folder", "password", "no-folder", "twice", "path"],
)
def test_a_bad_sink_is_refused_before_anything_starts(project: Project, words: list[str], message: str) -> None:
    project.environ |= {"MLFLOW_TRACKING_URI": ""}
    done = project.call("submit", "train.py", "--executor", "local", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "secret" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not project.runs.exists()
