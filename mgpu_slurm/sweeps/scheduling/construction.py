"""Construction of the sampler and the scheduler that a sweep file names."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner, MedianPruner
from optuna.samplers import BaseSampler

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request.config import Config
from mgpu_slurm.sweeps.scheduling import samplers
from mgpu_slurm.sweeps.scheduling.halving import Promotion, StopOnly
from mgpu_slurm.sweeps.scheduling.population import Population
from mgpu_slurm.sweeps.scheduling.rung_tpe import RungTpe
from mgpu_slurm.sweeps.scheduling.rungs import bracket_sizes
from mgpu_slurm.sweeps.scheduling.scheduler import OptunaPruner, Scheduler, Unlimited
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep_options import Pruner, Sampler

_SAMPLERS = {
    "random": "optuna.samplers.RandomSampler",
    # every trial begins with the values of its grid point, so nothing is left to sample
    "grid": "optuna.samplers.RandomSampler",
    "gp": "optuna.samplers.GPSampler",
    # with several objectives
    "tpe": "optuna.samplers.TPESampler",
    "cmaes": "optuna.samplers.CmaEsSampler",
}


def sampler_of(
    asked: Sampler,
    worker: int,
    attempt: int = 1,
    levels: Sequence[int] = (),
    space: Space | str | None = None,
    objectives: int = 1,
    process: int = 0,
) -> BaseSampler:
    """Return the sampler for one attempt of a worker.

    Args:
        process: that of a worker with several, from 1; 0 for others.
        levels: progress values at which `tpe` compares trials.
        space: the sweep's space.
        objectives: their number. With several, `tpe` is Optuna's, which learns from the final values.

    Raises:
        UserError: there is no such class, or it does not accept these options.
    """
    cls: Callable[..., Any]
    options = dict(asked.options)
    if asked.name == "tpe" and objectives == 1:
        cls = partial(RungTpe, levels, space if isinstance(space, Space) else None)
    else:
        cls = samplers.learning_from_failures(_class("sampler", _SAMPLERS.get(asked.name, asked.name)))
    if asked.seed is not None:
        # with the same seed, workers that start together would try the same points, and a restarted one its old points
        entropy = [asked.seed, worker, attempt, *([process] if process else [])]
        options["seed"] = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    made = _made(f"sampler {asked.name}", cls, options)
    if not isinstance(made, BaseSampler):
        raise UserError(f"sampler {asked.name}: it is not an optuna.samplers.BaseSampler")
    return made


def _made(what: str, cls: Callable[..., Any], options: Config) -> Any:
    try:
        with warnings.catch_warnings():
            # the user chose an experimental class or option on purpose
            warnings.simplefilter("ignore", ExperimentalWarning)
            return cls(**options)
    except (TypeError, ValueError) as error:
        raise UserError(f"{what}: {error}: fix its options") from None


def _class(kind: str, path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{kind} {path}: {error}: check the import path") from None
    return found


def scheduler_of(asked: Pruner, direction: str) -> Scheduler:
    """Return the scheduler that a sweep file calls its pruner.

    Raises:
        UserError: there is no such class, or it does not accept these options.
    """
    if asked.name == "none":
        return Unlimited()
    if asked.name == "pbt":
        is_maximized = direction == "maximize"
        return Population(rungs=asked.rungs, population=asked.population, is_maximized=is_maximized)
    if asked.name not in ("hyperband", "asha"):
        return OptunaPruner(_pruner_of(asked), asked.max_resource)
    assert asked.max_resource is not None
    rungs, factor, is_maximized = asked.rungs, asked.reduction_factor, direction == "maximize"
    if asked.pauses:
        return Promotion(rungs=rungs, factor=factor, is_maximized=is_maximized, hedge=asked.hedge)
    sizes = bracket_sizes(asked.min_resource, asked.max_resource, factor) if asked.name == "hyperband" else (1,)
    return StopOnly(rungs=rungs, factor=factor, is_maximized=is_maximized, sizes=sizes)


def _pruner_of(asked: Pruner) -> BasePruner:
    if asked.name == "median":
        # a report at the minimum resource is already considered
        return MedianPruner(n_startup_trials=asked.startup_trials, n_warmup_steps=asked.min_resource)
    made = _made(f"pruner {asked.name}", _class("pruner", asked.name), asked.options)
    if not isinstance(made, BasePruner):
        raise UserError(f"pruner {asked.name}: it is not an optuna.pruners.BasePruner")
    return made
