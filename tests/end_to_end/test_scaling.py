"""`scaling`: a job on several numbers of nodes, as a person calls it."""

from __future__ import annotations

import json
import re
import signal

import pytest

from mgpu_slurm.core.files import read_json
from mgpu_slurm.run_folder.layout import RunFolder
from tests.support import Project, wait_until

JOB = """
    import time
    from pathlib import Path

    import torch


    def train(run, batch_size: int = 16, fails_with: int = 0, pause: float = 0.0):
        if run.world_size == fails_with:
            raise RuntimeError("cannot run on that many ranks")
        model = run.wrap(torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = run.loader(torch.utils.data.TensorDataset(torch.randn(64, 8)), batch_size=batch_size)
        run.checkpoints(every_steps=1)
        state = run.restore(model=model, optimizer=optimizer, data=data)
        for epoch in state.epochs(1000):
            for (inputs,) in data:
                run.backward(model(inputs).square().mean())
                run.update(optimizer)
                time.sleep(pause)
            run.report(epoch, loss=0.5)
        (run.folder / "reached-its-end").touch()
"""

SCALING = ("--executor", "local", "--steps", "6", "--warm-up", "2")


def folder_of(project: Project, nodes: int) -> RunFolder:
    (path,) = project.runs.glob(f"train-{nodes}n-*")
    return RunFolder(path)


def test_job_is_measured_in_each_size_and_ends_early(project: Project) -> None:
    project.write("train.py", JOB)
    facts = project.json("scaling", "train.py", "--nodes", "2,1", *SCALING, "--scale", "batch_size")
    assert (facts["target"], facts["scaling"], facts["scaled"]) == ("train.py:train", "weak", "batch_size")
    first, second = facts["sizes"]
    for size in (first, second):
        assert size["state"] == "COMPLETED"
        assert (size["steps"], size["batch"]) == (6, 16.0 * size["nodes"])
        assert size["samples_per_second"] > 0
        lost = size["step_seconds"] - size["ideal_seconds"]
        assert sum(size["lost_seconds"].values()) == pytest.approx(lost, abs=1e-9)
    assert (first["ranks"], second["ranks"]) == (1, 2)
    assert (first["speed_up"], first["efficiency"]) == (1.0, 1.0)
    assert second["speed_up"] == 2 * second["efficiency"]
    assert set(second["lost_seconds"]) == {"data", "compute", "communication", "stragglers", "other"}
    for size in (first, second):
        files = folder_of(project, size["nodes"])
        assert files.run == size["run"]
        # the last step is the sixth after two of warm-up
        assert (read_json(files.state) or {})["step"] == 8
        assert (read_json(files.result) or {})["result"] == {"loss": 0.5}
        assert len((read_json(files.speed) or {})["ranks"]) == size["ranks"]
        assert not files.checkpoints.exists()
        assert not (files.path / "reached-its-end").exists()


def test_size_that_fails_leaves_the_others(project: Project) -> None:
    project.write("train.py", JOB)
    project.write("job.yaml", "fails_with: 2\n")
    done = project.call("scaling", "train.py", "--config", "job.yaml", "--nodes", "1,2", *SCALING)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        "scaling of train.py:train, after 2 steps of warm-up",
        "strong scaling: all sizes divide the same batch",
        "",
        "NODES  RANKS  STEPS  BATCH  MS/STEP  SAMPLES/S  SPEED-UP  EFFICIENCY",
    ]
    assert re.fullmatch(r" +1 +1 +6 +16 +[\d.,]+ +[\d.,]+ +1\.00 +100%", lines[4])
    assert lines[5].split() == ["2", "2", *["-"] * 6]
    run = folder_of(project, 2).run
    assert re.fullmatch(
        rf"2 nodes: FAILED: rank \d on .*: RuntimeError: cannot run on that many ranks \(see `.* why {run}`\)", lines[7]
    )
    assert len(lines) == 8


def test_interrupted_command_cancels_the_run_that_is_alive(project: Project) -> None:
    project.write("train.py", JOB)
    called = project.start("scaling", "--json", "train.py", "pause=1", "--nodes", "1,2", *SCALING)

    def is_training() -> bool:
        return any("step" in path.read_text() for path in project.runs.glob("train-1n-*/logs/1-0.log"))

    wait_until(is_training)
    called.send_signal(signal.SIGINT)
    out, _ = called.communicate(timeout=60)
    assert called.returncode == 130
    facts = json.loads(out)
    assert [size["problem"] for size in facts["sizes"]][1] == "not submitted"
    assert project.finish(folder_of(project, 1).path)["state"] == "CANCELLED"
    assert not any(project.runs.glob("train-2n-*"))


def test_wrong_calls_are_refused_with_one_line(project: Project) -> None:
    project.write("train.py", JOB)
    for words, message in [
        (["train.py"], "Missing option '--nodes'"),
        (["train.py", "--nodes", "1,1"], "--nodes 1,1: expected different numbers of nodes, such as 1,2,4"),
        (["train.py", "--nodes", "1", "--steps", "0"], "--steps 0: expected at least 1"),
        (["--nodes", "1", "--", "true"], "scaling measures a job function, not the command 'true': name a function"),
        (["train.py", "width=3", "--nodes", "1,2"], "unknown key 'width'"),
    ]:
        done = project.call("scaling", "--executor", "local", *words)
        assert done.returncode == 2
        assert message in done.stderr
        assert len([line for line in done.stderr.splitlines() if line.strip()]) == 1
    assert not any(project.runs.glob("*"))
