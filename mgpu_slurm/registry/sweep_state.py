"""The state of a sweep, from its workers' states and the summary they write. The study itself is not read."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain

from mgpu_slurm.core import files
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import counted, earliest, latest, program
from mgpu_slurm.run_folder import states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.run_folder.sweep_records import SweepSummary, TrialSummary, confirmation_of


def summary_of(folder: RunFolder, workers: Sequence[RunState] | None = None) -> SweepSummary:
    """Return the summary that the workers write; empty if none has written it yet.

    Args:
        workers: their current states; a killed worker no longer updates its trial.
    """
    summary = _written(folder)
    summary = replace(summary, unconfirmed=unconfirmed(folder, summary))
    return summary if workers is None else _without_orphans(summary, workers)


def _without_orphans(summary: SweepSummary, workers: Sequence[RunState]) -> SweepSummary:
    """Count trials that no worker runs as waiting to be restarted."""
    counts = summary.trials
    alive = [each for worker in workers if worker.state in states.MAY_RUN for each in worker.by_process()]
    running = sum(each.trial is not None for each in alive)
    orphans = max(0, counts["RUNNING"] - running)
    moved = {"RUNNING": counts["RUNNING"] - orphans, "WAITING": counts["WAITING"] + orphans}
    return replace(summary, trials=counts | moved, given_back=summary.given_back + orphans)


def _written(folder: RunFolder) -> SweepSummary:
    try:
        return SweepSummary.from_json(files.read_json(folder.summary) or {})
    except ValueError:
        return SweepSummary()


def is_sweep(folder: RunFolder) -> bool:
    return folder.task is None and folder.sweep.exists()


def not_a_sweep(name: str) -> UserError:
    """Return the error for a run where a sweep should be named."""
    return UserError(f"{name} is not a sweep: name a study, see `{program()} status`")


def is_confirmation(folder: RunFolder) -> bool:
    """Return whether a sweep confirms another one, whose workers train its trials."""
    return folder.tasks.is_symlink()


def confirmed_by(folder: RunFolder) -> RunFolder:
    """Return the sweep that a confirmation confirms; any other run or group itself."""
    if not is_confirmation(folder):
        return folder
    return RunFolder(folder.path.with_name(os.readlink(folder.tasks).split("/")[1]))


def confirmation_folder(folder: RunFolder) -> RunFolder:
    """Return the folder of a sweep's confirmation, whether it exists or not."""
    return RunFolder(folder.path.with_name(confirmation_of(folder.path.name)))


def trials(folder: RunFolder) -> list[RunFolder]:
    """Return the trials of a sweep that have begun, in no particular order; none for other runs."""
    return [RunFolder(path) for path in folder.trials.iterdir()] if folder.trials.is_dir() else []


def overall(workers: Sequence[RunState], summary: SweepSummary) -> str:
    """Return one state for a sweep: that of its workers while one is alive, else by the results of its trials."""
    found = states.overall([worker.state for worker in workers])
    if states.is_alive(found):
        return found
    if _is_done(summary):
        return states.COMPLETED
    # a worker that exited because no trial was left has completed, whatever happened to the others
    has_failed = found == states.COMPLETED or (summary.over is not None and summary.over.failed)
    return states.FAILED if has_failed else found


def unconfirmed(folder: RunFolder, summary: SweepSummary) -> int:
    """Return how many of the best trials of a sweep are still to be trained again for its confirmation.

    Args:
        summary: as it is in the file.
    """
    if not summary.confirm or summary.best is None or (summary.over is not None and summary.over.failed):
        return 0
    own = confirmation_folder(folder)
    if not is_confirmation(own):
        # the summary does not say that it was deleted
        return summary.unconfirmed or min(summary.confirm, summary.trials["COMPLETE"])
    confirmation = _written(own)
    if confirmation.over is not None and not confirmation.over.failed:
        return 0
    return summary.unconfirmed + confirmation.trials["WAITING"] + confirmation.trials["RUNNING"]


def _is_done(summary: SweepSummary) -> bool:
    """Return whether nothing is left to do: all trials have ended, one of them with a value, or the budget is spent."""
    over, trials = summary.over, summary.trials
    if _is_in_vain(summary) or summary.unconfirmed:
        return False
    if trials["RUNNING"] or summary.given_back or summary.promotable:
        return False
    if over is not None:
        return not over.failed
    return not trials["WAITING"] and sum(trials.values()) > 0


