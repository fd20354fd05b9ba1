"""Where the time of real runs went, and what they used, as a person asks for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.job.sampling.sampler_thread import SECONDS
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.usage_records import GROWTH, read_saves, read_usage
from tests.support import Project, restore_version_0_1

MB = 1 << 20

JOB = """
    import subprocess
    import sys
    import time

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset


    def train(run, epochs: int = 6, fails_after: int = 0, seconds: float = 0.2):
        model = run.wrap(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = run.loader(TensorDataset(torch.ones(8, 4)), batch_size=4)
        run.checkpoints(every_minutes=None, every_steps=5)
        state = run.restore(model=model, optimizer=optimizer, data=data)
        # for a moment, itself and in a process of its own
        bytearray(b"x") * (100 << 20)
        subprocess.run([sys.executable, "-c", "bytearray(b'x') * (800 << 20)"], check=True)
        for epoch in state.epochs(epochs):
            for (batch,) in data:
                run.backward(model(batch).mean())
                run.update(optimizer)
            time.sleep(seconds)
            run.report(epoch, loss=0.5)
            if epoch == fails_after and run.attempt == 1:
                raise RuntimeError("as asked")
"""


def efficiency(project: Project, *names: str) -> dict[str, Any]:
    found = project.json("efficiency", *names)
    for run in found["runs"]:
        asked, used = run["asked"], run["used"]
        # all simulated nodes are allocated; the parts are rounded
        units = asked["nodes"] * asked["ranks_per_node"] * (asked["cpus_per_task"] or 1)
        assert sum(run["ledger"].values()) == pytest.approx(used["seconds"] * units, abs=0.01)
        assert sum(sum(each["ledger"].values()) for each in run["attempts"]) == pytest.approx(
            sum(run["ledger"].values()), abs=0.02
        )
    return dict(found)


def test_run_that_was_repeated_in_part_shows_so_and_what_it_used(project: Project) -> None:
    project.write("train.py", JOB)
    options = ("--nodes", "2", "--retries", "1", "--mem", "64G", "--time", "60", "--cpus-per-task", "2")
    folder, state = project.run("train.py", *options, "fails_after=5")
    assert (state["state"], state["attempts"]) == ("COMPLETED", 2)
    found = efficiency(project)
    (run,) = found["runs"]
    assert (run["unit"], run["asked"]["mem"], run["asked"]["time"]) == ("core", 64 << 30, 3600)
    first, second = (each["ledger"] for each in run["attempts"])
    # a checkpoint ends each epoch, but that of the last one was not complete, or just so
    assert first["failed"] > 0
    assert first["repeated"] == 0
    assert second["training"] > 0
    saves = read_saves(RunFolder(folder))
    assert {save.attempt for save in saves} == {1, 2}
    assert run["ledger"]["saving"] > 0
    nodes = read_usage(RunFolder(folder))
    assert [(each.attempt, each.node, [*each.ends]) for each in nodes] == [
        *((1, "local1", [0]), (1, "local2", [1]), (2, "local1", [0]), (2, "local2", [1]))
    ]
    # that of the rank and of its process; one that a sample has seen before it had all may count as two
    ends = [end for each in nodes for end in each.ends.values()]
    own, child = max(end.own for end in ends), max(end.child for end in ends)
    assert 1000 * MB < run["used"]["mem"] <= own + child * (1 + 1 / GROWTH)
    assert run["used"]["cpu"] > 0.5
    flags = {each["kind"]: each["flags"] for each in found["advice"]}
    assert flags in ({"memory": f"--mem {size}G", "time": "--time 0:05:00"} for size in (2, 3))
    assert found["ledger"] == run["ledger"]
    text = project.call("efficiency", folder.name).stdout
    assert "--time 0:05:00" in text
    assert "of 64.0 GiB" in text


HOLDS = f"""
    import os
    import time
    from pathlib import Path

    held = bytearray(b"x") * (300 << 20)
    folder = Path(os.environ["MGPU_RUN_FOLDER"])
    (folder / f"holds-{{os.environ['RANK']}}").touch()
    while len([*folder.glob("holds-*")]) < 2:
        time.sleep(0.01)
    # until a sample has been taken
    time.sleep({SECONDS + 2})
"""


def test_script_is_sampled_with_the_processes_that_it_starts(project: Project) -> None:
    project.write("hold.py", HOLDS)
    folder, state = project.run("--ntasks-per-node", "2", "--", "sh", "-c", "python3 hold.py; exit 0")
    assert state["state"] == "COMPLETED"
    (run,) = efficiency(project, folder.name)["runs"]
    assert run["used"]["mem"] > 600 * MB
    assert run["ledger"]["training"] == pytest.approx(run["used"]["seconds"] * 2, abs=0.01)
    (node,) = read_usage(RunFolder(folder))
    assert [end.highest > 300 * MB for end in node.ends.values()] == [True, True]
    # however late a loaded machine starts them
    assert any(sample.ranks == 2 and sample.rss > 600 * MB for sample in node.samples)


SWEEP = """
    study: small
    job: train.py
    metric: loss
    direction: minimize
    sampler: random
    trials: 3
    workers: 2
    fixed: {epochs: 2}
    space: {seconds: {float: [0.05, 0.1]}}
"""


@pytest.mark.long
def test_worker_of_a_sweep_has_time_between_trials(project: Project) -> None:
    project.write("train.py", JOB)
    project.write("sweep.yaml", SWEEP)
    done = project.call("sweep", "sweep.yaml", "--executor", "local", "--follow")
    assert done.returncode == 0, done.stderr
    found = efficiency(project, "small")
    assert [(run["run"], run["kind"], run["group"]) for run in found["runs"]] == [
        ("small/0", "worker", "small"),
        ("small/1", "worker", "small"),
    ]
    total = found["ledger"]
    assert total["between_trials"] > 0
    assert total["starting"] > 0
    assert total["training"] > 0
    assert total["repeated"] == total["failed"] == 0


def test_runs_of_version_0_1_have_ledgers(project: Project) -> None:
    restore_version_0_1(project)
    found = efficiency(project)
    assert found["warnings"] == []
    ledgers = {run["run"].partition("-")[0]: run["ledger"] for run in found["runs"]}
    assert {"completed", "failed", "group", "stopped", "search/0", "pickled"} <= set(ledgers)
    assert ledgers["failed"]["failed"] > 0
    assert ledgers["completed"]["training"] > 0
    assert ledgers["search/0"]["between_trials"] > 0
    text = project.call("efficiency").stdout
    assert "not sampled" in text


def test_nothing_has_started(project: Project) -> None:
    done = project.call("efficiency")
    assert (done.returncode, done.stdout) == (0, "no run has started yet\n")
    assert json.loads(project.call("efficiency", "--json").stdout)["runs"] == []
    done = project.call("efficiency", "nosuch")
    assert done.returncode == 2
    assert "nosuch" in done.stderr


def test_damaged_records_cost_only_what_was_in_them(project: Project) -> None:
    project.write("train.py", JOB)
    folder, _ = project.run("train.py", "epochs=2")
    for path in [*Path(folder, "usage").iterdir(), folder / "saves.jsonl", folder / "metrics.jsonl"]:
        path.write_bytes(b'{"torn": \n' + path.read_bytes()[:-5])
    found = efficiency(project, folder.name)
    assert found["runs"][0]["ledger"]["training"] > 0
