"""Conclusions from failed trials: about the sweep, if others would fail too, or a worker, whose node may be broken."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from optuna.trial import FrozenTrial, TrialState

from mgpu_slurm.core.errors import SweepError
from mgpu_slurm.sweeps.scheduling import samplers
from mgpu_slurm.sweeps.scheduling.samplers import Doubt
from mgpu_slurm.sweeps.study import claims as claiming

FIRST_FAILURES = 5
"""Number of trials (or all, if fewer) that end the sweep if they fail with the same error and none has gone well."""

EARLY_FAILURES = 2
"""Same failures on one worker, while no trial has gone well, before it waits for the first results of others."""

LATER_FAILURES = 3
"""Same failures in a row on one worker, if others have gone well, before another worker tries such a trial."""

_NUMBER = re.compile(r"\d[\d.eE+-]*")

SEED_REPORTED = "mgpu:seed_reported"
"""Attribute of a trial with several seeds, one of which has reported a finite value."""


@dataclass(frozen=True)
class Place:
    """A worker on its current nodes."""

    worker: int
    since: datetime


def goes_well(trials: Sequence[FrozenTrial], kind: str | None = None, least: float = 0.0) -> bool:
    """Return whether any trial has ended well, or has come further than those that failed.

    Args:
        kind: count only failures of this kind; None for all.
        least: number of reports of another failure of this kind.
    """
    furthest = max(least, _furthest(trials, kind))
    return any(_goes_well(trial, furthest) for trial in trials)


def _furthest(trials: Sequence[FrozenTrial], kind: str | None = None) -> float:
    """Return the largest number of reports of a failed trial."""
    failed = [trial for trial in trials if trial.state == TrialState.FAIL]
    return max((_reports(trial) for trial in failed if kind in (None, _kind_of(trial))), default=0.0)


def _goes_well(trial: FrozenTrial, furthest: float) -> bool:
    if trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
        return True
    if trial.state == TrialState.WAITING and samplers.DOUBT not in trial.system_attrs:
        # paused, or given back by a worker that had to leave
        return _has_reported(trial)
    return trial.state != TrialState.FAIL and _reports(trial) > furthest


def _reports(trial: FrozenTrial) -> float:
    """Return the number of values that a trial has reported; a half if only one of its seeds has reported one."""
    return len(trial.intermediate_values) or 0.5 * (SEED_REPORTED in trial.system_attrs)


def _has_reported(trial: FrozenTrial) -> bool:
    return bool(trial.intermediate_values) or SEED_REPORTED in trial.system_attrs


def common_failure(trials: Sequence[FrozenTrial], limit: int | None) -> str | None:
    """Return why trials that have not begun would fail too; None if nothing indicates it.

    Args:
        limit: maximum number of trials.
    """
    failed = [trial for trial in trials if trial.state == TrialState.FAIL]
    kinds = set(map(_kind_of, failed))
    if len(kinds) != 1 or goes_well(trials):
        return None
    if len(failed) < min(FIRST_FAILURES, limit or FIRST_FAILURES):
        return None
    alike = (
        "the only trial failed"
        if len(failed) == 1
        else f"the first {len(failed)} trials all failed with the same error"
    )
    return f"{alike}: {_reason(failed[-1])}"


def concerns_all(reason: str) -> bool:
    """Return whether the error of a trial says that other trials will fail too."""
    return re.search(rf"\b{SweepError.__name__}: ", reason) is not None


def is_suspect(trials: Sequence[FrozenTrial], place: Place) -> bool:
    """Return whether the first trials there failed with the same error so often that the next one should wait."""
    streak = _streak(trials, place)
    return len(streak) >= EARLY_FAILURES and not goes_well(trials, _kind_of(streak[-1]))


def awaits_others(trials: Sequence[FrozenTrial]) -> bool:
    """Return whether a worker whose last trial did not fail is running a trial that may still fail like others."""
    failing = {worker for worker, trial in _last_ended(trials).items() if trial.state == TrialState.FAIL}
    furthest = _furthest(trials)
    early = [trial for trial in trials if trial.state == TrialState.RUNNING and _reports(trial) <= furthest]
    return any(failing.isdisjoint(claiming.claims(trial)) for trial in early)


def workers_with_trials(trials: Sequence[FrozenTrial]) -> set[int]:
    return {worker for trial in trials for worker in claiming.claims(trial)}


def is_doubtful(trials: Sequence[FrozenTrial], place: Place, trial: FrozenTrial, reason: str) -> bool:
    """Return whether a trial that failed there should be tried on another worker before it counts as failed.

    The node may be broken if trial after trial fails there with the same error. Training the same parameters elsewhere
    shows whether it is. Each time that such a trial fails elsewhere too, the number of failures needed doubles.
    """
    cleared = sum(_verdict(each, place) is False for each in trials)
    streak = _streak(trials, place)
    is_alike = not streak or _kind_of(streak[-1]) == _kind(reason)
    before = len(streak) if is_alike else 0
    is_often = before + 1 >= LATER_FAILURES << cleared
    return samplers.DOUBT not in trial.system_attrs and is_often and goes_well(trials, _kind(reason), _reports(trial))


def is_in_doubt(trials: Sequence[FrozenTrial], place: Place) -> bool:
    """Return whether a trial that failed there is still to be tried on another worker."""
    unfinished = [trial for trial in trials if not trial.state.is_finished()]
    return any(_doubt_of(trial, place) is not None and _verdict(trial, place) is None for trial in unfinished)


def in_doubt(trials: Sequence[FrozenTrial]) -> set[int]:
    """Return the workers of which a trial is still to be tried on another one."""
    doubts = [samplers.doubt_of(trial) for trial in trials if not trial.state.is_finished()]
    return {doubt.worker for doubt in doubts if doubt is not None}


def broken_worker(trials: Sequence[FrozenTrial], place: Place) -> str | None:
    """Return why a worker is broken: a trial that failed there goes well elsewhere. None if no trial shows it."""
    for trial in trials:
        doubt = _doubt_of(trial, place)
        if doubt is not None and _verdict(trial, place):
            return f"trial {trial.number} failed here, but runs well elsewhere: {doubt.reason}"
    return None


def innocent(trials: Sequence[FrozenTrial], place: Place) -> list[int]:
    """Return the numbers of the trials that failed on a broken worker with the errors of its node."""
    doubts = [_doubt_of(trial, place) for trial in trials if _verdict(trial, place)]
    kinds = {_kind(doubt.reason) for doubt in doubts if doubt is not None}
    failed = [trial for trial in _ended_at(trials, place) if trial.state == TrialState.FAIL]
    return [trial.number for trial in failed if _kind_of(trial) in kinds]


def _doubt_of(trial: FrozenTrial, place: Place) -> Doubt | None:
    """Return the doubt about a failure of the trial there."""
    doubt = samplers.doubt_of(trial)
    is_there = doubt is not None and doubt.worker == place.worker and datetime.fromisoformat(doubt.time) >= place.since
    return doubt if is_there else None


def _verdict(trial: FrozenTrial, place: Place) -> bool | None:
    """Return whether a trial that failed there goes well elsewhere; None while unknown."""
    doubt = _doubt_of(trial, place)
    if doubt is None or place.worker in claiming.claims(trial):
        return None
    if samplers.has_failed(trial):
        return False
    # its reports from where it failed do not count
    is_further = len(trial.intermediate_values) > doubt.reports
    return True if is_further or trial.state in (TrialState.COMPLETE, TrialState.PRUNED) else None


def _streak(trials: Sequence[FrozenTrial], place: Place) -> list[FrozenTrial]:
    """Return the last consecutive failures with the same error there."""
    streak: list[FrozenTrial] = []
    for trial in reversed(_ended_at(trials, place)):
        if trial.state != TrialState.FAIL or (streak and _kind_of(trial) != _kind_of(streak[0])):
            break
        streak.insert(0, trial)
    return streak


def _ended_at(trials: Sequence[FrozenTrial], place: Place) -> list[FrozenTrial]:
    own = [trial for trial in trials if place.worker in claiming.claims(trial)]
    return [trial for trial in _by_end(own) if _begun(trial) >= place.since]


def _last_ended(trials: Sequence[FrozenTrial]) -> dict[int, FrozenTrial]:
    """Return the trial that ended last for each worker."""
    return {worker: trial for trial in _by_end(trials) for worker in claiming.claims(trial)}


def _by_end(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    ended = [trial for trial in trials if trial.datetime_complete is not None]
    return sorted(ended, key=lambda trial: (trial.datetime_complete, trial.number))


def _begun(trial: FrozenTrial) -> datetime:
    assert trial.datetime_start is not None
    return trial.datetime_start.astimezone()


def _kind_of(trial: FrozenTrial) -> str:
    return _kind(_reason(trial))


def _reason(trial: FrozenTrial) -> str:
    reason: str = trial.system_attrs.get(claiming.REASON, "")
    return reason


def _kind(reason: str) -> str:
    """Return an error's message with numbers masked, so that it does not depend on the trial's values."""
    return _NUMBER.sub("...", reason)
