"""The sweep file: what is searched, how, with what, and for how long.

It is read once on the login node, and again by each worker.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mgpu_slurm.core.errors import UserError, nearest
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.spec import Resources, Spec, check_run_name, resources_from
from mgpu_slurm.sweeps.search import space as spaces
from mgpu_slurm.sweeps.search.space import Space

_IS_AN_ERROR = re.compile(r"loss|err|perplexity|(^|_)(ppl|nll|mse|mae|rmse|bpc|wer|cer)($|_)")

SAMPLERS = ["tpe", "random", "grid", "gp", "cmaes"]
PRUNERS = ["none", "median", "hyperband"]

_DATABASE = re.compile(r"(postgresql|mysql|mariadb)(\+\w+)?://")
_VARIABLE = re.compile(r"\$\{\w+\}")
_PASSWORD_OPTION = re.compile(r"[?&](?:password|passwd)=([^&]*)")

# the variable of a shell is no parameter
_PLACE = re.compile(r"(?<!\$)\{([A-Za-z_][\w.-]*)\}")
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def _check_choice(name: str, known: list[str]) -> None:
    if name not in known and not _CLASS.fullmatch(name):
        raise UserError(f"{name!r}: expected {', '.join(known)}, or package.module.Class{nearest(name, known)}")


@dataclass(frozen=True)
class Sampler:
    """How trials are chosen."""

    name: str = "tpe"
    """One of `SAMPLERS`, or the import path of a class of Optuna's kind."""
    seed: int | None = None
    """Each worker draws from it numbers of its own; None for other numbers each time."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the class."""

    def __post_init__(self) -> None:
        _check_choice(self.name, SAMPLERS)

    @property
    def words(self) -> str:
        options = {"seed": self.seed} if self.seed is not None else {}
        told = ", ".join(f"{key} {value}" for key, value in (options | self.options).items())
        return f"{self.name} ({told})" if told else self.name


@dataclass(frozen=True)
class Pruner:
    """When a trial is given up. Resources are the `progress` that the job reports."""

    name: str = "none"
    """One of `PRUNERS`, or the import path of a class of Optuna's kind."""
    min_resource: int = 1
    """No trial is given up before it."""
    max_resource: int | None = None
    """The progress of a whole trial; hyperband's brackets follow from it."""
    reduction_factor: int = 3
    """Of hyperband: of so many trials one gets past a rung."""
    startup_trials: int = 5
    """Of median: so many whole trials come first."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of a class that is given by its import path."""

    def __post_init__(self) -> None:
        _check_choice(self.name, PRUNERS)
        if self.options and self.name in PRUNERS:
            raise UserError(f"options: {self.name} has keys of its own: min_resource, max_resource and others")
        if self.min_resource < 1:
            raise UserError(f"min_resource {self.min_resource}: progress counts from 1")
        if self.reduction_factor < 2:
            raise UserError(f"reduction_factor {self.reduction_factor}: expected at least 2")
        if self.startup_trials < 0:
            raise UserError(f"startup_trials {self.startup_trials}: expected 0 or more")
        if self.name == "hyperband" and self.max_resource is None:
            raise UserError("hyperband needs max_resource: the progress of a whole trial, such as its epochs")
        if self.max_resource is not None and self.max_resource <= self.min_resource:
            raise UserError(f"max_resource {self.max_resource}: expected more than min_resource {self.min_resource}")

    @property
    def words(self) -> str:
        if self.name == "none":
            return "none: every trial comes to its end"
        if self.name == "median":
            return f"median, from progress {self.min_resource} on, after {self.startup_trials} whole trials"
        if self.name != "hyperband":
            told = ", ".join(f"{key} {value}" for key, value in self.options.items())
            return f"{self.name} ({told})" if told else self.name
        return f"hyperband, progress {self.min_resource} to {self.max_resource}, factor {self.reduction_factor}"


@dataclass(frozen=True)
class Budget:
    """What ends a sweep besides the number of its trials; whichever comes first. None for no such end."""

    hours: float | None = None
    """From the start of its first worker."""
    gpu_hours: float | None = None
    """Of all workers together."""
    target: float | None = None
    """A value of the metric that is good enough."""
    patience: int | None = None
    """Trials without a better one."""

    def __post_init__(self) -> None:
        for name in ("hours", "gpu_hours", "patience"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"{name} {value}: expected more than 0")

    def words(self, metric: str) -> str:
        told = [
            f"{self.hours:g} hours" if self.hours is not None else "",
            f"{self.gpu_hours:g} GPU-hours" if self.gpu_hours is not None else "",
            f"until {metric} is {self.target:g}" if self.target is not None else "",
            f"until {self.patience} trials bring nothing better" if self.patience is not None else "",
        ]
        return ", ".join(filter(None, told))


