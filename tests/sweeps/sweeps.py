"""A sweep's folder as its submission leaves it, and workers' parts in it that are played in one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from optuna.study import Study

from mgpu_slurm.core import files, processes
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import Spec, Target
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.client.messages import Assignment, Leave
from mgpu_slurm.sweeps.client.study_client import StudyClient
from mgpu_slurm.sweeps.search import sweep_file
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import trial_queue as studies

VALUES: dict[str, Any] = {
    "study": "s",
    "job": "job.py",
    "metric": "score",
    "sampler": "random",
    "trials": 4,
    "workers": 2,
    "space": {"x": {"float": [0.0, 1.0]}},
}


def make(base: Path, **values: Any) -> RunFolder:
    folder = RunFolder(base / "s")
    folder.create()
    folder.trials.mkdir()
    files.write_whole(folder.sweep, configs.dump_yaml(VALUES | values))
    workers = sweep_of(folder).workers
    target = Target(function="job.py:train")
    Spec("s", target, "local", Resources(), kind="sweep", tasks=workers).write(folder)
    records.update_state(folder, run="s", kind="sweep", executor="local", tasks=workers)
    studies.create(sweep_of(folder), folder.journal)
    return folder


def sweep_of(folder: RunFolder) -> Sweep:
    return sweep_file.load(folder.sweep)


def study_of(folder: RunFolder) -> Study:
    return studies.load(sweep_of(folder), folder.journal)


def worker(folder: RunFolder, number: int, attempt: int = 1, process: int = 0) -> StudyClient:
    """The worker's part in a new attempt, which this process vouches for."""
    own = folder.of_task(number)
    own.create_task()
    for one in range(records.attempts_started(own) + 1, attempt + 1):
        records.record_event(own, "started", attempt=one, job_id=str(number), nodes=["here"])
    vouched = {"host": os.uname().nodename, "supervisor": [os.getpid(), processes.started_at(os.getpid())]}
    records.update_state(own, state="RUNNING", kind="worker", attempts=attempt, job_id=str(number), **vouched)
    return StudyClient(own, Spec("s/0", Target(function="job.py:train"), "local", Resources()), attempt, process)


def kill(folder: RunFolder, number: int) -> None:
    """Nobody is there any more who vouches for the worker, and nobody has said why."""
    records.update_state(folder.of_task(number), supervisor=[os.getpid(), 0])


def begin(part: StudyClient) -> Assignment:
    order = part.next(Stop.NO)
    assert isinstance(order, Assignment), order
    return order


def leave(part: StudyClient) -> Leave:
    order = part.next(Stop.NO)
    assert isinstance(order, Leave), order
    return order


def finish(part: StudyClient, score: float) -> None:
    part.complete({"score": score}, {}, step=1, progress=1)


def states(folder: RunFolder) -> list[str]:
    """Of the trials that are there: those that somebody has begun."""
    return [trial.state.name for trial in study_of(folder).trials]
