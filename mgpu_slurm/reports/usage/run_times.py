"""The times of runs for their ledgers: from the events of their attempts, their reports and their checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import zip_longest
from typing import Any

from mgpu_slurm.core.files import read_jsonl
from mgpu_slurm.reports.usage.ledger import OPEN, Outcome, Reported, Save, Stretch, TrialRun
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import REQUEUE_EXIT_CODE, TERMINATED_EXIT_CODE
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.checkpoint_names import checkpoint_step, complete_checkpoints
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Event, RunState, from_known
from mgpu_slurm.run_folder.usage_records import read_saves

ReportsOf = Callable[[RunFolder], Iterable[tuple[int, "int | None", Reported]]]
"""Returns the reports of a run, with their times and attempts: `reported`, or what has read the file already."""


@dataclass(frozen=True)
class AttemptTimes:
    """An attempt of a run, of a worker, or of a trial."""

    attempt: int
    job_id: str | None
    nodes: Sequence[str]
    begin: int
    """Milliseconds since the epoch."""
    end: int
    outcome: Outcome
    worker: int | None = None
    """The worker of a trial."""
    resources: Resources | None = None
    """What was asked for then; None for an attempt of version 0.1, or of a trial."""

    @property
    def seconds(self) -> float:
        return max(0, self.end - self.begin) / 1000


def milliseconds(time: str) -> int:
    """Return a time in ISO 8601 as milliseconds since the epoch."""
    return round(datetime.fromisoformat(time).timestamp() * 1000)


def attempts_of(folder: RunFolder, state: RunState) -> list[AttemptTimes]:
    """Return the attempts of a run that have started, oldest first.

    Args:
        state: its current state, which shows whether the last one is running.
    """
    return _attempts(folder, _end_of_last(folder, state), state.state in states.MAY_RUN)


def trial_attempts(run: RunFolder) -> list[AttemptTimes]:
    """Return the attempts of a trial, or of its run with a seed, on workers; an end that nobody recorded is `OPEN`."""
    return [each for each in _attempts(run, OPEN, is_alive=False) if each.worker is not None]


def _end_of_last(folder: RunFolder, state: RunState) -> int:
    """Return the end of a run's last attempt, if no event shows it."""
    # one that waits in the queue again has nothing allocated
    if state.state in states.MAY_RUN:
        return milliseconds(datetime.now(timezone.utc).isoformat())
    return milliseconds(state.ended or records.last_sign_of_life(folder))


def _attempts(folder: RunFolder, last: int, is_alive: bool) -> list[AttemptTimes]:
    events = records.events(folder)
    starts = [place for place, event in enumerate(events) if event.event == "started"]
    found = []
    for place, following in zip_longest(starts, starts[1:]):
        start = events[place]
        ended = next((each for each in events[place:following] if each.event == "ended"), None)
        next_begin = None if following is None else milliseconds(events[following].time)
        if ended is not None:
            end, outcome = milliseconds(ended.time), _outcome(ended)
        elif next_begin is not None:
            end, outcome = next_begin, "lost"
        else:
            end, outcome = last, "running" if is_alive else "lost"
        begin = milliseconds(start.time)
        end = end if next_begin is None else min(end, next_begin)
        worker = start.others.get("worker")
        found.append(
            AttemptTimes(
                start.attempt,
                start.job_id,
                tuple(start.nodes),
                begin,
                max(begin, end),
                outcome,
                None if worker is None else int(str(worker)),
                _resources(start),
            )
        )
    return found


def _resources(start: Event) -> Resources | None:
    return None if start.asked is None else from_known(Resources, start.asked)


def _outcome(ended: Event) -> Outcome:
    # a trial's event has no exit code, but says how it ended
    if "how" in ended.others:
        return "stopped"
    code = ended.others.get("exit_code")
    if code is None:
        return "lost"
    if code in (REQUEUE_EXIT_CODE, TERMINATED_EXIT_CODE):
        return "stopped"
    return "failed" if code else "completed"


