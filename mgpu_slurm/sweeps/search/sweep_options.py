"""The sampler, pruner and budget of a sweep file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from mgpu_slurm.core.errors import UserError, nearest
from mgpu_slurm.request.config import Config
from mgpu_slurm.sweeps.scheduling.halving import HEDGE_RUNGS
from mgpu_slurm.sweeps.scheduling.rungs import rungs_of

SAMPLERS = ["tpe", "random", "grid", "gp", "cmaes"]
PRUNERS = ["none", "median", "hyperband", "asha", "pbt"]
_BY_RUNG = ("hyperband", "asha", "pbt")

_LEVEL_FACTOR = 3
"""Ratio of the progress values at which `tpe` compares trials, if the pruner has no rungs."""

_HIGHEST_LEVEL = 10**9

_SMALLEST_POPULATION = 4
"""A quarter of it is one member."""

_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def _check_choice(name: str, known: list[str]) -> None:
    if name not in known and not _CLASS.fullmatch(name):
        raise UserError(f"{name!r}: expected {', '.join(known)}, or package.module.Class{nearest(name, known)}")


@dataclass(frozen=True)
class Sampler:
    """The sampler, which chooses the parameters of trials."""

    name: str = "tpe"
    """One of `SAMPLERS`, or the import path of an Optuna sampler class."""
    seed: int | None = None
    """Each worker derives a separate seed from it; None for a random seed each time."""
    options: Config = field(default_factory=dict)
    """Further arguments of the class."""

    def __post_init__(self) -> None:
        _check_choice(self.name, SAMPLERS)

    @property
    def words(self) -> str:
        options: Config = {"seed": self.seed} if self.seed is not None else {}
        told = ", ".join(f"{key} {value}" for key, value in (options | self.options).items())
        return f"{self.name} ({told})" if told else self.name


@dataclass(frozen=True)
class Pruner:
    """The pruner, which prunes trials. Resources are the `progress` that the job reports."""

    name: str = "none"
    """One of `PRUNERS`, or the import path of an Optuna pruner class."""
    min_resource: int = 1
    """Progress before which no trial is pruned."""
    max_resource: int | None = None
    """Progress of a complete trial; the rungs of hyperband and asha follow from it."""
    reduction_factor: int = 3
    """For hyperband and asha: one of this many trials is promoted at each rung."""
    pause: bool = True
    """For asha: pause trials at their rung, to continue the best of them later; if False, prune them."""
    hedge: bool = True
    """For asha: compare every eighth trial first at a higher rung, in case low rungs mislead."""
    keep_gb: float | None = None
    """For asha: how many gigabytes of checkpoints paused trials may keep; the least promising is pruned first."""
    population: int = 8
    """For pbt: number of members."""
    interval: int | None = None
    """For pbt: progress between two comparisons of the members."""
    perturb: tuple[str, ...] = ()
    """For pbt: the parameters that a copy changes; not those that the shapes of the model depend on."""
    startup_trials: int = 5
    """For median: number of complete trials before pruning starts."""
    options: Config = field(default_factory=dict)
    """Arguments of a class given by its import path."""

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
        if self.name in _BY_RUNG and self.max_resource is None:
            raise UserError(f"{self.name} needs max_resource: the progress of a complete trial, such as its epochs")
        if self.name != "asha" and (self.pause, self.hedge, self.keep_gb) != (True, True, None):
            raise UserError(f"pause, hedge and keep_gb are keys of asha, not of {self.name}: remove them")
        self._check_population()
        if self.keep_gb is not None and (self.keep_gb <= 0 or not self.pause):
            raise UserError(f"keep_gb {self.keep_gb:g}: expected more than 0, and pause: true")
        if self.max_resource is not None and self.max_resource <= self.min_resource:
            raise UserError(f"max_resource {self.max_resource}: expected more than min_resource {self.min_resource}")

    def _check_population(self) -> None:
        if self.name != "pbt":
            if (self.population, self.interval, self.perturb) != (8, None, ()):
                raise UserError(f"population, interval and perturb are keys of pbt, not of {self.name}: remove them")
            return
        if self.population < _SMALLEST_POPULATION:
            raise UserError(f"population {self.population}: expected at least {_SMALLEST_POPULATION}")
        if self.interval is None or self.interval < 1:
            raise UserError("pbt needs interval: the progress between two comparisons, 1 or more")
        if not self.perturb:
            raise UserError(
                "pbt needs perturb: the parameters that a copy changes, such as [lr, momentum]; not those that the"
                " shapes of the model depend on"
            )

    @property
    def pauses(self) -> bool:
        """Whether trials may pause."""
        return (self.name == "asha" and self.pause) or self.name == "pbt"

    @property
    def rungs(self) -> tuple[int, ...]:
        """Progress values at which trials are compared, ascending; empty for pruners without rungs."""
        if self.name not in _BY_RUNG or self.max_resource is None:
            return ()
        if self.interval is not None:
            return (*range(self.interval, self.max_resource, self.interval), self.max_resource)
        return rungs_of(self.min_resource, self.max_resource, self.reduction_factor)

    @property
    def levels(self) -> tuple[int, ...]:
        """Progress values at which `tpe` compares trials, ascending; empty if only the final value counts."""
        if self.name == "none" or self.rungs:
            return self.rungs
        return rungs_of(self.min_resource, self.max_resource or _HIGHEST_LEVEL, _LEVEL_FACTOR)

    @property
    def words(self) -> str:
        if self.name == "none":
            return "none"
        if self.name == "median":
            return f"median, from progress {self.min_resource} on, after {self.startup_trials} complete trials"
        if self.name not in _BY_RUNG:
            told = ", ".join(f"{key} {value}" for key, value in self.options.items())
            return f"{self.name} ({told})" if told else self.name
        if self.name == "pbt":
            return (
                f"pbt, {self.population} members, compared every {self.interval} up to progress {self.max_resource},"
                f" changing {', '.join(self.perturb)}"
            )
        told = f"{self.name}, progress {self.min_resource} to {self.max_resource}, factor {self.reduction_factor}"
        if self.name == "asha":
            told += (
                ", pausing" + (", hedged" if self.hedge and len(self.rungs) >= HEDGE_RUNGS else "")
                if self.pause
                else ", without pauses"
            )
        return told + (f", checkpoints of at most {self.keep_gb:g} GB" if self.keep_gb is not None else "")


@dataclass(frozen=True)
class Budget:
    """Limits that end a sweep in addition to its number of trials, whichever comes first. None disables a limit."""

    hours: float | None = None
    """Hours since the start of the first worker."""
    gpu_hours: float | None = None
    """GPU-hours of all workers together."""
    target: float | None = None
    """A value of the metric that is good enough."""
    patience: int | None = None
    """Number of trials without improvement."""

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
            f"until {self.patience} trials bring no improvement" if self.patience is not None else "",
        ]
        return ", ".join(filter(None, told))


@dataclass(frozen=True)
class Confirm:
    """How the best trials are trained again with other seeds, when the sweep is over."""

    top: int = 5
    """Number of trials."""
    seeds: int = 5
    """Number of seeds for each."""

    def __post_init__(self) -> None:
        for name, number, least in (("top", self.top, 1), ("seeds", self.seeds, 2)):
            if number < least:
                raise UserError(f"{name} {number}: expected at least {least}")
