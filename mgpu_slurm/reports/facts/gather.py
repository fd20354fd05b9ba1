"""Gather the facts of a report: from records of runs and sweeps, without changing any."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from mgpu_slurm.core.errors import MgpuError, UserError
from mgpu_slurm.core.formatting import counted
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.registry import lookup, sweep_state
from mgpu_slurm.registry.current_state import current
from mgpu_slurm.reports import attempts as endings
from mgpu_slurm.reports.aggregation import history, run_sources
from mgpu_slurm.reports.aggregation.run_sources import Source
from mgpu_slurm.reports.aggregation.statistics import is_minimized
from mgpu_slurm.reports.facts import series
from mgpu_slurm.reports.facts.report_facts import (
    AttemptFacts,
    Facts,
    MetricFacts,
    Piece,
    RunFacts,
    SweepFacts,
    WorkerFacts,
)
from mgpu_slurm.reports.usage import efficiency, run_times
from mgpu_slurm.reports.usage.advice import Advice
from mgpu_slurm.reports.usage.efficiency import Efficiency, RunUse
from mgpu_slurm.reports.usage.ledger import OPEN, Ledger
from mgpu_slurm.reports.usage.run_times import AttemptTimes
from mgpu_slurm.request.spec import Spec, read_spec
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.run_folder.usage_records import read_usage

if TYPE_CHECKING:
    from mgpu_slurm.sweeps.analysis.study_facts import StudyFacts, TrialFacts

NEWEST = 20
"""Number of runs, groups and sweeps that are shown if none is named."""

STATES_OF_TRIALS = {"COMPLETE": states.COMPLETED, "FAIL": states.FAILED, "WAITING": "PENDING"}
"""States of runs by Optuna's states of trials; the others have the same name."""

_NAME_OF_SUBMISSION = re.compile(r"-\d{8}-\d{6}-[0-9a-f]{4}")


@dataclass(frozen=True)
class Wish:
    """What a user asks of a report."""

    title: str | None = None
    metric: str | None = None
    """The metric that comes first; None chooses one."""
    direction: str | None = None
    """`minimize` or `maximize` that metric; None takes it from the sweep, or from the name."""


def gather(words: Sequence[str], wish: Wish, note: Note = quiet) -> Facts:
    """Return the facts of runs, groups, sweeps and folders with event files.

    Args:
        words: none for the newest ones.
        note: called if a cluster does not answer.

    Raises:
        UserError: a word names nothing, or no run has the metric.
    """
    found = run_sources.sources(words) if words else _newest(note)
    own = list(dict.fromkeys(source.own for source in found if source.own is not None and not _is_trial(source)))
    known = current(own, note)
    use = efficiency.gather(known)
    reader = _Reader(use)
    sweeps: list[SweepFacts] = []
    runs: list[RunFacts] = []
    for source in found:
        if source.is_study:
            sweeps += reader.sweep(source, [pair for pair in known if pair[0].group == source.own])
    specs: dict[RunFolder, Spec] = {}
    for folder, state in known:
        if state.kind == "run":
            runs += reader.run(folder, state, specs)
    runs += reader.others([source for source in found if source.own is None or _is_trial(source)])
    runs += reader.trials
    metric = _main_metric(runs, sweeps, wish)
    _judge(runs, sweeps, wish, metric)
    return Facts(
        made=records.now(),
        version=importlib.metadata.version("mgpu-slurm"),
        title=wish.title or _title(words, found),
        metric=metric,
        runs=runs,
        sweeps=sweeps,
        ledger=next(iter(use.ledgers.values()), Ledger()),
        unit=next(iter(use.ledgers), "core"),
        advice=[*use.advice, *(each for sweep in sweeps for each in _ranges(sweep))],
        warnings=[*use.warnings, *reader.warnings],
    )


def _newest(note: Note) -> list[Source]:
    groups = lookup.all_groups(note)[:NEWEST]
    if not groups:
        raise UserError("no run found: name a run, a group, a sweep, or a folder with event files")
    return run_sources.sources([str(folder.path) for folder in groups])


def _is_trial(source: Source) -> bool:
    return source.own is not None and history.is_trial(source.own)


def _title(words: Sequence[str], found: Sequence[Source]) -> str:
    names = list(dict.fromkeys(source.place if source.own is None else source.own.group.run for source in found))
    first = short_name(words[0] if len(words) == 1 else names[0])
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more"


def short_name(run: str) -> str:
    """Return a run's name without what a submission adds to it."""
    return _NAME_OF_SUBMISSION.sub("", run)


# -- runs