def stretches_of(folder: RunFolder, attempts: Sequence[AttemptTimes], reports_of: ReportsOf) -> list[Stretch]:
    """Return the attempts of a run with their reports and checkpoints."""
    reports = _by_attempt(attempts, reports_of(folder))
    saves = _by_attempt(attempts, _saves(folder))
    return [
        Stretch(each.begin, each.end, each.outcome, reports.get(place, []), saves.get(place, []))
        for place, each in enumerate(attempts)
    ]


def reported(folder: RunFolder) -> Iterator[tuple[int, int | None, Reported]]:
    """Yield each report with its time and its attempt."""
    for line in read_jsonl(folder.metrics):
        time = milliseconds(line["time"])
        yield time, line.get("attempt"), Reported(time, line["progress"])


def _saves(folder: RunFolder) -> Iterator[tuple[int, int | None, Save]]:
    """Yield each checkpoint with its time and its attempt; of those of an older version, which exist still."""
    known = set()
    for each in read_saves(folder):
        known.add(each.step)
        begun = milliseconds(each.begun)
        yield begun, each.attempt, Save(begun, begun + round(1000 * each.stood), milliseconds(each.time))
    for path in complete_checkpoints(folder):
        if checkpoint_step(path) not in known:
            # it is not known how long the training stood
            time = round(path.stat().st_mtime * 1000)
            yield time, None, Save(time, time, time)


def _by_attempt(
    attempts: Sequence[AttemptTimes], found: Iterable[tuple[int, int | None, Any]]
) -> Mapping[int, list[Any]]:
    """Return what was found by the place of its attempt: the one that it names, or that of its time."""
    places = {each.attempt: place for place, each in enumerate(attempts)}
    by_attempt: dict[int, list[Any]] = {}
    for time, attempt, item in found:
        place = places.get(attempt or 0)
        if place is None:
            place = max((place for place, each in enumerate(attempts) if each.begin <= time), default=0)
        by_attempt.setdefault(place, []).append(item)
    return by_attempt


def has_failed(state: RunState) -> bool:
    """Return whether a run has ended without a result that somebody wanted to end so."""
    return state.state in states.TERMINAL - {states.COMPLETED, states.CANCELLED}


# -- sweeps


def trial_runs(sweep: RunFolder, reports_of: ReportsOf) -> list[TrialRun]:
    """Return the trials of a sweep, and their runs with several seeds, with their workers."""
    trials = [RunFolder(path) for path in sweep.trials.iterdir()] if sweep.trials.is_dir() else []
    return [run for trial in trials for run in _runs_of_trial(trial, reports_of)]


def _runs_of_trial(trial: RunFolder, reports_of: ReportsOf) -> Iterator[TrialRun]:
    seeds = trial.with_seeds()[1:]
    own = [each for each in _attempts(trial, OPEN, is_alive=False) if each.worker is not None]
    if not seeds:
        yield _trial_run(trial, own, reports_of)
        return
    runs = {run: [each for each in _attempts(run, OPEN, is_alive=False) if each.worker is not None] for run in seeds}
    # only the trial records ends: a run ends there, or when the next one begins
    ends = sorted({*(each.begin for attempts in runs.values() for each in attempts), *(each.end for each in own)})
    for run, attempts in runs.items():
        closed = [
            replace(each, end=next((end for end in ends if end > each.begin), OPEN), outcome="stopped")
            for each in attempts
        ]
        yield _trial_run(run, closed, reports_of)


def _trial_run(run: RunFolder, attempts: Sequence[AttemptTimes], reports_of: ReportsOf) -> TrialRun:
    stretches = stretches_of(run, attempts, reports_of)
    has_result = run.result.exists()
    if has_result and stretches and stretches[-1].end < OPEN:
        stretches[-1] = replace(stretches[-1], outcome="completed")
    return TrialRun(stretches, [each.worker or 0 for each in attempts], run.failure.exists() and not has_result)
