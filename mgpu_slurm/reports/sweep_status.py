"""The human-readable state of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path

from mgpu_slurm.core.formatting import (
    counted,
    cut,
    duration,
    program,
    short_path,
    short_value,
    time_of,
    without_empty_columns,
)
from mgpu_slurm.registry.sweep_state import is_confirmation, overall, reason, seconds_left, summary_of
from mgpu_slurm.reports.sink_lines import sink_lines
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.run_folder.sweep_records import TRIAL_WORDS, SweepSummary, TrialSummary, confirmation_of

MOST_OF_FRONT = 6
"""Number of trials on the Pareto front that are shown."""


def lines(folder: RunFolder, workers: Sequence[RunState], room: int | None = None) -> list[str]:
    """Return all details of a sweep.

    Args:
        room: the width of a terminal, to which lines are cut.
    """
    summary = summary_of(folder, workers)
    state = overall(workers, summary)
    told = [
        f"study     {folder.run}  {state}{_why(workers, summary, state)}",
        *_advice(folder.run, workers, summary, state),
        f"trials    {_trials(summary)}",
        *_best(folder, summary),
        *(f"{'' if place else 'known':<9} {_trial(summary, trial)}" for place, trial in enumerate(summary.known)),
        *_confirmation(folder, summary),
        *last_failure(folder, summary),
        f"spent     {_spent(folder, workers, summary)}",
        *_left(workers, summary),
        "",
        *_workers(workers),
    ]
    return [line if room is None else cut(line, room) for line in told]


def _why(workers: Sequence[RunState], summary: SweepSummary, state: str) -> str:
    if summary.is_over and summary.over is not None:
        return f": {summary.over.reason}"
    ended_early = not states.is_alive(state) and state != states.COMPLETED
    return f": {reason(workers, summary, state)}" if ended_early else ""


def _advice(study: str, workers: Sequence[RunState], summary: SweepSummary, state: str) -> list[str]:
    left = summary.trials["RUNNING"] + summary.trials["WAITING"] + summary.promotable + summary.unconfirmed
    if summary.is_over or states.is_alive(state) or state == states.COMPLETED or not left:
        return []
    return [] if "resume" in reason(workers, summary, state) else [f"continue  {program()} resume {study}"]


def _confirmation(folder: RunFolder, summary: SweepSummary) -> list[str]:
    if not summary.confirm or summary.best is None:
        return []
    if summary.unconfirmed:
        return [f"confirm   {summary.unconfirmed} of the best trials are left, as study {confirmation_of(folder.run)}"]
    return [f"confirm   {program()} best {folder.run}   (which of the best are really worse)"]


def _trials(summary: SweepSummary) -> str:
    counts = summary.trials
    paused = ", ".join(f"{count} at {at}" for at, count in summary.paused.items())
    words = TRIAL_WORDS | {"PAUSED": f"paused ({paused})"}
    told = ", ".join(f"{counts[state]} {told}" for state, told in words.items() if counts[state])
    return f"{sum(counts.values())}: {told}" if told else "none yet"


def last_failure(folder: RunFolder, summary: SweepSummary) -> list[str]:
    """Return a line on the newest trial that failed, if any is among the recent ones."""
    failed = [trial for trial in summary.recent if trial.state == "FAIL"]
    return [
        f"failed    trial {trial.number}: {trial.reason}  ({short_path(_logs(folder.of_trial(trial.number)))})"
        for trial in failed[-1:]
    ]


def _logs(trial: RunFolder) -> Path:
    """Return the folder of a trial's logs; with several seeds, that of its runs."""
    return trial.seeds if trial.seeds.is_dir() else trial.logs


def _best(folder: RunFolder, summary: SweepSummary) -> list[str]:
    """Return lines on the best trial, or on the Pareto front."""
    if summary.front:
        shown = [_trial(summary, trial) for trial in summary.front[:MOST_OF_FRONT]]
        if left := len(summary.front) - len(shown):
            shown.append(f"and {left} more: {program()} best {folder.run}")
        return [f"{'' if place else 'front':<9} {line}" for place, line in enumerate(shown)]
    found = summary.best or summary.furthest
    if found is None:
        why = ": every complete trial violates a constraint" if summary.trials["COMPLETE"] else " yet"
        return [f"best      none{why}"]
    return [f"best      {_trial(summary, found)}"]


def _trial(summary: SweepSummary, trial: TrialSummary) -> str:
    how = "" if trial.state == "COMPLETE" else f", {TRIAL_WORDS[trial.state]}"
    if trial.state == "PAUSED":
        how += f" at progress {trial.progress}"
    if trial.infeasible:
        how += ", infeasible"
    values = _values(summary, trial) or f"{summary.metric} NaN"
    return f"{values}  (trial {trial.number}{how})  {parameters(trial.params)}"


def _values(summary: SweepSummary, trial: TrialSummary) -> str:
    values = trial.values or ({} if trial.value is None else {summary.metric: trial.value})
    return "  ".join(f"{name} {value:.6g}" for name, value in values.items())


def parameters(values: Mapping[str, object]) -> str:
    return "  ".join(f"{name}={short_value(value)}" for name, value in values.items())


