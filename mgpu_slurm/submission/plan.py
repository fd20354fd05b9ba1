"""Turn a request into a plan: all that will happen, typed and printable, before anything starts."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mgpu_slurm.core.errors import UserError, nearest
from mgpu_slurm.core.formatting import counted, program
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.executors import selection
from mgpu_slurm.executors.base import Asked, Executor
from mgpu_slurm.registry import dependencies
from mgpu_slurm.request import config as configs
from mgpu_slurm.request import job_function
from mgpu_slurm.request import target as targets
from mgpu_slurm.request.config import Config
from mgpu_slurm.request.parallelism import DEFAULT_PARALLELISM, Parallelism
from mgpu_slurm.request.resources import Flags
from mgpu_slurm.request.spec import (
    DEFAULT_POLICY,
    Measurement,
    RestartPolicy,
    Spec,
    Target,
    check_run_name,
    parse_seeds,
)
from mgpu_slurm.request.time_limit import announcement
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.slurm import sbatch, script
from mgpu_slurm.slurm.script import Array
from mgpu_slurm.submission import cluster_file as clusters
from mgpu_slurm.submission import containers
from mgpu_slurm.submission.cluster_file import Cluster, ClusterFile
from mgpu_slurm.submission.project import project_files
from mgpu_slurm.submission.project.job_config import Completed
from mgpu_slurm.trackers import destinations

DEMO_TARGET = "jobs.digits"

_NOT_CHECKED = (
    "check     when the job starts: its source does not show the whole config (`--dry-run --check` imports it)"
)

WORKER_REQUEUES = 1000
"""Maximum number of requeues of a sweep's worker at its time limit."""


@dataclass(frozen=True)
class Request:
    """A request from the command line or from Python, before any default is applied."""

    target: str | Callable[..., Any] | None = None
    """The name of a job function, or the function itself."""
    command: tuple[str, ...] = ()
    values: Config = field(default_factory=dict)
    """The given part of the job's config."""
    flags: Flags = field(default_factory=dict)
    """Resources by sbatch's long names."""
    executor: str = "auto"
    cluster: str | None = None
    name: str | None = None
    restart: RestartPolicy = DEFAULT_POLICY
    parallelism: Parallelism = DEFAULT_PARALLELISM
    profile: str | None = None
    """Steps and ranks to record, such as `10-13@0`."""
    stage: tuple[str, ...] = ()
    """Data sets to copy to the disk of each node."""
    notify: str | None = None
    """The address of a web hook for the end of the run."""
    seeds: str | None = None
    """`5`, or `100%10` to run at most 10 at a time."""
    workers: int | None = None
    """Number of workers of a sweep, whose study then has exactly the given name."""
    probes: tuple[Config, ...] = ()
    """Sets of values that trials of a sweep may add to the job's config, which has to accept each of them."""
    after: tuple[str, ...] = ()
    """Runs that have to complete first."""
    after_any: tuple[str, ...] = ()
    """Runs that have to end first, whatever their outcome."""
    container: str | None = None
    """An image, or `none`; None for that of the cluster file."""
    mounts: tuple[str, ...] = ()
    """What its ranks see besides, as `SOURCE[:TARGET][:ro]`."""
    sinks: tuple[str, ...] = ()
    """Trackers, such as `mlflow=URI`; without any, those of the cluster file."""
    measurement: Measurement | None = None
    """Ends the run once its speed is measured; its name then has the number of nodes."""
    project: Path | None = None
    """The folder to snapshot; None for the target's project."""
    dry_run: bool = False
    check: bool = False
    """Whether to import the job to check its config."""


