"""A training that comes no further ends, says which rank holds it up and where, and starts again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.reports import flight_records
from mgpu_slurm.run_folder.layout import RunFolder
from tests.support import Project, log

AFTER = ("--stuck-after", "0.15", "--nodes", "2")
"""Nine seconds: a loaded machine takes some to start."""

JOB = '''
    """Steps of two ranks, one of which stands still at the third, in the first attempt."""
    import os
    import re
    import threading
    import time
    from dataclasses import dataclass
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from torch.utils.data import TensorDataset


    def asleep(run):
        threading.Event().wait()


    def holding_the_lock(run):
        # C code that gives the interpreter's lock to nobody
        re.match("(a+)+$", 40 * "a" + "b")


    def unwritten(run):
        """What it writes of a checkpoint from now on does not come to the disk, as where that hangs."""
        fsync = os.fsync

        def hangs(file):
            if threading.current_thread().name == "checkpoint":
                threading.Event().wait()
            fsync(file)

        os.fsync = hangs


    def elsewhere(run):
        # the last sign of life of this rank, so that it records where it is after the other one does
        time.sleep(1.5)
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
        dist.barrier(group=run.lonely)


    def slowly_compiled(graph, inputs):
        """Compile for longer than a rank may be silent."""
        end = time.monotonic() + 15
        while time.monotonic() < end:
            sum(range(1000))
        return graph


    def never_compiled(graph, inputs):
        threading.Event().wait()


    def compiling(run):
        torch.compile(torch.nn.Linear(2, 1), backend=slowly_compiled)(torch.zeros(1, 2))
        print("compiled", flush=True)
        torch.compile(torch.nn.Linear(2, 1), backend=never_compiled)(torch.zeros(1, 2))


    def compiled(run, config):
        # its import takes a while on a loaded machine
        import torch._dynamo

        train(run, compiling)


    def stuck(run, config):
        train(run, asleep)


    def locked(run, config):
        train(run, holding_the_lock)


    def apart(run, config):
        train(run, elsewhere)


    def hanging(run, config):
        train(run, unwritten)


    @dataclass
    class Config:
        lr: float = 0.1


    def once(run, config: Config):
        """The first attempt of the first trial stands still after its first report."""
        run.report(1, loss=config.lr)
        if run.folder.name == "0" and run.attempt == 1 and run.rank == 1:
            asleep(run)
        run.report(2, loss=config.lr)


    def train(run, stand_still):
        run.lonely = dist.new_group(backend="gloo") if dist.is_initialized() else None
        model = run.wrap(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = run.loader(TensorDataset(torch.randn(24, 2)), batch_size=4)
        state = run.restore(model=model, optimizer=optimizer, data=data)
        for epoch in state.epochs(2):
            for (batch,) in data:
                if run.attempt == 1 and run.step == 8 and run.rank == run.world_size - 1:
                    # it may still be on its way to the disk
                    while not Path(run.folder, "checkpoints", "step-000000006").exists():
                        time.sleep(0.01)
                    stand_still(run)
                run.backward(model(batch).mean())
                run.update(optimizer)
            run.report(epoch, loss=0.0)
'''


SWEEP = """
    study: search
    job: train:once
    metric: loss
    direction: minimize
    trials: 2
    stuck_after: 0.1
    resources: {nodes: 2}
    space: {lr: {float: [0.1, 0.2]}}
