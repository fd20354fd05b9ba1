"""Interrupted training ends with the same weights as undisturbed training, bit for bit."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from mgpu_slurm.core.files import read_jsonl
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Event
from tests.support import Project, log, make_project, wait_until

JOB = '''
    """Trains on two ranks, in any way interrupted; dropout draws random numbers at each step."""
    import os, signal, threading, time
    from dataclasses import dataclass
    from pathlib import Path

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset


    @dataclass
    class Config:
        epochs: int = 3
        signal_at: int = 0
        """The optimizer step of the first attempt at which rank 1 gets the signal; 0 for never."""
        signal_name: str = "SIGUSR2"
        workers: int = 0
        wait_at: int = 0
        """The step of the first attempt before which every rank waits to be told to stop; 0 for never."""
        block_at: int = 0
        """The step of the first attempt after which rank 1 is blocked, and rank 0 waits for it; 0 for never."""
        kill_at: int = 0
        """The step of the first two attempts after which rank 1 is killed; 0 for never."""
        fail_at: int = 0
        """The step of the first attempt after which rank 1 fails; 0 for never."""


    def train(run, config: Config):
        run.seed(3)
        features = torch.randn(52, 8, generator=torch.Generator().manual_seed(0))
        model = run.wrap(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = run.loader(TensorDataset(features), batch_size=8, shuffle=True, num_workers=config.workers)
        state = run.restore(model=model, optimizer=optimizer, data=data)
        for epoch in state.epochs(config.epochs):
            for (batch,) in data:
                if run.attempt == 1 and run.step == config.block_at > 0:
                    Path(run.folder, f"blocked-{run.rank}").write_text(str(os.getpid()))
                    run.rank and threading.Event().wait()
                run.backward(model(batch).square().mean())
                run.update(optimizer, clip=1.0)
                if run.attempt == 1 and run.step == config.signal_at and run.rank == 1:
                    os.kill(os.getpid(), getattr(signal, config.signal_name))
                if run.attempt == 1 and run.step == config.wait_at:
                    Path(run.folder, f"waits-{run.rank}").touch()
                    while not run._loop_control.stop.asked:
                        time.sleep(0.01)
                if run.attempt <= 2 and run.step == config.kill_at and run.rank == 1:
                    # it may still be on its way to the disk
                    while not Path(run.folder, "checkpoints", "step-000000007").exists():
                        time.sleep(0.01)
                    os.kill(os.getpid(), signal.SIGKILL)
                if run.attempt == 1 and run.step == config.fail_at and run.rank == 1:
                    raise RuntimeError("the data is broken")
            run.report(epoch, draw=torch.rand(1).item())
        inner = model.module if hasattr(model, "module") else model
        if run.is_main:
            torch.save([inner.state_dict(), torch.rand(3)], run.folder / "final.pt")
        return {"steps": run.step}
'''


LONG_EPOCH = """
    import threading

    import torch


    def train(run, config):
        model = torch.nn.Linear(1, 1)
        state = run.restore(model=model)
        for epoch in state.epochs(3):
            if epoch == 2:
                # a loop of its own, in which a run cannot stop
                threading.Event().wait()