@dataclass(frozen=True)
class Plan:
    """All that will happen. The job's config is as given until the target itself has completed it."""

    spec: Spec
    folder: RunFolder
    """The future folder of the run."""
    notes: tuple[str, ...]
    """Human-readable notes on what was decided for the user."""
    snapshot_limit: int
    """Bytes."""
    gpu_memory: int | None = None
    """Bytes of memory of each GPU, if the cluster file has that."""
    whole_config: Config = field(default_factory=dict)
    """The job's config with all known defaults; for a sweep, that of one trial."""

    @property
    def script(self) -> str:
        """Return the script for sbatch, exact except for the submission's token and the ids of jobs to wait for."""
        array = None if self.spec.tasks is None else Array(0, tuple(range(self.spec.tasks)))
        return script.render(self.spec, self.folder, sbatch.new_token(), array, ",".join(self.spec.after))

    def with_config(self, completed: Completed) -> Plan:
        """Return the plan with the completed config; trials of a sweep share only the given values."""
        config = completed.config
        shared = configs.only(config, self.spec.config) if self.spec.kind == "sweep" else config
        spec = replace(self.spec, config=shared, config_base=completed.base)
        notes = self.notes if completed.is_checked else (*self.notes, _NOT_CHECKED)
        return replace(self, spec=spec, whole_config=completed.known, notes=notes)

    def lines(self) -> list[str]:
        """Return the human-readable lines to show before the start."""
        spec, resources = self.spec, self.spec.resources
        # the seed of a group has a separate line
        is_seeded = spec.tasks is not None and spec.kind == "run"
        shown = {key: value for key, value in spec.config.items() if key != "seed" or not is_seeded}
        config = "  ".join(f"{key}={value}" for key, value in shown.items())
        nodes = counted(resources.nodes, "simulated node" if spec.nodes_are_simulated else "node")
        ranks = f"{resources.ranks} = {nodes} x {resources.ranks_per_node}"
        only = ", if the command calls mgpu_slurm.attach()" if spec.target.is_command else ""
        return [
            f"{'study' if spec.kind == 'sweep' else 'run':<9} {spec.run}",
            f"target    {spec.target.label}",
            *([f"config    {config}"] if config else []),
            *([f"seeds     {self._seeds(spec.tasks)}"] if spec.tasks is not None and is_seeded else []),
            f"ranks     {ranks}",
            *([f"strategy  {spec.parallelism.words}{only}"] if spec.parallelism.given else []),
            *[f"stage     {path}" for path in spec.stage],
            *[f"sink      {sink}" for sink in spec.sinks],
            # the path of many web hooks is a password
            *([f"notify    {urlsplit(spec.notify).hostname or spec.notify}"] if spec.notify is not None else []),
            *([f"profile   steps {spec.profile}{only}"] if spec.profile is not None else []),
            *([f"after     {'  '.join(spec.after)}"] if spec.after else []),
            *self.notes,
            f"folder    {self.folder.path}",
        ]

    def _seeds(self, runs: int) -> str:
        first = self.spec.first_seed
        limit = f", at most {self.spec.at_once} at a time" if self.spec.at_once else ""
        return f"{first} to {first + runs - 1} ({counted(runs, 'run')}){limit}"


def make(request: Request, cwd: Path, runs: Path, note: Note = quiet) -> Plan:
    """Decide everything that can be decided without the target's own code.

    Args:
        note: called when waiting for a cluster that does not answer.

    Raises:
        UserError: something in the request or the cluster file is wrong.
        ClusterError: SLURM was requested but is missing or does not answer.
    """
    file = clusters.load(cwd)
    executor, why = selection.choose(request.executor)
    chosen = _cluster(file, request.cluster, executor)
    given = {key: value for key, value in request.flags.items() if value is not None}
    asked = Asked(given, chosen.flags, request.workers or 1, request.dry_run)
    resolved = executor.resolve(asked, note)
    limit = resolved.time_limit
    target, root = _target(request, file.job, cwd)
    root = request.project or root
    # the first steps of a job are no training that anybody would look for
    named = (destinations.NONE,) if request.measurement is not None else request.sinks or chosen.sinks
    sinks = destinations.resolve(named, cwd, root.name)
    destinations.check_shared(sinks, executor.is_this_machine)
    signal, lead = announcement(request.restart.signal or _site_signal(chosen, limit), limit, executor.is_queued)
    tasks, at_once = _tasks(request, executor)
    spec = Spec(
        run=_name(request, target, resolved.resources.nodes),
        target=target,
        executor=executor.name,
        resources=resolved.resources,
        config=request.values,
        signal=signal,
        lead=lead,
        kind="run" if request.workers is None else "sweep",
        tasks=tasks,
        at_once=at_once,
        after=dependencies.named(request.after, request.after_any),
        max_requeues=_max_requeues(request, chosen),
        retries=request.restart.retries,
        stuck_after=Spec.stuck_after if request.restart.stuck_after is None else request.restart.stuck_after,
        kill_wait=chosen.kill_wait,
        parallelism=request.parallelism.over(chosen.parallelism.fitted(resolved.resources.ranks)),
        profile=request.profile,
        stage=tuple(_staged(path, cwd) for path in request.stage),
        stage_to=chosen.stage_to,
        # a sweep's workers end at any time
        notify=None if request.workers is not None else request.notify or file.notify,
        sinks=tuple(map(str, sinks)),
        measurement=request.measurement,
        cluster=chosen.name or None,
        setup=tuple(chosen.setup),
        rename=chosen.rename,
        environment=chosen.environment,
        container=containers.decide(
            request.container,
            request.mounts,
            chosen.container,
            cwd,
            is_here=executor.is_this_machine or containers.is_on_cluster(),
        ),
        readable_by=chosen.readable_by,
        project=str(root),
        workdir=_workdir(cwd, root),
        python=sys.executable,
        submitted=records.now(),
    )
    notes = (
        f"executor  {executor.name}: {resolved.described or why}",
        *resolved.notes,
        *destinations.notes(sinks, os.environ | chosen.environment),
    )
    return Plan(spec, RunFolder(runs / spec.run), notes, chosen.snapshot_limit, chosen.gpu_memory)