@dataclass(frozen=True)
class Sweep:
    """A whole sweep file, checked as far as it can be without the job's own code."""

    study: str
    job: str | None
    """The job function, as `submit` takes it; None where it is a command."""
    command: tuple[str, ...]
    """Words with `{lr}` where a parameter stands; empty where it is a job function."""
    metric: str
    direction: Literal["maximize", "minimize"]
    sampler: Sampler
    pruner: Pruner
    trials: int | None
    """None for as many as the budget holds; of a grid, for all of its points."""
    workers: int
    budget: Budget
    resources: Resources
    """Of one worker."""
    fixed: dict[str, Any]
    """Values of the job's config that all trials share, by name."""
    space: Space | str
    """Or the function that chooses: `module:function`, called with the trial."""
    storage: str | None
    """A database by its URL, `${VARIABLE}` as it stands; None for the study's own journal."""
    max_retries: int
    """How often a trial goes on whose worker has died."""
    stuck_after: float = Spec.stuck_after
    """Minutes without progress after which a worker's ranks are ended, and its trial with them."""
    enqueue: tuple[dict[str, Any], ...] = ()
    """Points that are known to be good: the first trials have these values."""
    warm_start: str | None = None
    """An earlier study, whose trials the sampler knows from the start."""

    def lines(self) -> list[str]:
        """What is searched and how, for people."""
        space = self.space.lines() if isinstance(self.space, Space) else [f"by {self.space}"]
        trials = "as many as the budget holds" if self.trials is None else str(self.trials)
        if self.sampler.name == "grid" and isinstance(self.space, Space) and len(self.space.grid()) != self.trials:
            trials += f" of the grid's {len(self.space.grid())} points"
        return [
            *_under("space", space),
            f"metric    {self.metric}, to {self.direction}",
            f"sampler   {self.sampler.words}",
            f"pruner    {self.pruner.words}",
            f"trials    {trials}{f', {len(self.enqueue)} of them at known points' if self.enqueue else ''}",
            *([f"knows     the trials of study {self.warm_start}"] if self.warm_start else []),
            f"workers   {self.workers}",
            *([f"budget    {words}"] if (words := self.budget.words(self.metric)) else []),
        ]


def _under(title: str, lines: list[str]) -> list[str]:
    return [f"{title if not place else '':<9} {line}" for place, line in enumerate(lines)]


@dataclass(frozen=True)
class _Keys:
    """The file's own keys, with what other parts read still as plain values."""

    study: str
    job: str | dict[str, Any]
    metric: str
    space: str | dict[str, Any]
    direction: Literal["maximize", "minimize"] | None = None
    sampler: Sampler = field(default_factory=Sampler)
    pruner: Pruner = field(default_factory=Pruner)
    trials: int | None = None
    workers: int = 1
    budget: Budget = field(default_factory=Budget)
    resources: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    storage: str | None = None
    max_retries: int = 2
    stuck_after: float = Spec.stuck_after
    enqueue: list[dict[str, Any]] = field(default_factory=list)
    warm_start: str | None = None


