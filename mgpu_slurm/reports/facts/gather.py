"""Gather the facts of a report: from records of runs and sweeps, without changing any."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mgpu_slurm.core.errors import UserError, suggestion
from mgpu_slurm.core.formatting import counted
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.registry import lookup, sweep_state
from mgpu_slurm.registry.current_state import current
from mgpu_slurm.reports import attempts
from mgpu_slurm.reports.aggregation import run_sources
from mgpu_slurm.reports.aggregation.run_sources import Source
from mgpu_slurm.reports.aggregation.statistics import is_minimized
from mgpu_slurm.reports.facts import series
from mgpu_slurm.reports.facts.report_facts import (
    Facts,
    MetricFacts,
    RunFacts,
    SweepFacts,
)
from mgpu_slurm.reports.facts.run_reader import ReportFiles, RunReader, name_of
from mgpu_slurm.reports.usage import efficiency
from mgpu_slurm.reports.usage.ledger import Ledger
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder

MOST_NAMES = 5
"""Number of runs that a warning names."""
MOST_IN_TITLE = 3
"""Number of names in the title."""

_NAME_OF_SUBMISSION = re.compile(r"-\d{8}-\d{6}-[0-9a-f]{4}")


@dataclass(frozen=True)
class ReportOptions:
    """What a user asks of a report."""

    title: str | None = None
    metric: str | None = None
    """The metric that comes first; None chooses one."""
    direction: str | None = None
    """`minimize` or `maximize` that metric; None takes it from the sweep, or from the name."""


def gather(words: Sequence[str], options: ReportOptions, note: Note = quiet) -> Facts:
    """Return the facts of runs, groups, sweeps and folders with event files.

    Args:
        words: none for the newest ones.
        note: called if a cluster does not answer.

    Raises:
        UserError: a word names nothing, or no run has the metric.
    """
    warnings: list[str] = []
    found = _without_repetitions(run_sources.sources(words) if words else _newest(note, warnings))
    own = list(dict.fromkeys(source.own for source in found if source.own is not None and not _is_trial(source)))
    known = current(own, note)
    reports = ReportFiles()
    use = efficiency.gather(known, reports_of=reports.reported)
    restarts = attempts.accounted_restarts(folder for folder, state in known if state.attempts > 1)
    reader = RunReader(use, reports, restarts, warnings)
    sweeps: list[SweepFacts] = []
    runs: list[RunFacts] = []
    for source in found:
        if source.is_study:
            sweeps += reader.sweep(source, [pair for pair in known if pair[0].group == source.own])
    for folder, state in known:
        if state.kind == "run":
            runs += reader.run(folder, state)
    runs += reader.others([source for source in found if source.own is None or _is_trial(source)])
    runs += reader.trials
    declared = {name: direction for run in runs for name, direction in run.directions.items()}
    for sweep in reversed(sweeps):
        declared |= sweep.study.metrics
    metric = _main_metric(runs, sweeps, options, declared)
    if options.direction is not None and metric is not None:
        declared[metric] = options.direction
    for run in runs:
        run.metrics = {name: _metric(name, points, declared) for name, points in run.series.items()}
    return Facts(
        made=records.now(),
        version=importlib.metadata.version("mgpu-slurm"),
        title=options.title or _title(words, found),
        metric=metric,
        runs=runs,
        sweeps=sweeps,
        ledger=next(iter(use.ledgers.values()), Ledger()),
        unit=next(iter(use.ledgers), "core"),
        advice=list(use.advice),
        warnings=[*reader.not_yet_said(use.warnings), *warnings, *_without_metrics(runs)],
    )


def _newest(note: Note, warnings: list[str]) -> list[Source]:
    """
    Args:
        warnings: receives the runs that are left out, and why.
    """
    found = []
    for folder in lookup.all_groups(note)[: efficiency.NEWEST]:
        try:
            found += run_sources.sources([str(folder.path)])
        except UserError as error:
            warnings.append(f"{folder.run}: it is left out: {error}")
    if not found:
        raise UserError("no run found: name a run, a group, a sweep, or a folder with event files")
    return found


def _without_repetitions(found: Sequence[Source]) -> list[Source]:
    """Return sources without what a sweep among them shows: its trials, and the confirmation of its best ones."""
    sweeps = [source.own for source in found if source.is_study and source.own is not None]
    confirmations = [sweep_state.confirmation_folder(sweep) for sweep in sweeps]

    def is_shown(own: RunFolder | None) -> bool:
        return own is not None and (own in confirmations or (own.is_trial and own.group in sweeps))

    return [source for source in found if not is_shown(source.own)]


def _is_trial(source: Source) -> bool:
    return source.own is not None and source.own.is_trial


def _title(words: Sequence[str], found: Sequence[Source]) -> str:
    names = list(
        dict.fromkeys(name_of(source.place) if source.own is None else source.own.group.run for source in found)
    )
    if not words:
        return "Newest runs"
    if len(words) == 1 and len(names) > 1:
        return name_of(words[0])
    short = list(dict.fromkeys(map(short_name, names)))
    more = f" and {len(short) - MOST_IN_TITLE} more" if len(short) > MOST_IN_TITLE else ""
    return ", ".join(short[:MOST_IN_TITLE]) + more


def _without_metrics(runs: Sequence[RunFacts]) -> list[str]:
    """Return a warning that names the runs that have no curves; of trials and failed runs, the state says enough."""
    says_enough = {"PENDING", *states.FAILURES}
    silent = [run.run for run in runs if not run.series and run.kind != "trial" and run.state not in says_enough]
    more = f" and {len(silent) - MOST_NAMES} more" if len(silent) > MOST_NAMES else ""
    return [f"{counted(len(silent), 'run')} without metrics: {', '.join(silent[:MOST_NAMES])}{more}"] if silent else []


def short_name(run: str) -> str:
    """Return a run's name without what a submission adds to it, which is not at the end of a confirmation's name."""
    return _NAME_OF_SUBMISSION.sub("", run)


# -- metrics


def _main_metric(
    runs: Sequence[RunFacts], sweeps: Sequence[SweepFacts], options: ReportOptions, declared: Mapping[str, str]
) -> str | None:
    """Return the metric that comes first: that of the user, of the first sweep, or the one that most runs have.

    Args:
        declared: directions of metrics by which a sweep or a run chooses the best.
    """
    counts: dict[str, int] = {}
    for run in runs:
        for name in run.series:
            counts[name] = counts.get(name, 0) + 1
    if options.metric is not None:
        if options.metric not in counts:
            names = ", ".join(list(counts)[:10]) or "none"
            meant = suggestion(options.metric, [*counts])
            raise UserError(f"--metric {options.metric}: no run has reported it{meant}; there are: {names}")
        return options.metric
    if sweeps and sweeps[0].study.metric in counts:
        return sweeps[0].study.metric
    # of equally frequent ones, one that chooses the best, or a result rather than a loss
    return max(counts, key=lambda name: (counts[name], name in declared, not is_minimized(name)), default=None)


def _metric(name: str, points: series.Series, declared: Mapping[str, str]) -> MetricFacts:
    direction = declared.get(name) or ("minimize" if is_minimized(name) else "maximize")
    return MetricFacts(points.last, points.best(direction), direction, name not in declared)
