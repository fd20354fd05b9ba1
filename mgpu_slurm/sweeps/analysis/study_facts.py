"""What a report shows of a study: its trials, parameters, rungs, importance, front and confirmation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.study import Study
from optuna.trial import FrozenTrial

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.analysis import confirmed, trial_table
from mgpu_slurm.sweeps.analysis.confirmed import Confirmation
from mgpu_slurm.sweeps.analysis.importance import Importances, importance
from mgpu_slurm.sweeps.analysis.trial_table import TrialRow
from mgpu_slurm.sweeps.optuna_adapter import FIXED_PARAMS
from mgpu_slurm.sweeps.scheduling.rungs import bracket_of, bracket_sizes
from mgpu_slurm.sweeps.search import sweep_file
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import summary
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.snapshots import copy_of


@dataclass(frozen=True)
class SearchedParameter:
    """A parameter of the space, as an axis."""

    name: str
    is_choice: bool
    is_log: bool
    is_whole: bool
    ends: Sequence[Any]
    """The lowest and the highest value, or all choices."""


@dataclass(frozen=True)
class TrialFacts:
    """A trial that has begun."""

    row: TrialRow
    bracket: int | None
    """Its bracket in Hyperband; None without."""
    copy_of: int | None
    """In population based training: the trial of which it is a copy."""
    started: str | None
    """ISO 8601 with the time zone."""
    ended: str | None
    is_enqueued: bool
    """Whether its values are from the sweep file."""


@dataclass(frozen=True)
class StudyFacts:
    """A study."""

    study: str
    metrics: Mapping[str, str]
    """Directions by metric; trials are compared by the first."""
    sampler: str
    pruner: str
    """In words, such as `asha, progress 1 to 81, factor 3, pausing`."""
    rungs: Sequence[int]
    parameters: Sequence[SearchedParameter]
    trials: Sequence[TrialFacts]
    asked: int | None
    """Number of trials that the sweep file asks for."""
    front: Sequence[int]
    """The trials of the Pareto front, with several objectives."""
    best: int | None
    importance: Importances | None
    no_importance: str
    """Why there is no importance."""
    seeds: Sequence[int]
    """The seeds of each trial, if it is trained with several."""
    confirmation: Confirmation | None

    @property
    def metric(self) -> str:
        return next(iter(self.metrics))

    @property
    def direction(self) -> str:
        return self.metrics[self.metric]

    def to_json(self) -> dict[str, Any]:
        """Return the facts for programs, without the workers."""
        found = self.importance
        return {
            "study": self.study,
            "metric": self.metric,
            "direction": self.direction,
            "metrics": dict(self.metrics),
            "sampler": self.sampler,
            "pruner": self.pruner,
            "rungs": list(self.rungs),
            "parameters": [{**asdict(each), "ends": list(each.ends)} for each in self.parameters],
            "trials": [_trial_json(each) for each in self.trials],
            "asked": self.asked,
            "best": self.best,
            "front": list(self.front),
            "importance": {
                "trials": 0 if found is None else found.trials,
                "at": None if found is None else found.at,
                "values": {
                    each.name: {"value": each.share, "low": each.low, "high": each.high}
                    for each in (() if found is None else found.parameters)
                },
                "missing": self.no_importance,
            },
            "seeds": list(self.seeds),
            "confirmation": self.confirmation and self.confirmation.to_json(),
        }


def _trial_json(trial: TrialFacts) -> dict[str, Any]:
    rest = {name: value for name, value in vars(trial).items() if name != "row"}
    return {**asdict(trial.row), **rest}


def study_facts(folder: RunFolder) -> StudyFacts:
    """Read a sweep's study.

    Raises:
        MgpuError: the sweep file or the study cannot be read.
    """
    sweep = sweep_file.load(folder.sweep)
    study = studies.load(sweep, folder.journal)
    own = summary.own_trials(study)
    begun = [trial for trial in own if trial.datetime_start is not None]
    numbers = {trial.number: place for place, trial in enumerate(own)}
    sizes = _brackets(sweep)
    rows = trial_table.rows(study, sweep, folder)
    found, missing = _importance(study, sweep)
    best = summary.best_of(own, sweep)
    several = len(sweep.objectives) > 1
    return StudyFacts(
        study=sweep.study,
        metrics={each.metric: each.direction for each in sweep.objectives},
        sampler=sweep.sampler.words,
        pruner=sweep.pruner.words,
        rungs=sweep.pruner.rungs,
        parameters=_parameters(begun),
        trials=[
            _trial(trial, row, bracket_of(numbers[trial.number], sizes) if sizes else None, sweep)
            for trial, row in zip(begun, rows, strict=True)
        ],
        asked=sweep.trials,
        front=[trial.number for trial in summary.front_of(own, sweep)] if several else [],
        best=None if best is None else best.number,
        importance=found,
        no_importance=missing,
        seeds=list(sweep.seed_values) if sweep.seeds > 1 else [],
        confirmation=confirmed.confirmed(folder),
    )


def _brackets(sweep: Sweep) -> tuple[int, ...]:
    """Return the sizes of Hyperband's brackets; empty without."""
    pruner = sweep.pruner
    if pruner.name != "hyperband" or pruner.max_resource is None:
        return ()
    return bracket_sizes(pruner.min_resource, pruner.max_resource, pruner.reduction_factor)


def _importance(study: Study, sweep: Sweep) -> tuple[Importances | None, str]:
    try:
        return importance(study, sweep), ""
    except UserError as missing:
        return None, str(missing).partition(": ")[2]


def _trial(trial: FrozenTrial, row: TrialRow, bracket: int | None, sweep: Sweep) -> TrialFacts:
    copied = copy_of(trial)
    times = (trial.datetime_start, trial.datetime_complete)
    started, ended = (None if time is None else time.astimezone().isoformat() for time in times)
    # a grid fixes the values of all trials
    is_enqueued = copied is None and sweep.sampler.name != "grid" and bool(trial.system_attrs.get(FIXED_PARAMS))
    return TrialFacts(row, bracket, None if copied is None else copied.source, started, ended, is_enqueued)


def _parameters(trials: Sequence[FrozenTrial]) -> list[SearchedParameter]:
    """Return the parameters from which trials had a choice, as their distributions have them."""
    seen: dict[str, BaseDistribution] = {}
    for trial in trials:
        seen |= {name: each for name, each in trial.distributions.items() if not each.single()}
    return [_parameter(name, each) for name, each in seen.items()]


def _parameter(name: str, found: Any) -> SearchedParameter:
    if isinstance(found, CategoricalDistribution):
        return SearchedParameter(name, True, False, False, found.choices)
    return SearchedParameter(name, False, found.log, isinstance(found.low, int), (found.low, found.high))