def plain(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Values that a program gives, as a file has them.

    Raises:
        UserError: one that no file can say.
    """
    if callable(values.get("space")):
        raise UserError(f"{source}: space: a function has to be named: 'module:function' or 'file.py:function'")
    return {str(key): configs.to_plain(value, f"{source}: {key}") for key, value in values.items()}


def laid_over(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A file's values with others in their place, mappings key by key."""
    return configs.merge(_with_names(values), dict(changes))


def parse(values: Mapping[str, Any], source: str) -> Sweep:
    """The sweep that these values say.

    Args:
        source: names the file in errors.

    Raises:
        UserError: what is wrong, and the mend.
    """
    keys = configs.fill(_Keys, _with_names(values), source)
    try:
        return _checked(keys, source)
    except UserError as error:
        told = str(error)
        raise UserError(told if told.startswith(source) else f"{source}: {told}") from None


def load(path: Path) -> Sweep:
    """The sweep that the file at this place says."""
    return parse(configs.read_yaml(path), str(path))


def _with_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """`sampler: tpe` is short for its name."""
    short = {key: {"name": values[key]} for key in ("sampler", "pruner") if isinstance(values.get(key), str)}
    return dict(values) | short


def _checked(keys: _Keys, source: str) -> Sweep:
    check_run_name(keys.study)
    for name, number in (("trials", keys.trials), ("workers", keys.workers)):
        if number is not None and number < 1:
            raise UserError(f"{name} {number}: expected at least 1")
    if keys.max_retries < 0:
        raise UserError(f"max_retries {keys.max_retries}: expected 0 or more")
    if keys.storage is not None:
        _check_storage(keys.storage)
    command = _command(keys.job)
    space = keys.space if isinstance(keys.space, str) else spaces.parse(keys.space, source)
    made = Sweep(
        study=keys.study,
        job=None if command else str(keys.job),
        command=command,
        metric=keys.metric,
        direction=_direction(keys),
        sampler=keys.sampler,
        pruner=keys.pruner,
        trials=_trials(keys, space),
        workers=keys.workers,
        budget=keys.budget,
        resources=resources_from(keys.resources, "resources"),
        fixed=keys.fixed,
        space=space,
        storage=keys.storage,
        max_retries=keys.max_retries,
        stuck_after=keys.stuck_after,
        enqueue=tuple(keys.enqueue),
        warm_start=keys.warm_start,
    )
    _check_names(made)
    _check_points(made)
    return made


def _direction(keys: _Keys) -> Literal["maximize", "minimize"]:
    if keys.direction is None and _IS_AN_ERROR.search(keys.metric.lower()):
        raise UserError(f"metric {keys.metric}: say `direction: minimize`; without it a metric is maximized")
    return keys.direction or "maximize"


def _check_storage(url: str) -> None:
    """Says nothing of what may be a password."""
    if not _DATABASE.match(url):
        scheme = url.partition(":")[0]
        raise UserError(
            f"storage {scheme!r}: expected the URL of a PostgreSQL or MySQL; without one the study keeps a journal of"
            " its own, which bears what SQLite does not: several workers"
        )
    scheme, _, rest = url.partition("://")
    password = rest.rpartition("@")[0].partition(":")[2]
    for word in (password, *_PASSWORD_OPTION.findall(url)):
        if word and not _VARIABLE.fullmatch(word):
            raise UserError(
                f"storage {scheme}://...: there is a password in it, which everybody could read who reads the file:"
                " write ${VARIABLE} in its place, and export that"
            )


def _command(job: str | dict[str, Any]) -> tuple[str, ...]:
    """The words of a command; none for a job function."""
    if isinstance(job, str):
        return ()
    if list(job) != ["command"] or not isinstance(job["command"], (str, list)):
        raise UserError(f"job {job!r}: expected a job function, or {{command: python train.py --lr {{lr}}}}")
    words = shlex.split(job["command"]) if isinstance(job["command"], str) else [str(word) for word in job["command"]]
    if not words:
        raise UserError("job: command: it is empty")
    return tuple(words)


def _trials(keys: _Keys, space: Space | str) -> int | None:
    """How many there may be; of a grid, at most its points."""
    if keys.sampler.name == "grid":
        if isinstance(space, str):
            raise UserError(f"sampler grid: space: {space} is a function, and nobody knows its points: list them")
        points = len(space.grid())
        return points if keys.trials is None else min(points, keys.trials)
    if keys.trials is None and keys.budget == Budget():
        raise UserError("it says nothing of when to end: add `trials:`, or a `budget:` such as {hours: 4}")
    return keys.trials


def _check_names(made: Sweep) -> None:
    """That parameters reach the job, and are given once."""
    known = [parameter.name for parameter in made.space.parameters] if isinstance(made.space, Space) else None
    for name in known or ():
        if name in made.fixed:
            raise UserError(f"fixed {name}: it is a parameter of the space too: leave it out of one of them")
    if not made.command:
        return
    for name in _places(made.command):
        if name not in made.fixed and known is not None and name not in known:
            raise UserError(f"job: command: {{{name}}} is no parameter{nearest(name, [*known, *made.fixed])}")
    check_takes(made.command, [*(known or ()), *made.fixed])


def check_takes(command: Sequence[str], names: Iterable[str]) -> None:
    """That these parameters have a place in the command.

    Raises:
        UserError: one has none.
    """
    places = _places(command)
    for name in names:
        if name not in places:
            raise UserError(f"{name}: the command does not take it: write {{{name}}} where it belongs")


def _places(command: Sequence[str]) -> set[str]:
    return {name for word in command for name in _PLACE.findall(word)}


def _check_points(made: Sweep) -> None:
    """That known points lie in the space."""
    if made.enqueue and made.sampler.name == "grid":
        raise UserError("enqueue: a grid has all of its points already: leave it out")
    if made.trials is not None and len(made.enqueue) > made.trials:
        raise UserError(f"trials {made.trials}: enqueue has {len(made.enqueue)} points: raise trials")
    known = {each.name: each for each in made.space.parameters} if isinstance(made.space, Space) else {}
    for point in made.enqueue if known else ():
        for name, value in point.items():
            if name not in known:
                raise UserError(f"enqueue {point}: {name!r} is no parameter{nearest(name, list(known))}")
            if not known[name].takes(value):
                raise UserError(f"enqueue {point}: {name} is {known[name].words}, and never {value!r}")


def words_of(command: Sequence[str], values: Mapping[str, Any]) -> tuple[str, ...]:
    """The words of a trial's command; one whose parameter is not there in this trial is left out.

    Left out is the whole word, and the option before it: `--momentum {momentum}`.
    """
    found: list[str] = []
    for word in command:
        names = _PLACE.findall(word)
        if all(name in values for name in names):
            found.append(_PLACE.sub(lambda match: _text(values[match[1]]), word))
        elif found and word == f"{{{names[0]}}}" and found[-1].startswith("-"):
            found.pop()
    return tuple(found)


def _text(value: Any) -> str:
    """As a command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)
