"""The best trial of a sweep, or its Pareto front, and the command to train a trial again."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import counted, program, short_path, short_value
from mgpu_slurm.registry import sweep_state
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.config import Config
from mgpu_slurm.request.resources import Flags
from mgpu_slurm.request.spec import SEED_PLACE, read_spec
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.sweep_records import TRIAL_WORDS, SchedulePart, SweepSummary, TrialSummary
from mgpu_slurm.sweeps.search import sweep_file, trial_command
from mgpu_slurm.sweeps.search.parameters import Values
from mgpu_slurm.sweeps.search.sweep import Sweep

if TYPE_CHECKING:
    from mgpu_slurm.sweeps.analysis.confirmed import Confirmation


@dataclass(frozen=True)
class Best:
    """The best trial of a study so far, or one that the caller names."""

    study: str
    metric: str
    direction: str
    number: int
    value: float
    """The value of the first objective."""
    values: Mapping[str, float]
    """The values of all objectives, by metric."""
    params: Values
    """The searched parameters, by name."""
    config: Config
    """The complete config of the job."""
    folder: str
    schedule: tuple[SchedulePart, ...]
    """The values by which it was trained, in their order, if it is a copy in population based training."""
    state: str
    """Empty for a complete trial that violates no constraint; else what it is."""
    command: str
    """Command to train it again: for a shell, or for Python if the job is a function defined interactively."""

    @property
    def _state(self) -> str:
        return f", {self.state}" if self.state else ""

    def lines(self) -> list[str]:
        """Return a description for people."""
        width = max(9, *(len(name) for name in self.params)) if self.params else 9
        values = "  ".join(f"{name} {_number(value)}" for name, value in self.values.items())
        return [
            f"{'best':<{width}} {values}, trial {self.number} of study {self.study}{self._state}",
            *(f"{name:<{width}} {_text(value)}" for name, value in self.params.items()),
            *(
                f"{'' if place else 'schedule':<{width}} to progress {part.until} (trial {part.trial}):"
                f" {'  '.join(f'{name}={_text(value)}' for name, value in part.params.items())}"
                for place, part in enumerate(self.schedule)
            ),
            f"{'folder':<{width}} {self.folder}",
            f"{'again':<{width}} {self.command}",
        ]


@dataclass(frozen=True)
class Front:
    """The Pareto front of a study with several objectives so far."""

    study: str
    metrics: Mapping[str, str]
    """Directions by metric."""
    trials: tuple[TrialSummary, ...]
    """The best by the first objective first."""

    def lines(self) -> list[str]:
        """Return a table for people."""
        from tabulate import tabulate

        params = list(dict.fromkeys(name for trial in self.trials for name in trial.params))
        rows = [
            [
                str(trial.number),
                *(f"{value:.6g}" for value in (trial.values or {}).values()),
                *(short_value(trial.params[name]) if name in trial.params else "" for name in params),
            ]
            for trial in self.trials
        ]
        header = ["TRIAL", *self.metrics, *params]
        return [
            f"front     {counted(len(self.trials), 'trial')} of study {self.study} that no other beats in all metrics",
            *tabulate(rows, header, tablefmt="plain", disable_numparse=True).splitlines(),
            f"again     {program()} best {self.study} --trial N   (all values, and the command that trains it again)",
        ]

    def to_json(self) -> dict[str, object]:
        trials = [trial.to_json() for trial in self.trials]
        return {"study": self.study, "metrics": dict(self.metrics), "front": trials}


def front(folder: RunFolder) -> Front | None:
    """Return the Pareto front of a sweep; None if it has one objective.

    Raises:
        UserError: the run is not a sweep, or no trial is complete.
    """
    summary = _summary(folder)
    if not summary.metrics:
        return None
    if not summary.front:
        raise _none_yet(folder, summary)
    return Front(folder.run, summary.metrics, summary.front)


def best(folder: RunFolder, number: int | None = None) -> Best:
    """Return the best trial of a sweep.

    Args:
        number: the trial to return instead.

    Raises:
        UserError: the run is not a sweep, no trial is complete, or there is no such trial.
    """
    summary = _summary(folder)
    found = summary.best or summary.furthest if number is None else _trial(folder, number)
    if found is None or found.value is None:
        raise _none_yet(folder, summary) if number is None else UserError(f"trial {number} has no value yet")
    sweep = sweep_file.load(folder.sweep)
    trial = folder.of_trial(found.number)
    config = configs.read_yaml(trial.config) if trial.config.exists() else sweep.fixed | found.params
    return Best(
        study=folder.run,
        metric=sweep.metric,
        direction=sweep.direction,
        number=found.number,
        value=found.value,
        values=found.values or {sweep.metric: found.value},
        params=found.params,
        config=config,
        folder=str(trial.path),
        schedule=found.schedule,
        state=_state(found, sweep),
        command=_command(folder, sweep, trial, config),
    )


def confirmation(folder: RunFolder) -> Confirmation | None:
    """Return the confirmation of a sweep's best trials; None if there is none."""
    if not sweep_state.is_sweep(folder) or sweep_file.load(folder.sweep).confirm is None:
        return None
    # Optuna takes a second to import
    from mgpu_slurm.sweeps.analysis import confirmed

    return confirmed.confirmed(folder)


def _summary(folder: RunFolder) -> SweepSummary:
    if not sweep_state.is_sweep(folder):
        raise sweep_state.not_a_sweep(folder.run)
    return sweep_state.summary_of(folder)


def _none_yet(folder: RunFolder, summary: SweepSummary) -> UserError:
    told = "no trial is complete yet"
    if summary.trials["COMPLETE"]:
        told = "every complete trial violates a constraint"
    return UserError(f"study {folder.run}: {told}: see `{program()} status {folder.run}`")


def _trial(folder: RunFolder, number: int) -> TrialSummary:
    # Optuna takes a second to import
    from mgpu_slurm.sweeps.study import summary as summaries
    from mgpu_slurm.sweeps.study import trial_queue as studies

    sweep = sweep_file.load(folder.sweep)
    trials = summaries.own_trials(studies.load(sweep, folder.journal))
    found = next((trial for trial in trials if trial.number == number), None)
    if found is None:
        last = max((trial.number for trial in trials), default=None)
        raise UserError(
            f"study {folder.run}: there is no trial {number}{'' if last is None else f': the last one is {last}'}"
        )
    schedule = summaries.schedule_of(found, trials, sweep)
    return replace(summaries.described(found, sweep), schedule=schedule)


def _state(trial: TrialSummary, sweep: Sweep) -> str:
    of = "" if sweep.pruner.max_resource is None else f" of {sweep.pruner.max_resource}"
    told = f"at progress {trial.progress}{of}, {TRIAL_WORDS[trial.state]}" if trial.state != "COMPLETE" else ""
    return ": ".join(filter(None, [told, trial.reason]))


def _command(folder: RunFolder, sweep: Sweep, trial: RunFolder, config: Config) -> str:
    spec = read_spec(folder)
    # the seeds of a command count up from 0
    with_seeds = sweep.seeds > 1 and not (sweep.command and sweep.seed_values[0])
    resources = {"seeds": sweep.seeds} | sweep.flags if with_seeds else sweep.flags
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
        seed: Values = {"seed": SEED_PLACE} if with_seeds else {}
        return f"{start} {flags}-- {shlex.join(trial_command.words_of(sweep.command, config | seed))}"
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


def _number(value: float) -> str:
    """Return the value with all digits; a count without a decimal point."""
    return str(int(value)) if value.is_integer() else repr(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
