"""The typed request of a user: validated once, written to `spec.yaml`, and read from there by all later parts."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import write_whole
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.config import Config
from mgpu_slurm.request.container import Container
from mgpu_slurm.request.parallelism import DEFAULT_PARALLELISM, Parallelism
from mgpu_slurm.request.profile_window import ProfileWindow
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.run_folder.layout import LONGEST_NAME, RUN_NAME, RunFolder
from mgpu_slurm.run_folder.notification import check_address

ExecutorName = Literal["slurm", "allocation", "local"]
Kind = Literal["run", "sweep"]
Readers = Literal["owner", "group"]


ATTEMPT_VARIABLE = "MGPU_ATTEMPT"
"""The number of the attempt, from 1, in the environment of every rank."""

FLIGHT_VARIABLE = "TORCH_FR_DUMP_TEMP_FILE"
"""Torch's variable for the path prefix of flight recorder dumps; the rank's number follows."""

STUCK_AFTER_VARIABLE = "MGPU_STUCK_AFTER"
"""Minutes, in the environment of every rank; see `Spec.stuck_after`."""

PROCESS_VARIABLE = "MGPU_PROCESS"
"""The number of a process of a sweep's worker that trains several trials at once, from 1; unset for others."""

GPU_SHARE_VARIABLE = "MGPU_GPU_SHARE"
"""The part of its GPU's memory, above 0 to 1, that each process of such a worker may use."""

SETUP_FAILED_VARIABLE = "MGPU_SETUP_FAILED"
"""The first line of a cluster's `setup` that failed, in the environment of every rank; unset if none did."""

REQUEUE_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: a rank that exits with it asks to be restarted as the next attempt."""

TERMINATED_EXIT_CODE = 143
"""128 + SIGTERM, as a shell reports a process ended by SIGTERM: a rank that saved and exited on request."""

SEED_PLACE = "{seed}"
"""Placeholder for the seed in a command that runs with several seeds."""

_SEEDS = re.compile(r"(?P<runs>[1-9][0-9]{0,9})(?:%(?P<at_once>[1-9][0-9]{0,9}))?")


@dataclass(frozen=True)
class Target:
    """The program of each rank: a job function of the snapshot, a pickled one, or a command. Exactly one is set."""

    function: str | None = None
    """`package.module:name` or `path/to/file.py:name`, with the path relative to the working directory."""
    pickled: str | None = None
    """The name of a function that was given as an object and is pickled in the run folder."""
    command: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        assert sum(value is not None for value in (self.function, self.pickled, self.command)) == 1, self

    @property
    def is_command(self) -> bool:
        return self.command is not None

    @property
    def label(self) -> str:
        """`jobs.digits:train`, or the command line, for display."""
        import shlex

        return self.function or self.pickled or shlex.join(self.command or ())


@dataclass(frozen=True)
class Measurement:
    """The optimizer steps after which a run that only measures its speed ends."""

    steps: int
    """Number of steps that are measured."""
    warm_up: int
    """Number of steps before them."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"--steps {self.steps}: expected at least 1")
        if self.warm_up < 0:
            raise UserError(f"--warm-up {self.warm_up}: expected 0 or more")

    @property
    def last_step(self) -> int:
        return self.warm_up + self.steps