def _staged(path: str, cwd: Path) -> str:
    """Return the absolute path of a data set.

    Raises:
        UserError: there is none.
    """
    found = Path(os.path.normpath(cwd / Path(path).expanduser()))
    if not found.exists():
        raise UserError(f"--stage {path}: no such file or folder")
    return str(found)


def _name(request: Request, target: Target, nodes: int) -> str:
    if request.workers is not None:
        assert request.name is not None
        return request.name
    name = _short_name(target) if request.name is None else request.name
    return _run_name(name if request.measurement is None else f"{name}-{nodes}n")


def _tasks(request: Request, executor: Executor) -> tuple[int | None, int | None]:
    """Return the number of tasks of a job array, and how many of them may run at the same time."""
    if request.workers is not None:
        # all share one machine or allocation; in a queue each starts when there is room for it
        return request.workers, None if executor.is_queued else request.workers
    return (None, None) if request.seeds is None else parse_seeds(request.seeds)


def _max_requeues(request: Request, chosen: Cluster) -> int:
    if request.workers is not None:
        # a worker is requeued as long as there are trials
        return WORKER_REQUEUES
    return chosen.max_requeues if request.restart.max_requeues is None else request.restart.max_requeues


def _cluster(file: ClusterFile, name: str | None, executor: Executor) -> Cluster:
    """Return the cluster; this machine is not one, so its executor uses a named one or the one called `local`."""
    if not executor.is_this_machine or name is not None:
        return file.named(name)
    return file.clusters.get("local", Cluster())


def _site_signal(chosen: Cluster, limit: int | None) -> str:
    """Return the cluster's signal, with its lead only for runs with a time limit."""
    return chosen.signal.partition("@")[0] if limit is None else chosen.signal


def _target(request: Request, default: str | None, cwd: Path) -> tuple[Target, Path]:
    """Return the target of the ranks, and the project folder that it belongs to."""
    if request.command:
        if request.target is not None:
            raise UserError(f"got both a target ({request.target}) and a command after --: give only one")
        if len(request.command) == 1 and " " in request.command[0] and shutil.which(request.command[0]) is None:
            raise UserError(f"command {request.command[0]!r} was quoted as a single word: remove the quotes")
        return Target(command=request.command), project_files.find_root(cwd)
    if callable(request.target):
        return function_target(request.target), project_files.find_root(cwd)
    name = request.target or default or _demo_target(cwd)
    return _named_target(name, cwd)


def _demo_target(cwd: Path) -> str:
    if (cwd / "jobs" / "digits.py").is_file():
        return DEMO_TARGET
    raise UserError(
        f"no target given and no `job:` in mgpu.yaml: name one, or run `{program()} init` for a starter project"
    )


def _named_target(name: str, cwd: Path) -> tuple[Target, Path]:
    module, function = targets.split(name)
    if not module.endswith(".py"):
        if (cwd / module).is_file() or "/" in module or module == ".":
            raise UserError(f"target {name!r} is neither a Python file nor a module's name; put a command after --")
        return Target(function=f"{module}:{function}"), project_files.find_root(cwd)
    path = Path(os.path.normpath(cwd / Path(module).expanduser()))
    if not path.is_file():
        others = [other.name for other in path.parent.glob("*.py")]
        raise UserError(f"target {name!r}: there is no file {str(path)!r}{nearest(path.name, sorted(others))}")
    root = project_files.find_root(path.parent)
    if not path.is_relative_to(root):
        # the root may be reached through a link
        path, root = path.resolve(), root.resolve()
    return Target(function=f"{os.path.relpath(path, root / _workdir(cwd, root))}:{function}"), root


def function_target(function: Callable[..., Any]) -> Target:
    """Return the target of a function: by name if it is in a module, so that the snapshot's code runs.

    A function of a notebook or script is pickled instead.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    # raises if it is not a job function
    job_function.from_callable(function, name)
    module = sys.modules.get(getattr(function, "__module__", ""))
    is_named = module is not None and module.__name__ != "__main__" and getattr(module, name, None) is function
    if not is_named:
        return Target(pickled=name)
    assert module is not None
    return Target(function=f"{module.__name__}:{name}")


def _workdir(cwd: Path, root: Path) -> str:
    """Return the working directory relative to the project, which the job will have in the snapshot."""
    return os.path.relpath(cwd, root) if cwd.is_relative_to(root) else "."


def _short_name(target: Target) -> str:
    """Return a name for the run from its target, such as `digits` or `train`."""
    if target.command is not None:
        scripts = [word for word in target.command if word.endswith((".py", ".sh"))]
        words = Path((scripts or [target.command[0]])[0]).stem
    elif target.function is not None:
        module = targets.split(target.function)[0]
        words = Path(module).stem if module.endswith(".py") else module.rpartition(".")[2]
    else:
        words = (target.pickled or "").rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", words).strip("-._")[:60] or "run"


def _run_name(name: str) -> str:
    check_run_name(name)
    return f"{name}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
