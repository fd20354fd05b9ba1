"""Read the runs and sweeps of a report, one by one: what cannot be read becomes a warning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mgpu_slurm.core.errors import MgpuError
from mgpu_slurm.registry import sweep_state
from mgpu_slurm.reports import attempts as endings
from mgpu_slurm.reports.aggregation import history
from mgpu_slurm.reports.aggregation.history import History
from mgpu_slurm.reports.aggregation.run_sources import Source
from mgpu_slurm.reports.attempts import AccountedRestarts
from mgpu_slurm.reports.facts import series
from mgpu_slurm.reports.facts.report_facts import (
    AttemptFacts,
    Piece,
    RunFacts,
    SweepFacts,
    WorkerFacts,
)
from mgpu_slurm.reports.usage import efficiency, run_times
from mgpu_slurm.reports.usage.efficiency import Efficiency
from mgpu_slurm.reports.usage.ledger import OPEN, Ledger, Reported
from mgpu_slurm.reports.usage.run_times import AttemptTimes
from mgpu_slurm.request.spec import Spec, read_spec
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.run_folder.usage_records import read_usage

if TYPE_CHECKING:
    from mgpu_slurm.sweeps.analysis.study_facts import StudyFacts, TrialFacts

STATES_OF_TRIALS = history.STATES_OF_TRIALS | {"WAITING": "PENDING"}
"""States of runs by Optuna's states of trials; the others have the same name."""


class ReportFiles:
    """The files of reports: each is read once, although the ledger and the curves of a run need it."""

    def __init__(self) -> None:
        self._read: dict[RunFolder, series.Reports] = {}

    def reported(self, folder: RunFolder) -> Iterator[tuple[int, int | None, Reported]]:
        """Yield the reports as a ledger needs them; see `run_times.ReportsOf`."""
        found = self._read[folder] = series.read(folder.metrics)
        times = np.rint(found.time * 1000).astype(np.int64).tolist()
        for time, attempt, progress in zip(times, found.attempt.tolist(), found.progress.tolist(), strict=True):
            yield time, None if attempt == series.UNKNOWN else attempt, Reported(time, progress)

    def take(self, folder: RunFolder) -> series.Reports:
        """Return the reports of a run, and forget them."""
        found = self._read.pop(folder, None)
        return series.read(folder.metrics) if found is None else found