@dataclass(frozen=True)
class Spec:
    """A submitted run, complete: `resume` needs nothing else."""

    run: str
    target: Target
    executor: ExecutorName
    resources: Resources
    config: Config = field(default_factory=dict)
    """The job's config as plain values, with defaults filled in unless `config_base` is set."""
    config_base: str | None = None
    """The folder that relative paths in an incomplete config start from. The job fills in the defaults at each attempt
    and writes the result to `config.yaml`. None for a complete config."""
    signal: str = "USR2"
    lead: int | None = None
    """Seconds between the signal and the time limit; None without a time limit."""
    kind: Kind = "run"
    tasks: int | None = None
    """Number of tasks of its job array: runs, one per seed, or a sweep's workers; None for a single run, and for one of
    these tasks."""
    at_once: int | None = None
    """Maximum number of tasks that run at the same time; None for no limit."""
    after: tuple[str, ...] = ()
    """Dependencies of the first attempt: `afterok:RUN` or `afterany:RUN`."""
    max_requeues: int = 20
    retries: int | None = None
    """Maximum consecutive restarts after a failure of any kind; None restarts only after failures of the cluster."""
    stuck_after: float = 30.0
    """Minutes without progress on a rank after which an attempt is stopped and the next one started; 0 disables."""
    kill_wait: int = 30
    """Seconds between SIGTERM and SIGKILL, locally and in an allocation; for queued jobs the site sets them."""
    parallelism: Parallelism = DEFAULT_PARALLELISM
    profile: str | None = None
    """The steps and ranks that are recorded, as given; see `ProfileWindow`."""
    stage: tuple[str, ...] = ()
    """Absolute paths of data sets to copy to the disk of each node."""
    stage_to: str | None = None
    """The folder there, with variables of the node; None for that of temporary files."""
    notify: str | None = None
    """The address of a web hook for the end of the run; `$NAME` is a variable of the job's environment."""
    sinks: tuple[str, ...] = ()
    """Trackers to which reports are sent; see `trackers.destinations`."""
    measurement: Measurement | None = None
    """Ends the run once its speed is measured; None for the whole job."""
    cluster: str | None = None
    setup: tuple[str, ...] = ()
    """Shell lines that the batch script runs before the ranks start."""
    rename: dict[str, str | None] = field(default_factory=dict)
    """This cluster's form of an sbatch flag; None omits the flag. See `submission.cluster_file`."""
    environment: dict[str, str] = field(default_factory=dict)
    container: Container | None = None
    """What ranks run in; None for the nodes' own system."""
    readable_by: Readers = "owner"
    project: str = ""
    """The folder of which the snapshot was taken."""
    workdir: str = "."
    """The working directory of the ranks, relative to the snapshot."""
    python: str = ""
    submitted: str = ""
    """Time in ISO 8601 with the zone."""

    def __post_init__(self) -> None:
        check_run_name(self.run.partition("/")[0])
        if self.max_requeues < 0:
            raise UserError(f"--max-requeues {self.max_requeues}: expected 0 or more")
        if self.retries is not None and self.retries < 0:
            raise UserError(f"--retries {self.retries}: expected 0 or more")
        if not 0 <= self.stuck_after < math.inf:
            raise UserError(f"--stuck-after {self.stuck_after:g}: expected minutes, or 0 for never")
        if self.notify is not None:
            check_address(self.notify)
        if self.profile is not None:
            ProfileWindow.parse(self.profile).check(self.resources.ranks)
        # a command may start more ranks by itself, as torchrun does
        if not self.target.is_command:
            self.parallelism.layout(self.resources.ranks, self.resources.ranks_per_node)

    @property
    def original(self) -> Path:
        """The folder that relative paths in its command and config start from."""
        return Path(self.config_base) if self.config_base is not None else Path(self.project) / self.workdir

    @property
    def is_queued(self) -> bool:
        """Return whether it is a job in SLURM's queue."""
        return self.executor == "slurm"

    @property
    def nodes_are_simulated(self) -> bool:
        """Return whether all of its nodes are this machine."""
        return self.executor == "local"

    @property
    def rank_part(self) -> str:
        """Return the part of `mgpu_slurm.job` that every rank starts as."""
        return "worker" if self.kind == "sweep" else "rank"

    def of_task(self, task: int) -> Spec:
        """Return the spec of one run of a group, with its name and seed, or of one worker of a sweep."""
        assert self.tasks is not None
        one = replace(self, run=f"{self.run}/{task}", tasks=None, at_once=None)
        if self.kind == "sweep":
            return one
        if self.target.command is None:
            return replace(one, config=self.config | {"seed": self.first_seed + task})
        command = tuple(word.replace(SEED_PLACE, str(task)) for word in self.target.command)
        return replace(one, target=Target(command=command))

    @property
    def first_seed(self) -> int:
        """Return the seed of the first run of a group; 0 if it is a command."""
        seed = self.config.get("seed", 0)
        assert isinstance(seed, int), seed
        return seed

    def check_seeds(self) -> None:
        """Raise UserError if nothing would use the seeds."""
        if self.tasks is None:
            return
        if self.target.command is not None:
            if not any(SEED_PLACE in word for word in self.target.command):
                raise UserError(
                    f"--seeds {self.tasks}: the command does not use the seed; write {SEED_PLACE} where it belongs,"
                    f" for example --seed {SEED_PLACE}"
                )
        elif type(self.config.get("seed")) is not int:
            raise UserError(
                f"--seeds {self.tasks}: the config of {self.target.label} has no integer `seed`;"
                " add `seed: int = 0` and use it"
            )

    def write(self, folder: RunFolder) -> None:
        plain = configs.to_plain(self) | {"parallelism": self.parallelism.given or None}
        write_whole(folder.spec, configs.dump_yaml({key: value for key, value in plain.items() if value is not None}))


def read_spec(folder: RunFolder) -> Spec:
    """Return the spec of a run, or of a whole group.

    Raises:
        UserError: the file is missing, or was edited and is no longer valid.
    """
    spec = configs.fill(Spec, configs.read_yaml(folder.spec), str(folder.spec))
    return spec if folder.task is None else spec.of_task(folder.task)


def parse_seeds(text: str) -> tuple[int, int | None]:
    """Return the number of runs and how many may run at once, from `5` or, in sbatch's notation, `100%10`."""
    match = _SEEDS.fullmatch(text)
    if match is None:
        raise UserError(f"--seeds {text!r}: expected a number of runs, or RUNS%AT_ONCE such as 100%10")
    return int(match["runs"]), int(match["at_once"]) if match["at_once"] else None


def check_run_name(name: str) -> None:
    if not RUN_NAME.fullmatch(name):
        raise UserError(
            f"run name {name!r}: use letters, digits, '.', '_' and '-'"
            f" (at most {LONGEST_NAME} with the time appended, starting with a letter or digit)"
        )


# -- when a run is restarted: at its time limit, after failures, and without progress


@dataclass(frozen=True)
class RestartPolicy:
    """The options of a call; None keeps the default of a new run, or the value of a resumed one."""

    signal: str | None = None
    """Signal before the time limit, in the format of `--signal`."""
    max_requeues: int | None = None
    """Maximum number of requeues at the time limit."""
    retries: int | None = None
    """Maximum consecutive restarts after a failure of any kind."""
    stuck_after: float | None = None
    """Minutes without progress after which an attempt is stopped; 0 disables."""

    @staticmethod
    def taken_from(options: MutableMapping[str, Any]) -> RestartPolicy:
        """Remove the policy's options from those of a command, and return them as a policy."""
        return RestartPolicy(**{each.name: options.pop(each.name) for each in dataclasses.fields(RestartPolicy)})

    @property
    def given(self) -> dict[str, object]:
        """Return the values that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


DEFAULT_POLICY = RestartPolicy()
