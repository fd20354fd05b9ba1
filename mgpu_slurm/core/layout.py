"""The name of every file of a run, of a group and of a sweep, and where the folders of runs are."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import set_mode

LONGEST_NAME = 100
RUN_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST_NAME - 1}}}")

RUNS = "runs"
"""The folder of runs in the one that a user stands in, where nothing else is said."""

RUNS_VARIABLE = "MGPU_RUNS"
DAMAGED = "damaged-"
"""Before the name of a checkpoint that is not what was written."""


STAGING_PREFIX = ".staging-"
TASKS = "tasks"
TRIALS = "trials"
FOLDER_MODE = {"owner": 0o700, "group": 0o750}


@dataclass(frozen=True)
class RunFolder:
    """Every file of one run, by name, or of a group: runs that were submitted together, as one job array.

    A run of a group lies in `tasks/<index>/` of the group's folder, and shares its spec, code and launch logs. A sweep
    is a group too: its workers lie there, and its trials in `trials/<number>/`.
    """

    path: Path

    @property
    def task(self) -> int | None:
        """The run's index in its group; None for a group, and for a run of its own."""
        return int(self.path.name) if self.path.parent.name == TASKS else None

    @property
    def group(self) -> RunFolder:
        """The group of a run that has one, the sweep of a trial; else the folder itself."""
        return RunFolder(self.path.parent.parent) if self.path.parent.name in (TASKS, TRIALS) else self

    @property
    def tasks(self) -> Path:
        return self.path / TASKS

    def of_task(self, task: int) -> RunFolder:
        return RunFolder(self.tasks / str(task))

    @property
    def trials(self) -> Path:
        return self.path / TRIALS

    def of_trial(self, number: int) -> RunFolder:
        return RunFolder(self.trials / str(number))

    @property
    def run(self) -> str:
        """`<name>`, `<group>/<index>`, or `<sweep>/trials/<number>`."""
        if self.task is not None:
            return f"{self.group.path.name}/{self.path.name}"
        return self.path.name if self.group == self else f"{self.group.path.name}/{TRIALS}/{self.path.name}"

    @property
    def sweep(self) -> Path:
        """What a sweep's file says, with what was laid on top."""
        return self.group.path / "sweep.yaml"

    @property
    def journal(self) -> Path:
        """A sweep's study, where it is not kept in a database."""
        return self.group.path / "study.journal"

    @property
    def trials_lock(self) -> Path:
        """Held by who takes a trial away from a worker."""
        return self.group.path / "trials.lock"

    @property
    def looks(self) -> Path:
        """How often somebody has looked for a sweep's dead workers."""
        return self.group.path / "looks"

    @property
    def sweep_lock(self) -> Path:
        """Held by who adds to a sweep."""
        return self.group.path / "sweep.lock"

    @property
    def summary(self) -> Path:
        """How a sweep stands, for `status`; workers write it, and it is made anew from the study when it is lost."""
        return self.group.path / "summary.json"

    @property
    def summary_lock(self) -> Path:
        """Held from the look at the study until that is written, so that no older look is written over a newer one."""
        return self.group.path / "summary.lock"

    @property
    def set_aside(self) -> Path:
        """Folders of trials that the study does not have any more, as after an older copy of it was restored."""
        return self.group.path / "set-aside"

    @property
    def parameters(self) -> Path:
        """A trial's parameters as the study keeps them: the folder is that trial's alone."""
        return self.path / "parameters.json"

    @property
    def config(self) -> Path:
        """The whole config of a trial, or of a run whose submission did not know it."""
        return self.path / "config.yaml"

    @property
    def spec(self) -> Path:
        return self.group.path / "spec.yaml"

    @property
    def environment(self) -> Path:
        return self.group.path / "environment.json"

    @property
    def code(self) -> Path:
        return self.group.path / "code"

    @property
    def function(self) -> Path:
        """The pickled job function, where it was given as an object that no module holds (a notebook's)."""
        return self.group.path / "function.pkl"

    def submission(self, first: int = 0) -> Path:
        """What sbatch got.

        Args:
            first: of a group that is larger than the cluster's arrays may be, the index at which this array starts.
        """
        return self.group.path / (f"submission-{first}.sh" if first else "submission.sh")

    @property
    def state(self) -> Path:
        return self.path / "state.json"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts.jsonl"

    @property
    def unlisted(self) -> Path:
        """How often SLURM has answered without the run's job, and since when."""
        return self.path / "unlisted.json"

    @property
    def claims(self) -> Path:
        """By token of a submission: the id of the job that works for it."""
        return self.path / "claims"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def rank_log(self, attempt: int, rank: int) -> Path:
        return self.logs / f"{attempt}-{rank}.log"

    def rank_failure(self, attempt: int, rank: int) -> Path:
        return self.logs / f"{attempt}-{rank}.failure.json"

    def rank_warnings(self, attempt: int, rank: int) -> Path:
        """What a rank found around it that it should not; only there where it found something."""
        return self.logs / f"{attempt}-{rank}.warnings.jsonl"

    @property
    def checkup(self) -> Path:
        """What the job of `doctor --submit` has found so far."""
        return self.path / "checkup.jsonl"

    def flight_prefix(self, attempt: int) -> Path:
        """With a rank's number behind it, what torch's flight recorder has written of its collectives."""
        return self.logs / f"{attempt}-flight-"

    def stacks(self, attempt: int) -> Path:
        """Of rank 0, the stacks of its threads where none of them can run; empty before, and gone after the attempt."""
        return self.logs / f"{attempt}-0.stacks"

    def secret(self, attempt: int) -> Path:
        """What the ranks of an attempt sign their messages with; there as long as it lasts, for its owner alone."""
        return self.path / f".secret-{attempt}"

    def secrets(self) -> list[Path]:
        """Return those that are there."""
        return list(self.path.glob(".secret-*"))

    def requeue_wish(self, attempt: int) -> Path:
        """There once a rank of this attempt has asked to be started again, where its exit code cannot say so."""
        return self.logs / f"{attempt}.requeue"

    def terminated(self, attempt: int) -> Path:
        """There once SIGTERM has ended the command of a rank of this attempt, where its exit code cannot say so."""
        return self.logs / f"{attempt}.terminated"

    def unfinished(self, attempt: int) -> Path:
        """There while a sweep's worker has a trial: where its ranks fail then, they start again in their place."""
        return self.logs / f"{attempt}.unfinished"

    def launch_log(self, name: str) -> Path:
        """Of the batch script of a job, or of the local supervisor; it has to have its folder before the job starts."""
        return self.group.logs / f"launch-{name}.log"

    @property
    def cancel_wish(self) -> Path:
        """There once somebody has asked a run, or all of a group, to end where a signal may not reach what it is meant
        for: a supervisor on another machine or not started yet, or the job that goes on with the run."""
        return self.path / "cancel"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int, number: int = 1) -> Path:
        """Return the folder of a checkpoint.

        Args:
            number: 1, 2, ... of the checkpoints of this step.
        """
        return self.checkpoints / f"step-{step:09d}{f'.{number}' if number > 1 else ''}"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def failure(self) -> Path:
        return self.path / "failure.json"

    def create(self, readable_by: str = "owner") -> None:
        """Makes the folder and its `logs/`, which has to exist before SLURM opens the first log."""
        self.path.mkdir(parents=True)
        set_mode(self.path, FOLDER_MODE[readable_by])
        self.logs.mkdir()

    def create_task(self) -> None:
        """Makes the folder of a run of a group, where it is not there: 10,000 are not made before they start."""
        if self.task is not None:
            self.logs.mkdir(parents=True, exist_ok=True)


def runs_root() -> Path:
    """`$MGPU_RUNS`, else `runs/` of the working directory; absolute."""
    return Path(os.environ.get(RUNS_VARIABLE) or RUNS).absolute()


def state_home() -> Path:
    """Where this user's index of runs folders lives."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "mgpu_slurm"


def make_writable(folder: Path) -> None:
    """Creates a folder for runs, or says in one line why nothing can be written there."""
    if folder.name in (TASKS, TRIALS):
        raise UserError(f"runs folder {str(folder)!r}: {folder.name!r} is a reserved name: choose another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"runs folder {str(folder)!r} cannot be written ({error.strerror}): set MGPU_RUNS to a folder of yours"
        ) from None