class RunReader:
    """Reads runs one by one; what cannot be read becomes a warning."""

    def __init__(self, use: Efficiency, reports: ReportFiles, restarts: AccountedRestarts, warnings: list[str]) -> None:
        """
        Args:
            reports: what `use` has read already.
            restarts: what accounting says of runs that SLURM has restarted.
            warnings: receives what is left out, and why.
        """
        self._use = {each.facts.run: each for each in use.runs}
        self._reports = reports
        self._restarts = restarts
        self.trials: list[RunFacts] = []
        self.warnings = warnings
        self._left_out: set[str] = set()
        self._specs: dict[RunFolder, Spec] = {}

    def run(self, folder: RunFolder, state: RunState) -> Iterator[RunFacts]:
        try:
            yield self._run(folder, state)
        except efficiency.UNREADABLE as error:
            self._leave_out(folder.run, error)

    def _run(self, folder: RunFolder, state: RunState) -> RunFacts:
        use = self._use.get(folder.run)
        times = run_times.attempts_of(folder, state) if use is None else use.times
        spec = self._spec(folder) if use is None else use.spec
        points = self._points(folder, times)
        return RunFacts(
            run=folder.run,
            kind="run",
            group=None if folder.task is None else folder.group.run,
            state=state.state,
            reason=state.reason or (records.failure_line(folder) if state.state == states.FAILED else ""),
            attempts=_attempts(folder, state, times, self._restarts),
            config=history.identity_of(folder, spec)[1],
            progress=points.progress,
            total=state.total,
            directions=state.best_by or {},
            step=points.step,
            seconds=sum(each.seconds for each in times),
            asked=None if use is None else use.facts.asked,
            used=None if use is None else use.facts.used,
            ledger=None if use is None else use.facts.ledger,
            series=points.series,
            usage=read_usage(folder) if use is None else use.nodes,
        )

    def _spec(self, folder: RunFolder) -> Spec:
        """Return the spec of a run that has never started; that of its group is read once."""
        if folder.group not in self._specs:
            self._specs[folder.group] = read_spec(folder.group)
        whole = self._specs[folder.group]
        return whole if folder.task is None else whole.of_task(folder.task)

    def _points(self, folder: RunFolder, times: Sequence[AttemptTimes]) -> series.Points:
        """Return what a run has reported; of one that reports nothing, what it has written into event files."""
        if folder.metrics.exists():
            points = series.points(self._reports.take(folder), _spans(times), folder.metrics.name)
            self._note(folder.run, points.notes)
            return points
        (read,) = history.read([Source(folder.run, folder.group.run, folder.path, folder)], "step")
        self._note(folder.run, read.notes)
        return series.of_curves(read.curves)

    def others(self, sources: Sequence[Source]) -> Iterator[RunFacts]:
        """Yield folders with event files, and trials that were named without their sweep."""
        for read in [each for source in sources for each in self._histories(source)]:
            self._note(read.name, read.notes)
            points = series.of_curves(read.curves)
            yield RunFacts(
                run=read.name,
                kind="trial" if read.state else "foreign",
                group=None if name_of(read.place) == read.name else name_of(read.place),
                state=read.state or states.UNKNOWN,
                reason="",
                config=read.config,
                progress=points.progress,
                step=points.step,
                series=points.series,
            )

    def _histories(self, source: Source) -> list[History]:
        try:
            return history.read([source], "step")
        except efficiency.UNREADABLE as error:
            self._leave_out(source.name, error)
            return []

    def sweep(self, source: Source, workers: Sequence[tuple[RunFolder, RunState]]) -> Iterator[SweepFacts]:
        from mgpu_slurm.sweeps.analysis import study_facts

        folder = source.own
        assert folder is not None
        try:
            study = study_facts.study_facts(folder)
        except efficiency.UNREADABLE as error:
            self._left_out.add(folder.run)
            self.warnings.append(f"{folder.run}: its study cannot be read and is left out: {_words(error)}")
            return
        pieces: dict[int, list[Piece]] = {folder.task or 0: [] for folder, _ in workers}
        attempts = {member.task or 0: run_times.attempts_of(member, state) for member, state in workers}
        for trial in study.trials:
            try:
                for facts, times in self._trial(folder, study, trial, attempts):
                    self.trials.append(facts)
                    _hand_out(trial.row.number, times, pieces)
            except efficiency.UNREADABLE as error:
                self._leave_out(folder.of_trial(trial.row.number).run, error)
        for number, times in _confirming(folder, attempts):
            _hand_out(number, times, pieces, is_confirming=True)
        found = [
            self._worker(member, state, attempts[member.task or 0], pieces[member.task or 0])
            for member, state in workers
        ]
        states_of_workers = [state for _, state in workers]
        state = sweep_state.overall(states_of_workers, sweep_state.summary_of(folder, states_of_workers))
        yield SweepFacts(folder.run, state, study, found)

    def _trial(
        self,
        sweep: RunFolder,
        study: StudyFacts,
        trial: TrialFacts,
        attempts: Mapping[int, Sequence[AttemptTimes]],
    ) -> Iterator[tuple[RunFacts, list[AttemptTimes]]]:
        """Yield a trial, or its runs with several seeds.

        Args:
            attempts: those of each worker.
        """
        folder = sweep.of_trial(trial.row.number)
        runs = sorted(folder.with_seeds()[1:], key=lambda run: int(run.path.name)) or [folder]
        for run in runs:
            times = [_closed(each, trial.ended, attempts) for each in run_times.trial_attempts(run)]
            points = self._points(run, times)
            config = dict(trial.row.params) | self._config_of(run)
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

    def _config_of(self, trial: RunFolder) -> dict[str, Any]:
        try:
            return history.config_of_trial(trial)
        except efficiency.UNREADABLE as error:
            self.warnings.append(f"{trial.run}: of its config only what was searched is shown: {_words(error)}")
            return {}

    def _worker(
        self, folder: RunFolder, state: RunState, times: Sequence[AttemptTimes], pieces: Sequence[Piece]
    ) -> WorkerFacts:
        use = self._use.get(folder.run)
        return WorkerFacts(
            worker=folder.task or 0,
            state=state.state,
            attempts=_attempts(folder, state, times, self._restarts),
            pieces=sorted(pieces, key=lambda piece: piece.begin),
            ledger=Ledger() if use is None else use.facts.ledger,
            asked=None if use is None else use.facts.asked,
            used=None if use is None else use.facts.used,
        )

    def not_yet_said(self, warnings: Iterable[str]) -> list[str]:
        """Return the warnings about runs that are not left out."""
        return [each for each in warnings if each.partition(": ")[0] not in self._left_out]

    def _leave_out(self, run: str, error: BaseException) -> None:
        self._left_out.add(run)
        self.warnings.append(f"{run}: it cannot be read and is left out: {_words(error)}")

    def _note(self, run: str, notes: Iterable[str]) -> None:
        self.warnings += [f"{run}: {note}" for note in notes]