class _Reader:
    """Reads runs one by one; what cannot be read becomes a warning."""

    def __init__(self, use: Efficiency) -> None:
        self._use = {each.facts.run: each for each in use.runs}
        self.trials: list[RunFacts] = []
        self.warnings: list[str] = []

    def run(self, folder: RunFolder, state: RunState, specs: dict[RunFolder, Spec]) -> Iterator[RunFacts]:
        try:
            if folder.group not in specs:
                specs[folder.group] = read_spec(folder.group)
            yield self._run(folder, state, specs[folder.group])
        except efficiency.UNREADABLE as error:
            self.warnings.append(f"{folder.run}: it cannot be read and is left out: {_words(error)}")

    def _run(self, folder: RunFolder, state: RunState, spec: Spec) -> RunFacts:
        times = run_times.attempts_of(folder, state)
        points = series.read(folder.metrics, _spans(times))
        self._note(folder.run, points.notes)
        use = self._use.get(folder.run)
        return RunFacts(
            run=folder.run,
            kind="run",
            group=None if folder.task is None else folder.group.run,
            state=state.state,
            reason=state.reason or (records.failure_line(folder) if state.state == states.FAILED else ""),
            attempts=_attempts(folder, state, times),
            config=history.identity(folder, spec)[1],
            progress=points.progress,
            total=getattr(state, "total", None),
            step=points.step,
            seconds=sum(each.seconds for each in times),
            asked=None if use is None else use.facts.asked,
            used=None if use is None else use.facts.used,
            ledger=None if use is None else use.facts.ledger,
            series=points.series,
            usage=read_usage(folder),
        )

    def others(self, sources: Sequence[Source]) -> Iterator[RunFacts]:
        """Yield folders with event files, and trials that were named without their sweep."""
        for read in history.read(sources, "step"):
            self._note(read.name, read.notes)
            points = series.of_curves(read.curves)
            yield RunFacts(
                run=read.name,
                kind="trial" if read.state else "foreign",
                group=None if read.place == read.name else read.place,
                state=read.state or states.UNKNOWN,
                reason="",
                config=read.config,
                progress=points.progress,
                step=points.step,
                series=points.series,
            )

    def sweep(self, source: Source, workers: Sequence[tuple[RunFolder, RunState]]) -> Iterator[SweepFacts]:
        from mgpu_slurm.sweeps.analysis import study_facts

        folder = source.own
        assert folder is not None
        try:
            study = study_facts.study_facts(folder)
        except efficiency.UNREADABLE as error:
            self.warnings.append(f"{folder.run}: its study cannot be read and is left out: {_words(error)}")
            return
        pieces: dict[int, list[Piece]] = {folder.task or 0: [] for folder, _ in workers}
        for trial in study.trials:
            for facts, times in self._trial(folder, study, trial):
                self.trials.append(facts)
                for each in times:
                    if each.worker in pieces:
                        piece = Piece(trial.row.number, each.begin / 1000, each.end / 1000)
                        pieces[each.worker].append(piece)
        found = [self._worker(member, state, pieces[member.task or 0]) for member, state in workers]
        states_of_workers = [state for _, state in workers]
        state = sweep_state.overall(states_of_workers, sweep_state.summary_of(folder, states_of_workers))
        yield SweepFacts(folder.run, state, study, found)

    def _trial(
        self, sweep: RunFolder, study: StudyFacts, trial: TrialFacts
    ) -> Iterator[tuple[RunFacts, list[AttemptTimes]]]:
        """Yield a trial, or its runs with several seeds."""
        folder = sweep.of_trial(trial.row.number)
        runs = sorted(folder.with_seeds()[1:], key=lambda run: int(run.path.name)) or [folder]
        for run in runs:
            times = [_closed(each, trial) for each in run_times.trial_attempts(run)]
            points = series.read(run.metrics, _spans(times))
            self._note(run.run, points.notes)
            config = dict(trial.row.params)
            config |= {"seed": int(run.path.name)} if run is not folder else {}
            facts = RunFacts(
                run=run.run,
                kind="trial",
                group=sweep.run,
                state=STATES_OF_TRIALS.get(trial.row.state, trial.row.state),
                reason=trial.row.reason,
                attempts=[_attempt_of_trial(each) for each in times],
                config=config,
                progress=points.progress,
                step=points.step,
                seconds=sum(each.seconds for each in times),
                series=points.series,
            )
            yield facts, times

    def _worker(self, folder: RunFolder, state: RunState, pieces: Sequence[Piece]) -> WorkerFacts:
        use: RunUse | None = self._use.get(folder.run)
        times = run_times.attempts_of(folder, state)
        return WorkerFacts(
            worker=folder.task or 0,
            state=state.state,
            attempts=_attempts(folder, state, times),
            pieces=sorted(pieces, key=lambda piece: piece.begin),
            ledger=Ledger() if use is None else use.facts.ledger,
        )

    def _note(self, run: str, notes: Iterable[str]) -> None:
        self.warnings += [f"{run}: {note}" for note in notes]


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, MgpuError) else f"{type(error).__name__}: {error}"