def _is_in_vain(summary: SweepSummary) -> bool:
    """Return whether all trials have ended, none of them with a value."""
    return not summary.trials["COMPLETE"] and 0 < summary.ended == sum(summary.trials.values())


@dataclass(frozen=True, kw_only=True)
class SweepState(RunState):
    """The state of a sweep: that of its workers as one, with its trials."""

    trials: Mapping[str, int] = field(default_factory=dict)
    """The number of trials in each of Optuna's states."""
    best: TrialSummary | None = None
    front: tuple[TrialSummary, ...] = ()
    workers: Sequence[RunState] = ()
    left: float | None = None
    """About how many seconds the remaining trials take; None if that is unknown."""

    def seconds_left(self, now: datetime) -> float | None:
        return self.left


def state_of(folder: RunFolder, workers: Sequence[RunState]) -> SweepState:
    """Return the state of a sweep."""
    summary = summary_of(folder, workers)
    state, best = overall(workers, summary), summary.best
    return SweepState(
        run=folder.run,
        kind="sweep",
        state=state,
        job_id=workers[0].job_id,
        attempts=max(worker.attempts for worker in workers),
        nodes=workers[0].nodes,
        ranks=workers[0].ranks,
        progress=summary.ended,
        metrics={} if best is None or best.value is None else best.values or {summary.metric: best.value},
        submitted=workers[0].submitted,
        started=earliest(worker.started for worker in workers),
        ended=None if states.is_alive(state) else latest(worker.ended for worker in workers),
        reason=reason(workers, summary, state),
        trials=summary.trials,
        best=best,
        front=summary.front,
        workers=workers,
        left=seconds_left(workers, summary),
    )


def seconds_left(workers: Sequence[RunState], summary: SweepSummary) -> float | None:
    """Return an estimate for the remaining trials, from those that have ended; None if that is unknown."""
    at_work = chain.from_iterable(worker.by_process() for worker in workers if worker.state == states.RUNNING)
    running = sum(each.trial is not None for each in at_work)
    lengths = [trial.seconds for trial in summary.recent if trial.seconds is not None]
    # how many paused trials will be promoted is unknown
    if not running or not lengths or summary.over is not None or summary.trials["PAUSED"]:
        return None
    rounds = math.ceil(summary.trials["WAITING"] / running) + (1 if summary.trials["RUNNING"] else 0) / 2
    return rounds * sum(lengths) / len(lengths)


def reason(workers: Sequence[RunState], summary: SweepSummary, state: str) -> str:
    """Return a line: how many trials have ended and how many workers run, or why the sweep ended early."""
    told = f"{summary.ended} of {counted(sum(summary.trials.values()), 'trial')}"
    if states.is_alive(state):
        running = sum(worker.state == states.RUNNING for worker in workers)
        return f"{told}, {running} of {counted(len(workers), 'worker')} running"
    if summary.is_over and summary.over is not None:
        return f"{told}: {summary.over.reason}"
    if state == states.COMPLETED:
        paused = summary.trials["PAUSED"]
        return f"{told}; {paused} stay paused, as others are better" if paused else told
    if summary.trials["FAIL"] == sum(summary.trials.values()):
        return f"{told}, and all of them failed"
    if _is_in_vain(summary):
        return f"{told}, and all of them were pruned{_why_pruned(summary)}"
    left = summary.trials["RUNNING"] + summary.trials["WAITING"] + summary.promotable
    if summary.unconfirmed and not left:
        return f"{told}, {summary.unconfirmed} of the best not confirmed yet{_how(workers)}"
    return f"{told}, {left} unfinished{_how(workers)}"


def _how(workers: Sequence[RunState]) -> str:
    how = next((worker.reason for worker in workers if worker.state != states.COMPLETED), "")
    return f": {how}" if how else ""


def _why_pruned(summary: SweepSummary) -> str:
    return next((f": {trial.reason}" for trial in summary.recent if trial.reason), "")


def as_one(found: Sequence[tuple[RunFolder, RunState]], without: Sequence[RunFolder] = ()) -> list[RunState]:
    """Return the states of runs, with all workers of a sweep merged into one.

    Args:
        without: sweeps whose workers stay separate.
    """
    states_of: dict[RunFolder, list[RunState]] = {}
    for folder, state in found:
        is_worker = state.kind == "worker" and folder.group not in without
        states_of.setdefault(folder.group if is_worker else folder, []).append(state)
    return [
        state_of(folder, each) if each[0].kind == "worker" and folder.task is None else each[0]
        for folder, each in states_of.items()
    ]
