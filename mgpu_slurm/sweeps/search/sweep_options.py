"""The parts of a sweep file that have keys of their own: sampler, pruner and budget."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from mgpu_slurm.core.errors import UserError, nearest

SAMPLERS = ["tpe", "random", "grid", "gp", "cmaes"]
PRUNERS = ["none", "median", "hyperband"]

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
            return "none"
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