"""


@pytest.fixture
def stuck(project: Project) -> Project:
    project.write("train.py", JOB)
    return project


def retried(folder: Path) -> dict[str, Any]:
    events = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    (found,) = [event for event in events if event["event"] == "retried"]
    return dict(found)


# the collectives of gloo are recorded
@pytest.mark.needs_torch("2.9")
def test_stuck_rank_is_named_with_its_source_line(stuck: Project) -> None:
    folder, facts = stuck.run("train:stuck", *AFTER)
    assert (facts["state"], facts["step"], facts["attempts"]) == ("COMPLETED", 12, 2)
    event = retried(folder)
    line = 1 + next(index for index, text in enumerate(lines(stuck)) if "threading.Event().wait()" in text)
    assert event["why"] == (
        f"rank 1 on local2: Stuck: no progress for 9 s since step 8: it is at train.py:{line} in asleep"
    )
    assert "restored step 6 from" in log(folder, 0, attempt=2)
    assert "this rank ends. Its threads:" in log(folder, 1)
    assert "in asleep" in log(folder, 1)
    waits = log(folder, 0)
    assert "no progress for 9 s since step 8: it waits for other ranks in gloo:all_reduce at train.py" in waits
    assert "in train" in waits
    told = flight_records.lagging(RunFolder(folder), 1)
    assert told is not None
    assert told.startswith("rank 1 never reached gloo:all_reduce (#")


def lines(project: Project) -> list[str]:
    return (project.folder / "train.py").read_text().splitlines()


@pytest.mark.long
def test_slow_compilation_is_awaited_and_one_that_hangs_is_named(stuck: Project) -> None:
    folder, facts = stuck.run("train:compiled", *AFTER)
    assert (facts["state"], facts["step"], facts["attempts"]) == ("COMPLETED", 12, 2)
    # the first compilation was longer than that, and the other rank waited for it
    assert "compiled" in log(folder, 1).splitlines()
    assert re.match(
        r"rank 1 on local2: Stuck: no progress for \d+ s since step 8: it is compiling at train\.py:\d+ in"
        r" never_compiled",
        retried(folder)["why"],
    )
    assert "waits for other ranks in gloo:all_reduce" in log(folder, 0)


@pytest.mark.long
def test_rank_holding_the_gil_is_reported_as_not_responding(stuck: Project) -> None:
    folder, facts = stuck.run("train:locked", *AFTER)
    assert (facts["state"], facts["step"], facts["attempts"]) == ("COMPLETED", 12, 2)
    assert retried(folder)["why"].startswith(
        "rank 1 stopped responding, and rank 0 made no progress for 9 s since step 8: it waits for other ranks"
    )
    # its stack all the same
    assert "in holding_the_lock" in log(folder, 1)


@pytest.mark.long
def test_single_rank_holding_the_gil_is_killed_and_the_run_restarts(stuck: Project) -> None:
    folder, facts = stuck.run("train:locked", "--stuck-after", "0.1")
    assert (facts["state"], facts["step"], facts["attempts"]) == ("COMPLETED", 12, 2)
    line = 1 + next(index for index, text in enumerate(lines(stuck)) if "re.match(" in text)
    assert retried(folder)["why"] == (
        "rank 0 on local1: Stuck: no progress for more than 12 s: it holds the interpreter's lock in C code, its main"
        f" thread at train.py:{line} in holding_the_lock"
    )
    assert "in holding_the_lock" in log(folder, 0).partition("this rank was killed. Its threads:")[2]
    assert "restored step 6 from" in log(folder, 0, attempt=2)
    assert not list((folder / "logs").glob("*.stacks"))


def test_rank_whose_checkpoint_write_hangs_is_named_with_its_line(stuck: Project) -> None:
    folder, facts = stuck.run("train:hanging", *AFTER)
    assert (facts["state"], facts["step"], facts["attempts"]) == ("COMPLETED", 12, 2)
    line = 1 + next(index for index, text in enumerate(lines(stuck)) if "in state.epochs(2)" in text)
    # of two stuck ranks, the second is silent for less than the limit when it ends with the first
    assert re.fullmatch(
        rf"rank 1 on local2: Stuck: no progress for \d+ s since step 12: it is at train\.py:{line} in train",
        retried(folder)["why"],
    )
    assert "in hangs" in log(folder, 1)


@pytest.mark.needs_torch("2.9")
def test_ranks_waiting_in_different_collectives_are_both_reported(stuck: Project) -> None:
    # longer, so that a slow step of one rank on a busy machine does not make its limit a later one than the other's
    folder, facts = stuck.run("train:apart", "--stuck-after", "0.3", "--nodes", "2")
    assert (facts["state"], facts["attempts"]) == ("COMPLETED", 2)
    why = retried(folder)["why"]
    assert re.match(
        r"rank 0 on local1: Stuck: no progress for \d+ s since step 8: it waits for other ranks in gloo:", why
    )
    assert "and rank 1 waits for other ranks in gloo:barrier at train.py:" in why
    assert why.endswith("in elsewhere")


def test_stuck_trial_is_restarted_and_completes(stuck: Project) -> None:
    stuck.write("sweep.yaml", SWEEP)
    done = stuck.call("sweep", "sweep.yaml", "--executor", "local", "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = stuck.runs / "search"
    log_of_1 = (folder / "trials" / "0" / "logs" / "1-1.log").read_text()
    assert "in asleep" in log_of_1
    results = [json.loads((folder / "trials" / str(number) / "result.json").read_text()) for number in range(2)]
    assert [result["state"] for result in results] == ["COMPLETE", "COMPLETE"]
    ends = [json.loads(line) for line in (folder / "tasks" / "0" / "attempts.jsonl").read_text().splitlines()]
    assert any("Stuck" in str(event.get("error")) for event in ends if event["event"] == "ended")