def name_of(folder: str) -> str:
    """Return the name of a folder for people."""
    return Path(folder).absolute().name


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, MgpuError) else f"{type(error).__name__}: {error}"


def _spans(times: Sequence[AttemptTimes]) -> list[tuple[float, float]]:
    return [(each.begin / 1000, each.end / 1000) for each in times]


def _hand_out(
    number: int, times: Sequence[AttemptTimes], pieces: Mapping[int, list[Piece]], is_confirming: bool = False
) -> None:
    """Give each worker the time in which it had a trial."""
    for each in times:
        if each.worker is not None and each.worker in pieces:
            pieces[each.worker].append(Piece(number, each.begin / 1000, each.end / 1000, is_confirming))


def _confirming(
    sweep: RunFolder, attempts: Mapping[int, Sequence[AttemptTimes]]
) -> Iterator[tuple[int, list[AttemptTimes]]]:
    """Yield the trials of the confirmation by their number there: the same workers train them."""
    own = sweep_state.confirmation_folder(sweep)
    for path in own.trials.iterdir() if own.trials.is_dir() else ():
        for run in RunFolder(path).with_seeds():
            yield int(path.name), [_closed(each, None, attempts) for each in run_times.trial_attempts(run)]


def _attempts(
    folder: RunFolder, state: RunState, times: Sequence[AttemptTimes], restarts: AccountedRestarts
) -> list[AttemptFacts]:
    """Return a run's attempts, with what ended each."""
    before = {each.attempt: each for each in endings.before(folder, accounted=restarts)} if len(times) > 1 else {}
    found = []
    for each in times:
        earlier = before.get(each.attempt)
        if earlier is not None:
            ended_by, then = earlier.ended, earlier.then
        else:
            is_running = each.outcome == "running"
            ended_by, then = "" if is_running else state.reason or endings.said_of(folder, each.attempt), ""
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
                each.outcome,
            )
        )
    return found


def _attempt_of_trial(times: AttemptTimes) -> AttemptFacts:
    started, ended = _iso(times.begin), _iso(times.end)
    return AttemptFacts(times.attempt, times.job_id, times.nodes, started, ended, times.seconds, "", "", times.outcome)


def _closed(times: AttemptTimes, ended: str | None, attempts: Mapping[int, Sequence[AttemptTimes]]) -> AttemptTimes:
    """Return an attempt of a trial with an end: its own, or that of the trial, or of the worker that had it.

    Args:
        ended: when the trial ended.
        attempts: those of each worker.
    """
    if times.end < OPEN:
        return times
    own = attempts.get(times.worker if times.worker is not None else -1, ())
    ends = [each.end for each in own if each.begin <= times.begin < each.end]
    ends += [] if ended is None else [run_times.milliseconds(ended)]
    return replace(times, end=max(times.begin, min(ends, default=times.begin)))


def _iso(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, timezone.utc).isoformat(timespec="milliseconds")