def _spans(times: Sequence[AttemptTimes]) -> list[tuple[int, float, float]]:
    return [(each.attempt, each.begin / 1000, each.end / 1000) for each in times]


def _attempts(folder: RunFolder, state: RunState, times: Sequence[AttemptTimes]) -> list[AttemptFacts]:
    """Return a run's attempts, with what ended each."""
    before = {each.attempt: each for each in endings.before(folder)} if len(times) > 1 else {}
    found = []
    for each in times:
        earlier = before.get(each.attempt)
        if earlier is not None:
            ended_by, then = earlier.ended, earlier.then
        else:
            ended_by, then = state.reason or endings.last_said(folder), ""
        found.append(
            AttemptFacts(
                each.attempt,
                each.job_id,
                each.nodes,
                _iso(each.begin),
                None if each.outcome == "running" else _iso(each.end),
                each.seconds,
                ended_by,
                then,
            )
        )
    return found


def _attempt_of_trial(times: AttemptTimes) -> AttemptFacts:
    started, ended = _iso(times.begin), _iso(times.end)
    return AttemptFacts(times.attempt, times.job_id, times.nodes, started, ended, times.seconds, "", "")


def _closed(times: AttemptTimes, trial: TrialFacts) -> AttemptTimes:
    """Return an attempt of a trial with an end: its own, or that of the trial, or now."""
    if times.end < OPEN:
        return times
    end = trial.ended or datetime.now(timezone.utc).isoformat()
    return replace(times, end=max(times.begin, run_times.milliseconds(end)))


def _iso(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, timezone.utc).isoformat(timespec="milliseconds")


# -- metrics


def _main_metric(runs: Sequence[RunFacts], sweeps: Sequence[SweepFacts], wish: Wish) -> str | None:
    """Return the metric that comes first: that of the user, of the first sweep, or the one that most runs have."""
    counts: dict[str, int] = {}
    for run in runs:
        for name in run.series:
            counts[name] = counts.get(name, 0) + 1
    if wish.metric is not None:
        if wish.metric not in counts:
            names = ", ".join(list(counts)[:10]) or "none"
            raise UserError(f"--metric {wish.metric}: no run has reported it; there are: {names}")
        return wish.metric
    if sweeps and sweeps[0].study.metric in counts:
        return sweeps[0].study.metric
    # of equally frequent ones, a result rather than a loss
    return max(counts, key=lambda name: (counts[name], not is_minimized(name)), default=None)


def _judge(runs: Iterable[RunFacts], sweeps: Sequence[SweepFacts], wish: Wish, main: str | None) -> None:
    """Give each metric of each run its direction, last and best value."""
    declared: dict[str, str] = {}
    for sweep in sweeps:
        declared = {**sweep.study.metrics, **declared}
    if wish.direction is not None and main is not None:
        declared[main] = wish.direction
    for run in runs:
        run.metrics = {name: _metric(name, points, declared) for name, points in run.series.items()}


def _metric(name: str, points: series.Series, declared: Mapping[str, str]) -> MetricFacts:
    direction = declared.get(name) or ("minimize" if is_minimized(name) else "maximize")
    return MetricFacts(points.last, points.best(direction), direction, name not in declared)


# -- advice on a search space

NEAR_THE_END = 0.03
"""Part of a range at its ends in which the best value is too near to them."""


def _ranges(sweep: SweepFacts) -> Iterator[Advice]:
    """Advise to widen a range if the best trial is at its end."""
    import math

    study = sweep.study
    best = next((trial.row for trial in study.trials if trial.row.number == study.best), None)
    if best is None or len(study.trials) < 2:
        return
    for each in study.parameters:
        value = best.params.get(each.name)
        if each.is_choice or not isinstance(value, (int, float)):
            continue
        low, high = (float(end) for end in each.ends)
        place = math.log(value / low) / math.log(high / low) if each.is_log else (value - low) / (high - low)
        if min(place, 1 - place) <= NEAR_THE_END:
            end = "lower" if place < 0.5 else "upper"
            why = f"the best trial has {each.name}={value:.4g}, at the {end} end of {low:.4g} to {high:.4g}: widen it"
            yield Advice("range", (sweep.run,), "", why)


def left_out(facts: Facts) -> list[str]:
    """Return what a reader of the page should know of runs that it cannot show as others."""
    silent = [run.run for run in facts.runs if not run.series]
    return [f"{counted(len(silent), 'run')} without metrics: {', '.join(silent[:5])}"] if silent else []