"""


def events(folder: Path) -> list[Event]:
    return records.events(RunFolder(folder))


def announce_the_time_limit(folder: Path) -> None:
    """Send the lead signal to the ranks once they are blocked, however long they take to get there."""
    files = [folder / f"blocked-{rank}" for rank in range(2)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    for file in files:
        os.kill(int(file.read_text()), signal.SIGUSR2)


@pytest.fixture(scope="module", autouse=True)
def waiting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Path, Path]:
    """Two runs that only wait for their time limits, of `JOB` and of `LONG_EPOCH`: other tests run meanwhile."""
    project = make_project(tmp_path_factory.mktemp("waiting"))
    project.write("mgpu.yaml", "clusters: {local: {kill-wait: 1}}\n")
    project.write("train.py", JOB)
    project.write("long.py", LONG_EPOCH)
    blocked = project.submit("train", "--nodes", "2", "block_at=3", "--time", "1:00", "--signal", "USR2@12")
    long = project.submit("long", "--time", "0:24", "--signal", "USR2@6")
    return project, blocked, long


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, bytes]:
    """A project, and the file with the weights of an undisturbed run on two ranks."""
    project = make_project(tmp_path_factory.mktemp("resume"))
    project.write("train.py", JOB)
    folder, facts = project.run("train", "--nodes", "2")
    assert (facts["state"], facts["step"], facts["attempts"]) == ("COMPLETED", 21, 1)
    return project, (folder / "final.pt").read_bytes()


@pytest.mark.parametrize("step", [7, 10])
def test_requeue_after_lead_signal_ends_with_identical_weights(trained: tuple[Project, bytes], step: int) -> None:
    project, expected = trained
    folder, facts = project.run("train", "--nodes", "2", f"signal_at={step}")
    assert (facts["state"], facts["step"], facts["attempts"]) == ("COMPLETED", 21, 2)
    assert "restored step" in log(folder, 0, attempt=2)
    assert (folder / "final.pt").read_bytes() == expected


def test_run_with_killed_ranks_retries_and_ends_with_identical_weights(trained: tuple[Project, bytes]) -> None:
    project, expected = trained
    done = project.call("submit", "train", "--nodes", "2", "--executor", "local", "kill_at=10")
    assert done.returncode == 0, done.stdout + done.stderr
    for soon in ("", " in 5 s"):
        assert f"-- failed: rank 1 was killed by SIGKILL\n-- restarting{soon} from step 7\n" in done.stdout
    (facts, *_) = project.json("status")
    assert (facts["state"], facts["step"], facts["attempts"]) == ("COMPLETED", 21, 3)
    folder = project.runs / facts["run"]
    assert (folder / "final.pt").read_bytes() == expected
    (event, _) = [each for each in events(folder) if each.event == "retried"]
    assert (event.why, event.checkpoint) == ("rank 1 was killed by SIGKILL", 7)


@pytest.mark.parametrize(("words", "attempts"), [((), 1), (("--retries", "1"), 2)])
def test_program_error_is_retried_only_if_retries_are_requested(
    trained: tuple[Project, bytes], words: tuple[str, ...], attempts: int
) -> None:
    project, expected = trained
    folder, facts = project.run("train", "--nodes", "2", "fail_at=10", *words)
    assert facts["attempts"] == attempts
    if attempts == 1:
        assert facts["state"] == "FAILED"
        assert "the data is broken" in facts["reason"]
    else:
        assert (facts["state"], facts["reason"]) == ("COMPLETED", "")
        assert (folder / "final.pt").read_bytes() == expected


def test_resume_after_cancel_ends_with_identical_weights(trained: tuple[Project, bytes]) -> None:
    project, expected = trained
    folder = project.submit("train", "--nodes", "2", "wait_at=9")
    wait_until(lambda: (folder / "waits-0").exists() and (folder / "waits-1").exists())
    assert "asked to save and end" in project.call("cancel", folder.name).stdout
    assert project.finish(folder)["state"] == "CANCELLED"
    ended = records.read_state(RunFolder(folder))
    assert (folder / "checkpoints").is_dir()
    (end,) = [event for event in read_jsonl(folder / "attempts.jsonl") if event["event"] == "ended"]
    assert end["message"] == "stopped at step 9, asked to end"
    done = project.call("resume", folder.name, "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert project.finish(folder)["attempts"] == 2
    resumed = records.read_state(RunFolder(folder))
    assert ended.started is not None
    assert resumed.started is not None
    assert resumed.first_started is not None
    assert resumed.first_started == ended.first_started
    assert resumed.first_started <= ended.started < resumed.started
    assert (folder / "final.pt").read_bytes() == expected


def test_run_with_loader_workers_is_requeued_at_its_time_limit(trained: tuple[Project, bytes]) -> None:
    project, expected = trained
    folder = project.submit("train", "--nodes", "2", "wait_at=9", "workers=1", "--time", "0:30", "--signal", "USR2@25")
    facts = project.finish(folder)
    assert (facts["state"], facts["attempts"]) == ("COMPLETED", 2)
    assert (folder / "final.pt").read_bytes() == expected
    assert [each.event for each in events(folder)] == ["started", "ended", "requeued", "started", "ended"]


def test_ranks_that_cannot_save_exit_before_the_time_limit(trained: tuple[Project, bytes]) -> None:
    project, expected = trained
    folder = project.submit("train", "--nodes", "2", "block_at=10", "--time", "1:00:00", "--signal", "USR2@8")
    announce_the_time_limit(folder)
    facts = project.finish(folder)
    assert (facts["state"], facts["attempts"]) == ("COMPLETED", 2)
    code = (project.folder / "train.py").read_text().splitlines()
    for rank, blocked in [(0, "run.backward("), (1, "threading.Event().wait()")]:
        assert "this rank exits, because it cannot save from here:" in log(folder, rank)
        line = 1 + next(index for index, text in enumerate(code) if blocked in text)
        # a rank whose connection to the other one broke first has a traceback there
        assert re.search(rf'train\.py", line {line},? in train', log(folder, rank))
    told = project.call("why", folder.name).stdout
    assert re.search(
        r"attempt 1: rank [01] on local[12] left before the time limit; it could not save at train.py:", told
    )
    assert "restored step 7 from step-000000007 (attempt 2)" in log(folder, 0, attempt=2)
    assert (folder / "final.pt").read_bytes() == expected


def test_cancelled_ranks_that_cannot_save_log_where_they_are(project: Project) -> None:
    project.write("train.py", JOB)
    project.write("mgpu.yaml", "clusters: {local: {kill-wait: 6}}\n")
    folder = project.submit("train", "--nodes", "2", "block_at=10", "--cluster", "local")
    wait_until((folder / "blocked-1").exists)
    project.call("cancel", folder.name)
    assert project.finish(folder)["state"] == "CANCELLED"
    for rank in range(2):
        told = log(folder, rank).partition("WARNING: asked to end, but has reached no place where it could save:")[2]
        assert 'train.py", line ' in told


SCRIPT = """
import os
import signal
import threading

