"""The sweep file: search space, sampler, pruner, resources and budget.

The login node reads it once, and each worker reads it again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from mgpu_slurm.core.errors import UserError, closest, nearest
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.config import Config
from mgpu_slurm.request.flat_config import flattened
from mgpu_slurm.request.parallelism import Parallelism, Precision, Strategy
from mgpu_slurm.request.resources import RESOURCE_FLAGS, Flags, resources_from
from mgpu_slurm.request.spec import Spec, check_run_name
from mgpu_slurm.run_folder.sweep_records import confirmation_of
from mgpu_slurm.sweeps.search import space_parser
from mgpu_slurm.sweeps.search.goals import Direction, constraints_of, objectives_of
from mgpu_slurm.sweeps.search.parameters import Values
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.search.sweep_options import Budget, Confirm, Pruner, Sampler
from mgpu_slurm.sweeps.search.trial_command import check_takes, parse_command, places_in

_SAMPLERS_WITH_PAUSES = ("tpe", "random", "grid")
_PRUNERS_FOR_SEEDS = ("none", "hyperband", "asha")
_SAMPLERS_FOR_SEVERAL = ("tpe", "random", "grid", "gp")

_DATABASE = re.compile(r"(postgresql|mysql|mariadb)(\+\w+)?://")
_VARIABLE = re.compile(r"\$\{\w+\}")
_PASSWORD_OPTION = re.compile(r"[?&](?:password|passwd)=([^&]*)")


@dataclass(frozen=True)
class _Keys:
    """The keys of the file; values that other modules parse are still plain."""

    study: str
    job: str | Config
    space: str | Config
    metric: str | None = None
    direction: Direction | None = None
    metrics: dict[str, Direction] = field(default_factory=dict)
    constraints: Config = field(default_factory=dict)
    sampler: Sampler = field(default_factory=Sampler)
    pruner: Pruner = field(default_factory=Pruner)
    trials: int | None = None
    workers: int = 1
    trials_per_worker: int = 1
    budget: Budget = field(default_factory=Budget)
    resources: Flags = field(default_factory=dict)
    fixed: Values = field(default_factory=dict)
    storage: str | None = None
    max_retries: int = 2
    stuck_after: float = Spec.stuck_after
    strategy: Strategy | None = None
    shard: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    precision: Precision | None = None
    compile: bool | None = None
    stage: tuple[str, ...] = ()
    container: str | None = None
    mounts: tuple[str, ...] = ()
    seeds: int = 1
    confirm: Confirm | None = None
    enqueue: list[Values] = field(default_factory=list)
    warm_start: str | None = None


def plain(values: Mapping[str, object], source: str) -> Config:
    """Return values given by a program in the form of a file's values.

    Raises:
        UserError: a value cannot be written in a file.
    """
    if callable(values.get("space")):
        raise UserError(f"{source}: space: name the function: 'module:function' or 'file.py:function'")
    return {str(key): configs.to_plain(value, f"{source}: {key}") for key, value in values.items()}


def laid_over(values: Config, changes: Config) -> Config:
    """Return a file's values overridden by others; mappings are merged key by key.

    Raises:
        UserError: one of the others looks like a value of the job.
    """
    known = [key.name for key in fields(_Keys)]
    for key, value in changes.items():
        if key not in known and closest(key, known) is None:
            name, *_ = flattened({key: value})
            raise UserError(f"{name}: a sweep file has no such key: {_place_of(key, name)}")
    return configs.merge(_with_names(values), changes)


def _place_of(key: str, name: str) -> str:
    if key in {each.name for each in fields(Budget)}:
        return f"a limit of the sweep is budget.{key}=VALUE"
    if key.replace("-", "_") in RESOURCE_FLAGS:
        return f"a resource of each worker is resources.{key}=VALUE"
    return f"a value of the job that is the same in all trials is fixed.{name}=VALUE"


def parse(values: Config, source: str) -> Sweep:
    """Return the sweep that these values describe.

    Args:
        source: names the file in errors.

    Raises:
        UserError: a value is invalid; the message includes the fix.
    """
    keys = configs.fill(_Keys, _with_names(values), source)
    try:
        return _checked(keys, source)
    except UserError as error:
        told = str(error)
        raise UserError(told if told.startswith(source) else f"{source}: {told}") from None


def load(path: Path) -> Sweep:
    """Return the sweep that a file describes."""
    return parse(configs.read_yaml(path), str(path))


def _with_names(values: Config) -> Config:
    """Expand the short form `sampler: tpe` to a mapping with a name."""
    short: Config = {key: {"name": values[key]} for key in ("sampler", "pruner") if isinstance(values.get(key), str)}
    return values | short


def _checked(keys: _Keys, source: str) -> Sweep:
    check_run_name(keys.study)
    for name in ("trials", "workers", "trials_per_worker", "seeds"):
        if (number := getattr(keys, name)) is not None and number < 1:
            raise UserError(f"{name} {number}: expected at least 1")
    if keys.max_retries < 0:
        raise UserError(f"max_retries {keys.max_retries}: expected 0 or more")
    if keys.storage is not None:
        _check_storage(keys.storage)
    flags = {name.replace("_", "-"): value for name, value in keys.resources.items()}
    if keys.trials_per_worker > 1:
        # the worker itself starts a process for each trial
        flags |= _one_task(flags, keys.trials_per_worker)
    command = parse_command(keys.job)
    space = keys.space if isinstance(keys.space, str) else space_parser.parse(keys.space, source)
    made = Sweep(
        study=keys.study,
        job=None if command else str(keys.job),
        command=command,
        objectives=objectives_of(keys.metric, keys.direction, keys.metrics),
        constraints=constraints_of(keys.constraints),
        sampler=keys.sampler,
        pruner=keys.pruner,
        trials=_trials(keys, space),
        workers=keys.workers,
        trials_per_worker=keys.trials_per_worker,
        budget=keys.budget,
        resources=resources_from(flags, "resources"),
        flags=flags,
        fixed=keys.fixed,
        space=space,
        storage=keys.storage,
        max_retries=keys.max_retries,
        stuck_after=keys.stuck_after,
        parallelism=Parallelism(keys.strategy, keys.shard, keys.tensor, keys.pipeline, keys.precision, keys.compile),
        stage=keys.stage,
        container=keys.container,
        mounts=keys.mounts,
        seeds=keys.seeds,
        confirm=keys.confirm,
        enqueue=tuple(keys.enqueue),
        warm_start=keys.warm_start,
    )
    if made.seeds > 1:
        _check_pruner_for_seeds(made)
    if made.sets_seeds:
        _check_seed_values(made)
    if made.confirm is not None:
        _check_confirm(made)
    _check_names(made)
    _check_points(made)
    if made.pruner.name == "pbt":
        _check_population(made)
    if made.sampler.name == "cmaes" and (len(made.objectives) > 1 or made.constraints):
        raise UserError(
            f"sampler cmaes: it takes one metric and no constraints: choose {', '.join(_SAMPLERS_FOR_SEVERAL)}"
        )
    if made.pruner.pauses:
        _check_sampler_for_pauses(made)
    return made


def _check_sampler_for_pauses(made: Sweep) -> None:
    # with several metrics, tpe is Optuna's; copies have values between the points of a grid
    unfit = {"tpe"} if len(made.objectives) > 1 else set()
    unfit |= {"grid"} if made.pruner.name == "pbt" else set()
    fit = [name for name in _SAMPLERS_WITH_PAUSES if name not in unfit]
    if made.sampler.name not in fit:
        if made.pruner.name == "pbt":
            raise UserError(f"sampler {made.sampler.name}: it does not go with pruner pbt: choose {', '.join(fit)}")
        raise UserError(
            f"sampler {made.sampler.name}: it learns from ended trials only, and would draw at random while trials are"
            f" paused: choose {', '.join(fit)}, or set `pause: false` in the pruner"
        )


def _check_storage(url: str) -> None:
    """Check the URL of a database, without printing a password that it may contain."""
    if not _DATABASE.match(url):
        scheme = url.partition(":")[0]
        raise UserError(
            f"storage {scheme!r}: expected the URL of a PostgreSQL or MySQL; without one the study keeps a journal"
            " file, which several workers can write to, unlike SQLite"
        )
    scheme, _, rest = url.partition("://")
    password = rest.rpartition("@")[0].partition(":")[2]
    for word in (password, *_PASSWORD_OPTION.findall(url)):
        if word and not _VARIABLE.fullmatch(word):
            raise UserError(
                f"storage {scheme}://...: it contains a password, which everyone who reads the file would see:"
                " write ${VARIABLE} instead, and export the variable"
            )


def _trials(keys: _Keys, space: Space | str) -> int | None:
    """Return the maximum number of trials; for a grid, at most its number of points."""
    if keys.sampler.name == "grid":
        if isinstance(space, str):
            raise UserError(f"sampler grid: space: {space} is a function, whose points are unknown: list them")
        points = len(space.grid())
        return points if keys.trials is None else min(points, keys.trials)
    if keys.trials is None and keys.budget == Budget() and keys.pruner.name != "pbt":
        raise UserError("no stopping condition: add `trials:`, or a `budget:` such as {hours: 4}")
    return keys.trials


def _one_task(flags: Flags, trials_per_worker: int) -> Flags:
    """Return the resources that let a worker divide its node among trials."""
    tasks = flags.get("ntasks-per-node")
    if tasks not in (None, 1):
        raise UserError(
            f"trials_per_worker {trials_per_worker}: each trial is trained by one process, not by ntasks-per-node"
            f" {tasks}: remove one of them"
        )
    return {"ntasks-per-node": 1}


def _check_names(made: Sweep) -> None:
    """Check that parameters reach the job, and that each is given only once."""
    known = [parameter.name for parameter in made.space.parameters] if isinstance(made.space, Space) else None
    given = [*made.fixed] + (["seed"] if made.sets_seeds and "seed" not in made.fixed else [])
    for name in known or ():
        if name in made.fixed:
            raise UserError(f"fixed {name}: it is also a parameter of the space: remove one of them")
    if not made.command:
        return
    for name in places_in(made.command):
        if name not in given and known is not None and name not in known:
            raise UserError(f"job: command: {{{name}}} is not a parameter{nearest(name, [*known, *given])}")
    check_takes(made.command, [*(known or ()), *given])


def _check_pruner_for_seeds(made: Sweep) -> None:
    if made.pruner.name not in _PRUNERS_FOR_SEEDS:
        raise UserError(
            f"seeds {made.seeds}: pruner {made.pruner.name} does not compare trials at rungs: choose"
            f" {', '.join(_PRUNERS_FOR_SEEDS)}, or remove seeds"
        )


def _check_seed_values(made: Sweep) -> None:
    first = made.fixed.get("seed", 0)
    if not isinstance(first, int) or isinstance(first, bool):
        raise UserError(f"fixed seed {first!r}: the seeds count up from it: write an integer")
    if isinstance(made.space, Space) and any(each.name == "seed" for each in made.space.parameters):
        raise UserError(
            f"space: seed is not a parameter if `{'seeds' if made.seeds > 1 else 'confirm'}` is set: remove one of them"
        )


def _check_confirm(made: Sweep) -> None:
    check_run_name(confirmation_of(made.study))
    if len(made.objectives) > 1:
        raise UserError("confirm: it compares trials by one metric, not by several: remove one of them")
    if made.pruner.name == "pbt":
        raise UserError("confirm: trials of pbt change their values while they are trained: remove one of them")


def _check_population(made: Sweep) -> None:
    """Check a sweep of population based training."""
    if not isinstance(made.space, Space):
        raise UserError(f"pruner pbt: space: {made.space} is a function, whose ranges are unknown: list the parameters")
    if made.sampler.name == "grid":
        raise UserError("pruner pbt: copies have values between the points of a grid: choose sampler tpe or random")
    if made.trials is not None:
        raise UserError(f"trials {made.trials}: pruner pbt has `population: N`, and adds copies: remove it")
    if len(made.enqueue) > made.pruner.population:
        raise UserError(f"enqueue has {len(made.enqueue)} points: raise the population ({made.pruner.population})")
    known = {each.name: each for each in made.space.parameters}
    for name in made.pruner.perturb:
        if name not in known:
            raise UserError(f"perturb: {name!r} is not a parameter{nearest(name, list(known))}")


def _check_points(made: Sweep) -> None:
    """Check that enqueued points are in the space."""
    if made.enqueue and made.sampler.name == "grid":
        raise UserError("enqueue: a grid already has all of its points: remove it")
    if made.trials is not None and len(made.enqueue) > made.trials:
        raise UserError(f"trials {made.trials}: enqueue has {len(made.enqueue)} points: raise trials")
    known = {each.name: each for each in made.space.parameters} if isinstance(made.space, Space) else {}
    for point in made.enqueue if known else ():
        for name, value in point.items():
            if name not in known:
                raise UserError(f"enqueue {point}: {name!r} is not a parameter{nearest(name, list(known))}")
            if not known[name].takes(value):
                raise UserError(f"enqueue {point}: {name} is {known[name].words}, not {value!r}")
