"""The best trial of a sweep, and the command to train it again."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import program, short_path
from mgpu_slurm.registry import sweep_state
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.config import Config
from mgpu_slurm.request.spec import Flags, read_spec
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import SchedulePart
from mgpu_slurm.sweeps.search import sweep_file, trial_command
from mgpu_slurm.sweeps.search.parameters import Values
from mgpu_slurm.sweeps.search.sweep_file import Sweep


@dataclass(frozen=True)
class Best:
    """The best trial of a study so far."""

    study: str
    metric: str
    direction: str
    number: int
    value: float
    params: Values
    """The searched parameters, by name."""
    config: Config
    """The complete config of the job."""
    folder: str
    schedule: tuple[SchedulePart, ...]
    """The values by which it was trained, in their order, if it is a copy in population based training."""
    state: str
    """Empty for a complete trial; else how far it has come."""
    command: str
    """Command to train it again: for a shell, or for Python if the job is a function defined interactively."""

    @property
    def _state(self) -> str:
        return f", {self.state}" if self.state else ""

    def lines(self) -> list[str]:
        """Return a description for people."""
        width = max(9, *(len(name) for name in self.params)) if self.params else 9
        return [
            f"{'best':<{width}} {self.metric} {self.value!r}, trial {self.number} of study {self.study}{self._state}",
            *(f"{name:<{width}} {_text(value)}" for name, value in self.params.items()),
            *(
                f"{'' if place else 'schedule':<{width}} to progress {part.until} (trial {part.trial}):"
                f" {'  '.join(f'{name}={_text(value)}' for name, value in part.params.items())}"
                for place, part in enumerate(self.schedule)
            ),
            f"{'folder':<{width}} {self.folder}",
            f"{'again':<{width}} {self.command}",
        ]


def best(folder: RunFolder) -> Best:
    """Return the best trial of a sweep.

    Raises:
        UserError: the run is not a sweep, or no trial is complete.
    """
    if not sweep_state.is_sweep(folder):
        raise UserError(f"{folder.run} is not a sweep: name a study, see `{program()} status`")
    summary = sweep_state.summary_of(folder)
    found = summary.best or summary.furthest
    if found is None or found.value is None:
        raise UserError(f"study {folder.run}: no trial is complete yet: see `{program()} status {folder.run}`")
    sweep = sweep_file.load(folder.sweep)
    trial = folder.of_trial(found.number)
    config = configs.read_yaml(trial.config) if trial.config.exists() else sweep.fixed | found.params
    return Best(
        study=folder.run,
        metric=sweep.metric,
        direction=sweep.direction,
        number=found.number,
        value=found.value,
        params=found.params,
        config=config,
        folder=str(trial.path),
        schedule=found.schedule,
        state="" if summary.best else f"at progress {found.progress} of {sweep.pruner.max_resource}, paused",
        command=_command(folder, sweep, trial, config),
    )


def _command(folder: RunFolder, sweep: Sweep, trial: RunFolder, config: Config) -> str:
    spec = read_spec(folder)
    resources = sweep.flags
    # the local cluster is the default
    if spec.cluster not in (None, "local"):
        resources = {"cluster": spec.cluster} | resources
    if spec.target.pickled is not None:
        given = {name.replace("-", "_"): value for name, value in resources.items() if value is not None}
        return f"submit({', '.join([spec.target.pickled, str(config), *(f'{k}={v!r}' for k, v in given.items())])})"
    flags = _flags(resources)
    start, config_file = f"{program()} submit", short_path(trial.config)
    place = Path(spec.project, spec.workdir)
    if place.is_dir() and not place.samefile("."):
        # target and command are relative to that folder
        interpreter, _, rest = start.partition(" ")
        interpreter = os.path.abspath(interpreter) if "/" in interpreter else interpreter
        start, config_file = f"cd {shlex.quote(str(place))} && {interpreter} {rest}", str(trial.config)
    if sweep.command:
        return f"{start} {flags}-- {shlex.join(trial_command.words_of(sweep.command, config))}"
    return f"{start} {shlex.quote(spec.target.label)} {flags}--config {shlex.quote(config_file)}"


def _flags(resources: Flags) -> str:
    """Return the resources of a worker as options of `submit`."""
    words = []
    for name, value in resources.items():
        if value is None:
            continue
        if isinstance(value, dict):
            # sbatch's other options
            words += [f"--sbatch {shlex.quote(f'{key}={inner}')}" for key, inner in value.items()]
        else:
            words.append(f"--{name} {shlex.quote(str(value))}")
    return "".join(f"{word} " for word in words)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
