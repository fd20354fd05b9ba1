"""The names of all files of a run, group or sweep, and the location of the runs folder."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mgpu_slurm.core.files import set_mode

LONGEST_NAME = 100
RUN_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST_NAME - 1}}}")

RUNS = "runs"
"""The default runs folder, in the working directory."""

RUNS_VARIABLE = "MGPU_RUNS"
DAMAGED = "damaged-"
"""Prefix of the name of a damaged checkpoint."""


STAGING_PREFIX = ".staging-"
TASKS = "tasks"
TRIALS = "trials"
SEEDS = "seeds"
FOLDER_MODE = {"owner": 0o700, "group": 0o750}


@dataclass(frozen=True)
class RunFolder:
    """The files of a run, by name, or of a group: runs that were submitted together as one job array.

    A run of a group is in `tasks/<index>/` of the group's folder, and shares its spec, code and launch logs. A sweep is
    a group too: its workers are in `tasks/`, and its trials in `trials/<number>/`, with their runs in `seeds/<seed>/`
    if each is trained with several seeds.
    """

    path: Path

    @property
    def task(self) -> int | None:
        """The run's index in its group; None for a group or a single run."""
        return int(self.path.name) if self.path.parent.name == TASKS else None

    # cached: lists of a thousand runs ask for it ten times each
    @cached_property
    def group(self) -> RunFolder:
        """The group of a run, or the sweep of a trial; else the folder itself."""
        above = RunFolder(self.path.parent.parent)
        return above.group if self._is_seed else above if self.path.parent.name in (TASKS, TRIALS) else self

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
    def _is_seed(self) -> bool:
        # a runs folder may have any name
        return self.path.parent.name == SEEDS and self.path.parent.parent.parent.name == TRIALS

    @property
    def is_trial(self) -> bool:
        """Whether it is a trial, or the run of one with a seed."""
        return self._is_seed or self.path.parent.name == TRIALS

    @property
    def seeds(self) -> Path:
        return self.path / SEEDS

    def of_seed(self, seed: int) -> RunFolder:
        """Return the run of a trial with one of several seeds."""
        return RunFolder(self.seeds / str(seed))

    def with_seeds(self) -> list[RunFolder]:
        """Return the folder of a trial, and those of its runs with several seeds."""
        return [self, *(map(RunFolder, self.seeds.iterdir()) if self.seeds.is_dir() else ())]

    @property
    def run(self) -> str:
        """`<name>`, `<group>/<index>`, `<sweep>/trials/<number>`, or `<sweep>/trials/<number>/seeds/<seed>`."""
        if self._is_seed:
            return f"{RunFolder(self.path.parent.parent).run}/{SEEDS}/{self.path.name}"
        if self.task is not None:
            return f"{self.group.path.name}/{self.path.name}"
        return self.path.name if self.group == self else f"{self.group.path.name}/{TRIALS}/{self.path.name}"

    @property
    def sweep(self) -> Path:
        """A sweep's file, with the overrides merged in."""
        return self.group.path / "sweep.yaml"

    @property
    def journal(self) -> Path:
        """A sweep's study, if it is not in a database."""
        return self.group.path / "study.journal"

    @property
    def trials_lock(self) -> Path:
        """Held while a trial is given to a worker or taken away from it."""
        return self.group.path / "trials.lock"

    @property
    def looks(self) -> Path:
        """Counts how often a sweep's dead workers were looked for."""
        return self.group.path / "looks"

    @property
    def sweep_lock(self) -> Path:
        """Held while something is added to a sweep."""
        return self.group.path / "sweep.lock"

    @property
    def summary(self) -> Path:
        """A sweep's status, for `status`; written by workers, and rebuilt from the study when lost."""
        return self.group.path / "summary.json"

    @property
    def summary_lock(self) -> Path:
        """Held while the study is read and the summary written, so that an older one never replaces a newer one."""
        return self.group.path / "summary.lock"

    @property
    def set_aside(self) -> Path:
        """Folders of trials that the study no longer has, for example after an older copy of it was restored."""
        return self.group.path / "set-aside"

    @property
    def copies(self) -> Path:
        """Checkpoints for copies of trials that have not begun, by the number of the trial that each replaces."""
        return self.group.path / "copies"

    @property
    def copied(self) -> Path:
        """In the folder of a trial that is a copy: which of its checkpoints is that of another trial."""
        return self.path / "copied.json"

    @property
    def parameters(self) -> Path:
        """A trial's parameters as in the study: they show that the folder belongs to this trial only."""
        return self.path / "parameters.json"

    @property
    def config(self) -> Path:
        """The full config of a trial, or of a run whose config was not known at submission."""
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
    def package(self) -> Path:
        """Where ranks in a container find this package, and nothing else to import."""
        return self.group.path / "package"

    @property
    def function(self) -> Path:
        """The pickled job function, if it was given as an object that is in no module (such as a notebook's)."""
        return self.group.path / "function.pkl"

    def submission(self, first: int = 0) -> Path:
        """Return the path of the batch script.

        Args:
            first: the index at which this array starts, for a group that is larger than the cluster's largest array.
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
        """Counts how often SLURM has answered without listing the run's job, and since when."""
        return self.path / "unlisted.json"

    @property
    def claims(self) -> Path:
        """One file per submission token, with the id of the job that holds it."""
        return self.path / "claims"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def rank_log(self, attempt: int, rank: int) -> Path:
        return self.logs / f"{attempt}-{rank}.log"

    def rank_failure(self, attempt: int, rank: int) -> Path:
        return self.logs / f"{attempt}-{rank}.failure.json"

    def rank_compiling(self, attempt: int, rank: int) -> Path:
        """Return the file that changes while a rank compiles its model, and is deleted afterwards."""
        return self.logs / f"{attempt}-{rank}.compiling"

    def rank_warnings(self, attempt: int, rank: int) -> Path:
        """Return the file with problems that a rank found in its environment; it exists only if there are any."""
        return self.logs / f"{attempt}-{rank}.warnings.jsonl"

    @property
    def checkup(self) -> Path:
        """The results of the `doctor --submit` job so far."""
        return self.path / "checkup.jsonl"

    def flight_prefix(self, attempt: int) -> Path:
        """Return the prefix of the dumps of torch's flight recorder; the rank's number follows."""
        return self.logs / f"{attempt}-flight-"

    def stacks(self, attempt: int, process: int = 0) -> Path:
        """Return the file for the stacks of rank 0's threads if none of them can run.

        It is empty until then, and deleted after the attempt. `process` is as in `Rank`.
        """
        return self.logs / f"{attempt}-{process}.stacks"

    def secret(self, attempt: int) -> Path:
        """Return the file with the key that signs the messages of an attempt's ranks.

        It exists during the attempt, readable by its owner only.
        """
        return self.path / f".secret-{attempt}"

    def secrets(self) -> list[Path]:
        """Return the existing secrets."""
        return list(self.path.glob(".secret-*"))

    def requeue_request(self, attempt: int) -> Path:
        """Return the marker that a rank of this attempt asked for a restart, for when its exit code cannot say so."""
        return self.logs / f"{attempt}.requeue"

    def terminated(self, attempt: int) -> Path:
        """Return the marker that a SIGTERM ended ranks, with their reason if they saved; exit codes do not say so."""
        return self.logs / f"{attempt}.terminated"

    def unfinished(self, attempt: int, process: int = 0) -> Path:
        """Return the marker that a sweep's worker is running a trial; if its ranks fail then, they restart in place."""
        return self.logs / f"{attempt}{f'-{process}' if process else ''}.unfinished"

    def launch_log(self, name: str) -> Path:
        """Return the log of a job's batch script or a local supervisor; its folder must exist before the job starts."""
        return self.group.logs / f"launch-{name}.log"

    @property
    def cancel_request(self) -> Path:
        """Marks that a run or group was asked to end where a signal may not arrive: at a supervisor on another machine
        or not started yet, or at the job that continues the run."""
        return self.path / "cancel"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def sinks(self) -> Path:
        """What trackers, such as MLflow, have of the run."""
        return self.path / "sinks.json"

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
    def saves(self) -> Path:
        """The times of all checkpoints that were saved, one line each."""
        return self.path / "saves.jsonl"

    @property
    def usage(self) -> Path:
        """What the ranks used of their nodes, a file for each attempt and node."""
        return self.path / "usage"

    def node_usage(self, attempt: int, node: str) -> Path:
        return self.usage / f"{attempt}-{node}.jsonl"

    @property
    def accounting(self) -> Path:
        """What SLURM's accounting has recorded of the job steps of a run that has ended."""
        return self.usage / "accounting.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def memory(self) -> Path:
        return self.path / "memory.json"

    @property
    def memory_plan(self) -> Path:
        """What a job would need of a GPU's memory; only in the folder of a rehearsal."""
        return self.path / "memory-plan.json"

    @property
    def profile(self) -> Path:
        """The recorded steps, one trace for each rank and attempt."""
        return self.path / "profile"

    def trace(self, attempt: int, rank: int) -> Path:
        return self.profile / f"{attempt}-{rank}.json.gz"

    @property
    def speed(self) -> Path:
        """The steps of a run that only measures its speed."""
        return self.path / "speed.json"

    @property
    def failure(self) -> Path:
        return self.path / "failure.json"

    def create(self, readable_by: str = "owner") -> None:
        """Create the folder and its `logs/`, which must exist before SLURM opens the first log."""
        self.path.mkdir(parents=True)
        set_mode(self.path, FOLDER_MODE[readable_by])
        self.logs.mkdir()

    def create_task(self) -> None:
        """Create the folder of a run of a group if it is missing; it is not created earlier, as there may be 10,000."""
        if self.task is not None:
            self.logs.mkdir(parents=True, exist_ok=True)


def runs_root() -> Path:
    """Return the absolute path of `$MGPU_RUNS`, else of `runs/` in the working directory."""
    return Path(os.environ.get(RUNS_VARIABLE) or RUNS).absolute()
