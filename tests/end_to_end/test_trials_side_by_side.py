"""Workers that train several trials at the same time, by real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from tests.end_to_end.test_sweeps import trials_of, wait
from tests.support import Project, wait_until

JOB = """
    import os
    import signal
    import subprocess
    import time
    from dataclasses import dataclass

    import torch


    @dataclass
    class Config:
        lr: float = 0.1
        epochs: int = 4
        signal: int = 0
        meets: str = ""
        until: str = ""


    def train(run, config: Config):
        model = run.wrap(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
        state = run.restore(model=model, optimizer=optimizer)
        print("has", sorted(os.sched_getaffinity(0)), torch.get_num_threads(), os.getpid(), flush=True)
        if (run.folder / "child").exists():
            pid = (run.folder / "child").read_text()
            print("left" if os.path.exists(f"/proc/{pid}/exe") else "nothing left", flush=True)
        for epoch in state.epochs(config.epochs):
            if config.signal and config.lr == 0.1 and epoch == 3:
                # as a launcher's script would, it outlives the one that has started it
                child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
                (run.folder / "child").write_text(str(child.pid))
                os.kill(os.getpid(), config.signal)
            if config.meets and epoch == 2:
                # only another trial that is trained meanwhile creates the other file
                own = 1 if config.lr == 0.1 else 2
                open(f"{config.meets}{own}", "w").close()
                while not os.path.exists(f"{config.meets}{3 - own}"):
                    time.sleep(0.02)
            run.report(epoch, loss=config.lr * epoch)
            if config.until:
                time.sleep(0.05)
                if os.path.exists(config.until):
                    break
"""

SCRIPT = """
import os, sys, time

lr = float(sys.argv[1])
own = 1 if lr == 0.1 else 2
open(f"meets{own}", "w").close()
while not os.path.exists(f"meets{3 - own}"):
    time.sleep(0.02)
print('{"loss": %g, "cores": %d}' % (lr, len(os.sched_getaffinity(0))))
"""


def call_sweep(project: Project, **values: Any) -> subprocess.CompletedProcess[str]:
    base = {"study": "study", "job": "job.py", "metric": "loss", "direction": "minimize", "sampler": "grid",
            "trials_per_worker": 2, "space": {"lr": {"choice": [0.1, 0.2]}}}  # fmt: skip
    project.write("job.py", JOB)
    project.write("sweep.yaml", yaml.safe_dump(base | values))
    return project.call("sweep", "sweep.yaml", "--executor", "local", "--no-follow")


def start(project: Project, **values: Any) -> Path:
    done = call_sweep(project, **values)
    assert done.returncode == 0, done.stderr
    return project.runs / "study"


def of_trial(folder: Path, number: int) -> RunFolder:
    return RunFolder(folder).of_trial(number)


def logs_of(trial: RunFolder) -> list[str]:
    return [path.read_text() for path in sorted(trial.logs.glob("*.log"))]


@pytest.mark.long
def test_trials_are_trained_at_the_same_time_with_their_own_cores_and_logs(project: Project) -> None:
    folder = start(project, fixed={"meets": str(project.folder / "meets")})
    assert wait(project).returncode == 0
    found = [log.splitlines()[0].rpartition(" ") for number in (0, 1) for log in logs_of(of_trial(folder, number))]
    assert len({pid for _, _, pid in found}) == 2
    cores = [words.split("[")[1].split("]")[0] for words, _, _ in found]
    assert len(set(cores)) == 2, "they have cores of their own"
    assert {words.split("] ")[1] for words, _, _ in found} == {str(len(cores[0].split(",")))}
    assert json.loads((folder / "tasks/0/result.json").read_text())["result"] == {"trials": 2}
    assert [trial.value for trial in trials_of(folder)] == [pytest.approx(0.4), pytest.approx(0.8)]


@pytest.mark.long
def test_trial_that_kills_its_process_does_not_disturb_the_other(project: Project) -> None:
    lrs = [0.1, 0.2, 0.3, 0.4]
    folder = start(project, fixed={"signal": 11}, space={"lr": {"choice": lrs}}, max_retries=1)
    assert wait(project).returncode == 0
    trials = trials_of(folder)
    assert [trial.state.name for trial in trials] == ["FAIL", "COMPLETE", "COMPLETE", "COMPLETE"]
    attempts = [records.attempts_started(of_trial(folder, number)) for number in range(4)]
    assert attempts == [2, 1, 1, 1]
    assert "\nnothing left\n" in logs_of(of_trial(folder, 0))[1]
    told = project.call("status", "study").stdout
    assert "trial 0: its process was killed by SIGSEGV" in told
    # the worker itself has not been started again
    assert records.attempts_started(RunFolder(folder / "tasks/0")) == 1


@pytest.fixture
def waiting(project: Project) -> tuple[Path, Path]:
    """A sweep whose two trials have begun, and the file for which they wait."""
    until = project.folder / "until"
    folder = start(project, fixed={"until": str(until), "epochs": 100_000})
    wait_until(lambda: all(of_trial(folder, number).metrics.exists() for number in (0, 1)))
    return folder, until


@pytest.mark.long
def test_cancelled_worker_gives_both_trials_back_and_resumes_them(project: Project, waiting: tuple[Path, Path]) -> None:
    folder, until = waiting
    shown = project.call("status", "study").stdout
    assert "2 running" in shown
    assert sorted(line.split()[4] for line in shown.splitlines() if line.startswith("0 ")) == ["0", "1"]
    assert project.call("cancel", "study").returncode == 0
    assert wait(project).returncode == 1
    assert [trial.state.name for trial in trials_of(folder)] == ["WAITING", "WAITING"]
    until.touch()
    assert project.call("resume", "study").returncode == 0
    assert wait(project).returncode == 0
    assert [trial.state.name for trial in trials_of(folder)] == ["COMPLETE", "COMPLETE"]
    assert [records.attempts_started(of_trial(folder, number)) for number in (0, 1)] == [2, 2]


@pytest.mark.long
def test_worker_that_is_killed_continues_both_trials(project: Project, waiting: tuple[Path, Path]) -> None:
    folder, until = waiting
    (log,) = logs_of(of_trial(folder, 0))
    trained_in = int(log.splitlines()[0].rpartition(" ")[2])
    os.kill(int(Path(f"/proc/{trained_in}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    # what it has started ends with it
    wait_until(lambda: not Path(f"/proc/{trained_in}").exists())
    until.touch()
    assert wait(project).returncode == 0
    assert [trial.state.name for trial in trials_of(folder)] == ["COMPLETE", "COMPLETE"]
    assert [records.attempts_started(of_trial(folder, number)) for number in (0, 1)] == [2, 2]


def test_commands_are_trained_at_the_same_time(project: Project) -> None:
    project.write("train.py", SCRIPT)
    folder = start(project, job={"command": "python train.py {lr}"})
    assert wait(project).returncode == 0
    trials = trials_of(folder)
    assert [trial.value for trial in trials] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"resources": {"nodes": 2}}, "trials_per_worker 2: they share one node: remove resources.nodes"),
        ({"resources": {"ntasks-per-node": 2}}, "each trial is trained by one process, not by ntasks-per-node 2"),
        ({"trials_per_worker": 0}, "trials_per_worker 0: expected at least 1"),
    ],
)
def test_what_cannot_be_divided_is_refused(project: Project, values: dict[str, Any], told: str) -> None:
    done = call_sweep(project, **values)
    assert done.returncode == 2
    assert told in done.stderr