import torch
from torch.utils.data import TensorDataset

from mgpu_slurm import attach

run = attach()
run.seed(0)
model = run.wrap(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = run.loader(TensorDataset(torch.ones(12, 1)), batch_size=2)
state = run.restore(model=model, optimizer=optimizer, data=data)
for epoch in state.epochs(2):
    for (batch,) in data:
        if (run.attempt, run.step) == (1, 8):
            # as before the time limit; one rank is blocked, and the other waits for its gradients
            os.kill(os.getpid(), signal.SIGUSR2)
            run.rank and threading.Event().wait()
        run.backward(model(batch).mean())
        run.update(optimizer)
"""


@pytest.mark.long
def test_script_rank_that_cannot_save_exits_and_the_run_resumes(project: Project) -> None:
    project.write("script.py", SCRIPT)
    folder = project.submit("--nodes", "2", "--time", "1:00:00", "--signal", "USR2@12", "--", "python", "script.py")
    facts = project.finish(folder)
    assert (facts["state"], facts["attempts"]) == ("COMPLETED", 2)
    assert "this rank exits, because it cannot save from here:" in log(folder, 1)
    assert "restored step 6 from step-000000006 (attempt 2)" in log(folder, 0, attempt=2)


ENDS = """
import os
import signal

from mgpu_slurm import attach

run = attach()


class AtTheEnd:
    def __del__(self, kill=os.kill, pid=os.getpid(), signum=signal.SIGUSR2):
        # the interpreter has its signals no more
        kill(pid, signum)


kept = AtTheEnd()
"""


def test_lead_signal_does_not_kill_a_script_that_is_exiting(project: Project) -> None:
    project.write("script.py", ENDS)
    folder = project.submit("--", "python", "script.py")
    assert project.finish(folder)["state"] == "COMPLETED"


def test_run_without_requeues_left_times_out_and_can_be_resumed(trained: tuple[Project, bytes]) -> None:
    project, expected = trained
    folder, facts = project.run("train", "--nodes", "2", "signal_at=5", "--max-requeues", "0")
    assert facts["state"] == "TIMEOUT"
    assert "--max-requeues 0" in facts["reason"]
    assert project.call("resume", folder.name, "--follow").returncode == 0
    assert (folder / "final.pt").read_bytes() == expected


def test_completed_run_cannot_be_resumed(trained: tuple[Project, bytes]) -> None:
    project, _ = trained
    name = json.loads(project.call("status", "--json").stdout)[-1]["run"]
    done = project.call("resume", name)
    assert done.returncode == 2
    assert "has already completed: submit a new run" in done.stderr


def test_two_time_limits_without_a_newer_checkpoint_end_the_run(
    waiting: tuple[Project, Path, Path],
) -> None:
    project, _, folder = waiting
    facts = project.finish(folder)
    reason = "two attempts in a row reached the time limit without a newer checkpoint than step-000000000"
    assert (facts["state"], facts["attempts"], facts["reason"]) == ("TIMEOUT", 3, reason)
    told = project.call("why", folder.name).stdout
    assert "why       the time limit was reached twice without a newer checkpoint\n" in told
    assert f"error     {reason}; rank 0 on local1 left before the time limit; it could not save at long.py:" in told
    assert "raise `--time`, or pass a `run.loader` to `run.restore`" in told


def test_blocked_run_without_a_checkpoint_times_out_without_requeue(waiting: tuple[Project, Path, Path]) -> None:
    project, folder, _ = waiting
    facts = project.finish(folder)
    assert (facts["state"], facts["attempts"]) == ("TIMEOUT", 1)