def _spent(folder: RunFolder, workers: Sequence[RunState], summary: SweepSummary) -> str:
    """Return how long the workers have used their nodes, and about how much time pruning saved."""
    gpus = read_spec(folder).resources.gpus
    if is_confirmation(folder):
        # its workers are those of the sweep, which has most of their time
        trials = sum(seconds for _, seconds in summary.seconds.values())
        return _hours(trials / max(len(worker.by_process()) for worker in workers) / 3600, gpus)
    hours = sum(records.hours(folder.of_task(number)) for number in range(len(workers)))
    told = _hours(hours, gpus)
    complete, complete_seconds = summary.seconds.get("complete", (0, 0.0))
    pruned, pruned_seconds = summary.seconds.get("pruned", (0, 0.0))
    if complete and pruned:
        saved = max(0.0, pruned * complete_seconds / complete - pruned_seconds) / 3600
        told += f"; pruning saved about {_hours(saved, gpus)}"
    return told


def _hours(hours: float, gpus: int) -> str:
    return f"{hours * gpus:.2f} GPU-hours" if gpus else f"{duration(hours * 3600)} of worker time"


def _seconds(worker: RunState, now: datetime) -> float:
    begun = time_of(worker.started)
    return 0.0 if begun is None else ((time_of(worker.ended) or now) - begun).total_seconds()


def _left(workers: Sequence[RunState], summary: SweepSummary) -> list[str]:
    left = seconds_left(workers, summary)
    return [] if left is None else [f"ETA       about {duration(left)}"]


def _workers(workers: Sequence[RunState]) -> list[str]:
    from tabulate import tabulate

    now = datetime.now(timezone.utc)
    rows = [["WORKER", "STATE", "ATTEMPT", "JOB", "TRIAL", "PROGRESS", "TIME", "METRICS, REASON"]]
    first_with: dict[str, str] = {}
    for worker in chain.from_iterable(each.by_process() for each in sorted(workers, key=_by_life)):
        trial = worker.trial
        has_trial = trial is not None and worker.state == states.RUNNING
        metrics = parameters(worker.metrics) if has_trial else ""
        number = worker.run.rpartition("/")[2]
        # workers that have failed alike do not repeat an error
        first = first_with.setdefault(worker.reason, number)
        why = worker.reason if first == number or states.is_alive(worker.state) else f"as worker {first}"
        rows.append(
            [
                number,
                worker.state,
                str(worker.attempts),
                worker.job_id or "",
                str(trial) if has_trial else "",
                str(worker.progress or "") if has_trial else "",
                duration(_seconds(worker, now)) if worker.started else "",
                "  ".join(filter(None, [metrics, ended_here(worker), why])),
            ]
        )
    told = tabulate(without_empty_columns(rows), tablefmt="plain", disable_numparse=True)
    return [line.rstrip() for line in told.splitlines()]


def ended_here(worker: RunState) -> str:
    """Return how many trials a worker without a trial has ended; those that it has paused may end elsewhere."""
    ended = worker.metrics.get("trials") if worker.trial is None else None
    return "" if ended is None else f"{counted(round(float(ended)), 'trial')} ended here"


def _by_life(worker: RunState) -> tuple[bool, bool]:
    """Return a sort key: running workers first, then those that will run."""
    return worker.state != states.RUNNING, not states.is_alive(worker.state)


def trial_line(trial: TrialSummary, summary: SweepSummary) -> str:
    """Return a line on the outcome of a trial."""
    words = TRIAL_WORDS[trial.state]
    values = _values(summary, trial)
    at = f" at {trial.progress}" if trial.state == "PRUNED" and trial.progress is not None else ""
    seconds = f"  ({duration(trial.seconds)})" if trial.seconds is not None else ""
    why = f": {_reason(trial, summary)}" if trial.reason else ""
    is_best = summary.best is not None and summary.best.number == trial.number
    mark = "  best so far" if is_best else ""
    if summary.metrics:
        mark = "  on the front" if any(trial.number == each.number for each in summary.front) else ""
    value = f"  {values}" if values else ""
    return f"-- trial {trial.number:>3}  {words}{at}{why}{value}  {parameters(trial.params)}{seconds}{mark}"


def _reason(trial: TrialSummary, summary: SweepSummary) -> str:
    """Return why a trial has ended; the error of an earlier one, which may be long, is not repeated."""
    alike = [each.number for each in summary.recent if (each.state, each.reason) == (trial.state, trial.reason)]
    if trial.state != "FAIL" or alike[:1] in ([], [trial.number]):
        return trial.reason
    return f"as trial {alike[0]}"


def ending_lines(folder: RunFolder, workers: Sequence[RunState]) -> list[str]:
    """Return the summary of a sweep that has ended."""
    summary = summary_of(folder)
    told = lines(folder, workers)
    told = told[: told.index("")]
    if summary.best is not None:
        told.append(f"more      {program()} best {folder.run}   (all values, and the command that trains it again)")
    return told + sink_lines(folder)


def new_lines(summary: SweepSummary, shown: set[int]) -> list[str]:
    """Return lines on trials that have ended since the last call.

    Args:
        shown: numbers of trials that were shown already; the new ones are added.
    """
    new = [trial for trial in summary.recent if trial.number not in shown]
    shown |= {trial.number for trial in new}
    return [trial_line(trial, summary) for trial in new]
