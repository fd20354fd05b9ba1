"""Sweeps as job arrays of a real SLURM: whatever it does to workers, each trial ends once and keeps its work."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mgpu_slurm.checkpoints import folder as checkpoints
from mgpu_slurm.checkpoints.reader import StoredTensors
from mgpu_slurm.core import interpreter
from mgpu_slurm.registry import current_state
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.checkpoint_names import complete_checkpoints, newest_checkpoint
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.sweeps.scheduling import samplers
from mgpu_slurm.sweeps.search import sweep_file
from mgpu_slurm.sweeps.study import claims as claiming
from mgpu_slurm.sweeps.study import trial_queue as studies
from tests.on_slurm.cluster import Cluster
from tests.support import Project, wait_until
from tests.sweep_job import JOB, epochs, pids, seen

LOOK_EVERY = 0.5
"""Seconds; each time SLURM is asked."""


@pytest.fixture
def project(slurm_project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    # SLURM's commands for this process too, which looks at workers without starting the program each time
    monkeypatch.setenv("PATH", slurm_project.environ["PATH"])
    return slurm_project


def start(project: Project, **values: Any) -> RunFolder:
    project.write("job.py", JOB)
    base = {"study": "study", "job": "job.py", "metric": "score", "space": {"x": {"float": [0.0, 1.0]}}}
    resources = {"gpus-per-node": 0} | values.pop("resources", {})
    project.write("sweep.yaml", yaml.safe_dump(base | {"resources": resources} | values))
    done = project.call("sweep", "sweep.yaml")
    assert done.returncode == 0, done.stderr
    return RunFolder(project.runs / "study")


def trials_of(folder: RunFolder) -> list[Any]:
    sweep = sweep_file.load(folder.sweep)
    return studies.load(sweep, folder.journal).trials


def states(folder: RunFolder) -> list[str]:
    return [trial.state.name for trial in trials_of(folder)]


def workers(folder: RunFolder) -> list[RunState]:
    """As `status` shows them."""
    return [state for _, state in current_state.current([folder])]


def trial_of(folder: RunFolder, worker: int) -> int | None:
    """The trial that a worker has."""
    number: int | None = records.read_state(folder.of_task(worker)).trial
    return number


def finish(project: Project) -> int:
    done = project.call("wait", "study", "--timeout", "90")
    assert done.returncode in (0, 1), done.stderr
    return done.returncode


def check_ended_once(folder: RunFolder, count: int) -> None:
    """Every trial has come to its end, once, with its value."""
    trials = trials_of(folder)
    assert [trial.number for trial in trials] == list(range(count))
    assert states(folder) == ["COMPLETE"] * count
    for trial in trials:
        own = folder.of_trial(trial.number)
        assert not own.failure.exists()
        assert json.loads(own.result.read_text())["value"] == trial.value
        ends = [event.others["how"] for event in records.events(own) if event.event == "ended"]
        assert [how.startswith("score ") for how in ends].count(True) == 1


def test_workers_of_an_array_share_trials_and_more_can_be_added(project: Project) -> None:
    gate = project.folder / "gate"
    folder = start(project, trials=8, workers=3, fixed={"does": "waits", "place": str(project.folder)})
    (job,) = {state.job_id.partition("_")[0] for state in workers(folder)}
    assert [state.job_id for state in workers(folder)] == [f"{job}_{number}" for number in range(3)]
    wait_until(lambda: states(folder).count("RUNNING") == 3, pause=LOOK_EVERY)
    done = project.call("sweep", "sweep.yaml", "trials=12", "workers=4")
    told = "3 workers running\ntrials    12 (was 8)\nworkers   4 (was 3)\nstarts    1 worker\n"
    assert told in done.stdout, done.stdout + done.stderr
    wait_until(lambda: states(folder).count("RUNNING") == 4, pause=LOOK_EVERY)
    gate.touch()
    assert finish(project) == 0
    check_ended_once(folder, 12)
    (facts,) = project.json("status", "study")
    assert (facts["kind"], facts["state"], facts["reason"]) == ("sweep", "COMPLETED", "12 of 12 trials")
    assert [worker["attempts"] for worker in facts["workers"]] == [1] * 4
    assert facts["workers"][3]["job_id"].endswith("_3")
    best = project.json("best", "study")
    assert best["value"] == max(trial.value for trial in trials_of(folder))
    assert "--gpus-per-node 0 " in best["command"]


@pytest.mark.long
def test_two_node_worker_continues_after_time_limit_and_preemption(project: Project, cluster: Cluster) -> None:
    fixed = {"does": "goes on until told", "epochs": 100000, "pause": 0.05, "place": str(project.folder)}
    folder = start(project, trials=2, fixed=fixed, resources={"nodes": 2, "time": 5})
    trial = folder.of_trial(0).path
    wait_until(lambda: len(epochs(trial).get(1, [])) > 2)
    (state,) = workers(folder)
    job = state.job_id
    # its lead signal, as SLURM sends it some time before the limit
    cluster.run("scancel", "--signal=USR2", job)
    cluster.until_job(job, "PENDING")
    cluster.start_now(job)
    wait_until(lambda: len(epochs(trial).get(2, [])) > 2)
    taker = cluster.preempt(["n1", "n2", "n3", "n4"])
    wait_until(lambda: workers(folder)[0].state == "PENDING", pause=LOOK_EVERY)
    assert states(folder) == ["WAITING"]
    (project.folder / "gate").touch()
    cluster.start_now(job)
    cluster.release(taker)
    assert finish(project) == 0
    check_ended_once(folder, 2)
    for rank in range(2):
        found = epochs(trial, rank)
        assert list(found) == [1, 2, 3]
        assert list(itertools.chain(*found.values())) == list(range(1, found[3][-1] + 1))
        assert len(pids(trial, rank)) == 3
        # the trial after it has the processes of its last attempt
        assert pids(folder.of_trial(1).path, rank) == pids(trial, rank)[2:]
    assert [worker.attempts for worker in workers(folder)] == [3]
    assert not [trial for trial in trials_of(folder) if claiming.LOSSES in trial.system_attrs]


@pytest.mark.long
def test_worker_on_a_broken_node_leaves_its_trials_to_the_others(project: Project) -> None:
    fixed = {"does": "waits", "broken": "n2", "pause": 1.0, "place": str(project.folder)}
    # a node for each of them
    folder = start(project, trials=12, workers=4, fixed=fixed, resources={"cpus-per-task": 4})
    # whether its node is broken shows when another worker tries one of its trials
    wait_until(lambda: any(samplers.DOUBT in trial.system_attrs for trial in trials_of(folder)), pause=LOOK_EVERY)
    (project.folder / "gate").touch()
    assert finish(project) == 0
    (broken,) = [state for state in workers(folder) if state.state == "FAILED"]
    assert re.search(r"trial \d+ failed here, but runs well elsewhere: ValueError: broken on 0", broken.reason)
    found = states(folder)
    assert 2 <= found.count("FAIL") <= 4
    assert found.count("COMPLETE") == 12 - found.count("FAIL")


def processes(part: str, worker: RunFolder) -> list[int]:
    """Those of a worker that are such a part of it, by their numbers here: inside of a node they have others."""
    started = list(map(os.fsencode, interpreter.command(sys.executable, "mgpu_slurm.job", part, str(worker.path))))
    found = []
    for entry in Path("/proc").iterdir():
        # one may end meanwhile
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if words[1 : len(started)] == started[1:]:
                found.append(int(entry.name))
    return found


class Chaos:
    """Disturbs workers of a sweep whose trials wait for it, one after the other."""

    def __init__(self, project: Project, cluster: Cluster, folder: RunFolder) -> None:
        self._project = project
        self._cluster = cluster
        self._folder = folder
        self.disturbed: dict[int, str] = {}
        """Trials, and what came over them."""

    def run(self, seed: int) -> None:
        """Each way, in an order and with workers that are drawn from the seed."""
        draw = random.Random(seed)
        ways = [self.cancel, self.preempt, self.kill_batch_step, self.kill_rank, self.lose_node, self.kill_rank]
        for disturb in draw.sample(ways, len(ways)):
            worker, trial = draw.choice(self._waiting_for_it())
            print(f"{disturb.__name__}: worker {worker} with trial {trial}")
            disturb(worker)
            self.disturbed[trial] = disturb.__name__

    def until_all_have_ended(self) -> None:
        wait_until(lambda: not self._goes_on(), pause=LOOK_EVERY)

    def _goes_on(self) -> bool:
        self._start_what_waits()
        return bool({"WAITING", "RUNNING"} & set(states(self._folder)))

    def _waiting_for_it(self) -> list[tuple[int, int]]:
        """Workers with trials in the middle of their first attempt."""
        found: list[tuple[int, int]] = []

        def there() -> bool:
            self._start_what_waits()
            at_work = [number for number, state in enumerate(workers(self._folder)) if state.state == "RUNNING"]
            having = [(number, trial_of(self._folder, number)) for number in at_work]
            found[:] = [(number, trial) for number, trial in having if trial is not None and self._waits(trial)]
            return bool(found)

        wait_until(there, pause=LOOK_EVERY)
        return found

    def _waits(self, trial: int) -> bool:
        # what a worker that was ended has last said of itself is not true any more
        if trial in self.disturbed:
            return False
        own = self._folder.of_trial(trial)
        # there is something to go on from
        return epochs(own.path) == {1: [1, 2]} and bool(complete_checkpoints(own))

    def _start_what_waits(self) -> None:
        """SLURM holds back what it has requeued."""
        for state in workers(self._folder):
            if state.state == "PENDING" and self._cluster.job(state.job_id).get("Reason") == "BeginTime":
                self._cluster.start_now(state.job_id)

    def _until(self, worker: int, *wanted: str) -> None:
        wait_until(lambda: workers(self._folder)[worker].state in wanted, pause=LOOK_EVERY)

    def _restart(self) -> None:
        done = self._project.call("sweep", "sweep.yaml")
        assert done.returncode == 0, done.stderr
        # two where SLURM gives up a job of a lost node, which it mostly requeues (JobLaunchFailure)
        has_started = re.search(r"^starts    (1 worker|2 workers)$", done.stdout, re.MULTILINE)
        have_all_begun = len(trials_of(self._folder)) == sweep_file.load(self._folder.sweep).trials
        # those who are left may need no other worker for the last trials
        assert has_started or have_all_begun, done.stdout + done.stderr

    def _job(self, worker: int) -> str:
        return str(workers(self._folder)[worker].job_id)

    def cancel(self, worker: int) -> None:
        self._cluster.run("scancel", self._job(worker))
        self._until(worker, "CANCELLED")
        self._restart()

    def preempt(self, worker: int) -> None:
        node = self._cluster.job(self._job(worker))["NodeList"]
        self._cluster.release(self._cluster.preempt([node]))
        self._until(worker, "PENDING")

    def kill_batch_step(self, worker: int) -> None:
        self._kill("batch", worker)
        self._until(worker, "FAILED")
        self._restart()

    def kill_rank(self, worker: int) -> None:
        attempts = records.attempts_started(self._folder.of_task(worker))
        self._kill("worker", worker)
        # in its place
        wait_until(lambda: records.attempts_started(self._folder.of_task(worker)) > attempts)

    def lose_node(self, worker: int) -> None:
        node = self._cluster.job(self._job(worker))["NodeList"]
        self._cluster.node_down(node)
        self._until(worker, "PENDING")
        self._cluster.node_up(node)

    def _kill(self, part: str, worker: int) -> None:
        (pid,) = processes(part, self._folder.of_task(worker))
        os.kill(pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1])
def test_no_trial_is_lost_or_counted_twice_whatever_happens(project: Project, cluster: Cluster, seed: int) -> None:
    fixed = {"does": "waits", "epochs": 4, "place": str(project.folder)}
    # a node for each of them
    folder = start(project, trials=12, workers=3, fixed=fixed, resources={"cpus-per-task": 4})
    chaos = Chaos(project, cluster, folder)
    chaos.run(seed)
    (project.folder / "gate").touch()
    chaos.until_all_have_ended()
    assert finish(project) == 0
    check_ended_once(folder, 12)
    assert len(chaos.disturbed) == 6
    for trial in trials_of(folder):
        own = folder.of_trial(trial.number).path
        assert {line["x"] for line in seen(own) if "x" in line} == {trial.params["x"].hex()}
        # no epoch is done twice, but for the one in which a rank was killed
        done, is_lost = epochs(own), claiming.LOSSES in trial.system_attrs
        how = chaos.disturbed.get(trial.number)
        if how is None:
            assert (done, is_lost) == ({1: [1, 2, 3, 4]}, False)
        elif how in ("cancel", "preempt"):
            assert (done, is_lost) == ({1: [1, 2], 2: [3, 4]}, False)
        elif how != "kill_batch_step":
            assert (done, is_lost) == ({1: [1, 2], 2: [2, 3, 4]}, True)
        else:
            # SLURM tells its ranks to end, and kills them when it likes
            assert done in ({1: [1, 2], 2: [3, 4]}, {1: [1, 2], 2: [2, 3, 4]})
    # what the best one has kept is worth what it is said to be
    best = project.json("best", "study")
    kept = newest_checkpoint(folder.of_trial(best["number"]))
    assert kept is not None
    stored = StoredTensors(checkpoints.tensor_files(kept), like={})
    model = torch.nn.Linear(1, 1)
    model.load_state_dict({name: stored[f"model.{name}"] for name in model.state_dict()})
    assert float(next(model.parameters()).detach()) == best["value"] == max(trial.value for trial in trials_of(folder))
