"""Sweeps whose best trials are confirmed, by real processes."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pytest
import yaml

from mgpu_slurm.run_folder.checkpoint_names import newest_checkpoint
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.search import sweep_file
from mgpu_slurm.sweeps.study import trial_queue as studies
from tests.end_to_end.test_pausing_sweeps import difference
from tests.end_to_end.test_seeded_sweeps import JOB
from tests.end_to_end.test_sweeps import wait
from tests.support import Project, processes_of, wait_until

SCRIPT = """
import argparse, os, time

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--seed", type=int)
given = parser.parse_args()
while given.seed and not os.path.exists(os.environ["MGPU_PROJECT"] + "/go"):
    time.sleep(0.02)
print('{"loss": %r}' % (given.lr * (1 + given.seed)))
"""


def start(project: Project, **values: Any) -> RunFolder:
    base = {"study": "study", "metric": "loss", "direction": "minimize", "workers": 2, "trials": 4,
            "sampler": {"name": "tpe", "seed": 1}, "confirm": {"top": 2, "seeds": 3},
            "space": {"lr": {"float": [1e-3, 0.02], "log": True}}}  # fmt: skip
    project.write("sweep.yaml", yaml.safe_dump(base | values))
    done = project.call("sweep", "sweep.yaml", "--executor", "local", "--no-follow")
    assert done.returncode == 0, done.stderr
    assert "as study study-confirm\n" in done.stdout
    return RunFolder(project.runs / "study")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_best_trials_are_trained_as_runs_of_their_own(project: Project) -> None:
    project.write("job.py", JOB)
    folder = start(project, job="job.py", fixed={"epochs": 3})
    assert wait(project).returncode == 0
    own = RunFolder(project.runs / "study-confirm")
    trials = studies.load(sweep_file.load(own.sweep), own.journal).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 2
    best = project.json("best", "study")["confirmation"]
    assert {each["number"] for each in best["trials"]} < set(range(4))
    assert best["seeds"] == [1, 2, 3]
    # as alone
    run, facts = project.run("job.py", "--config", str(own.of_trial(0).config), "seed=2")
    assert facts["state"] == "COMPLETED", facts
    assert difference(RunFolder(run), own.of_trial(0).of_seed(2)) < 1e-6
    shown = project.call("best", "study").stdout
    assert "confirmed with seeds 1, 2, 3, as study study-confirm" in shown
    # the usual commands
    assert "2: 2 complete" in project.call("status", "study-confirm").stdout
    assert [group["metrics"]["loss"]["count"] for group in aggregated(project)] == [3, 3]
    told = project.call("sweep", "sweep.yaml", "study=study-confirm")
    assert told.returncode == 2
    assert "confirms study study, whose workers train it: name study instead" in told.stderr
    told = project.call("resume", "study-confirm")
    assert told.returncode == 2
    assert "study study: no trial is left" in told.stderr
    assert project.call("clean", "study-confirm", "--yes").returncode == 0
    assert newest_checkpoint(folder.of_trial(0)) is not None, "what the links lead to is not deleted"


def aggregated(project: Project) -> list[dict[str, Any]]:
    return list(project.json("aggregate", "study-confirm", "--on", "progress")["groups"])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_killed_workers_are_replaced_in_the_middle_of_it(project: Project) -> None:
    project.write("train.py", SCRIPT)
    folder = start(project, job={"command": "python train.py --lr {lr} --seed {seed}"})
    own = RunFolder(project.runs / "study-confirm")
    wait_until(lambda: own.trials.is_dir() and all(own.of_trial(number).seeds.is_dir() for number in (0, 1)))
    supervisors = [processes_of(folder.of_task(number).path) for number in (0, 1)]
    for pid in sorted({pid for pids in supervisors for pid in pids}):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    ended = wait(project)
    assert ended.returncode == 1
    assert "2 of the best not confirmed yet" in ended.stdout
    (project.folder / "go").touch()
    resumed: subprocess.CompletedProcess[str] = project.call("resume", "study-confirm")
    assert resumed.returncode == 0, resumed.stderr
    assert wait(project).returncode == 0
    trials = studies.load(sweep_file.load(own.sweep), own.journal).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 2
    for trial in trials:
        assert trial.value == pytest.approx(3 * trial.params["lr"])
    best = project.json("best", "study")["confirmation"]["trials"]
    assert len(best) == 2
    assert best[1]["is_worse"]
