"""What failed trials say: of the sweep, where all fail alike, or of one worker, whose node may be broken."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from optuna.trial import FrozenTrial, TrialState

from mgpu_slurm.sweeping import study as studies

FIRST_FAILURES = 2
"""Trials that have to fail alike, and none go well, before anything is made of it."""

LATER_FAILURES = 3
"""Trials that one worker may use up in a row where others have done well."""

UNLIKELY = 0.01
"""How often a worker may be called broken, in all of its trials, whose trials fail by their parameters."""

_NUMBER = re.compile(r"\d[\d.eE+-]*")


@dataclass(frozen=True)
class Place:
    """A worker on the nodes that it has now."""

    worker: int
    since: datetime


def goes_well(trials: Sequence[FrozenTrial]) -> bool:
    """Whether any trial has come to anything."""
    return any(map(_goes_well, trials))


def _goes_well(trial: FrozenTrial) -> bool:
    ended_well = trial.state in (TrialState.COMPLETE, TrialState.PRUNED)
    return ended_well or (trial.state != TrialState.FAIL and bool(trial.intermediate_values))


def common_failure(trials: Sequence[FrozenTrial], limit: int | None) -> str | None:
    """Why trials that have not begun would fail too; None where nothing says so.

    Args:
        limit: how many trials there may be.
    """
    failed = [trial for trial in trials if trial.state == TrialState.FAIL]
    if goes_well(trials) or len(set(map(_kind, failed))) != 1:
        return None
    if len(failed) < min(FIRST_FAILURES, limit or FIRST_FAILURES):
        return None
    alike = "the only trial" if len(failed) == 1 else f"all of the first {len(failed)} trials"
    return f"{alike} failed alike: {failed[-1].system_attrs.get(studies.REASON)}"


def is_suspect(trials: Sequence[FrozenTrial], place: Place) -> bool:
    """Whether so many trials have failed alike there that the next ones would better wait for news of others."""
    return len(_streak(trials, place)) >= (LATER_FAILURES if goes_well(trials) else FIRST_FAILURES)


def is_news_due(trials: Sequence[FrozenTrial]) -> bool:
    """Whether a worker of whom no failure is the last news trains a trial that has said nothing yet."""
    failing = {worker for worker, trial in _last_ended(trials).items() if trial.state == TrialState.FAIL}
    silent = [trial for trial in trials if trial.state == TrialState.RUNNING and not trial.intermediate_values]
    return any(failing.isdisjoint(studies.claims(trial)) for trial in silent)


def workers_with_trials(trials: Sequence[FrozenTrial]) -> set[int]:
    return {worker for trial in trials for worker in studies.claims(trial)}


def broken_worker(trials: Sequence[FrozenTrial], place: Place) -> str | None:
    """What is wrong with a worker whose last trials failed alike, where those of others do well; None if nothing is.

    What others did before that does not count: trials may fail alike everywhere from some time, or some place in the
    space, on.
    """
    streak = _streak(trials, place)
    if len(streak) < LATER_FAILURES:
        return None
    begun = _begun(streak[0])
    others = [trial for trial in trials if place.worker not in studies.claims(trial) and _is_news(trial, begun)]
    well = sum(map(_goes_well, others))
    # that a trial fails elsewhere, by Laplace's rule of succession; each trial here was an occasion to be unlucky
    chance = (len(others) - well + 1) / (len(others) + 2)
    if not well or chance ** len(streak) * len(_ended_at(trials, place)) >= UNLIKELY:
        return None
    return (
        f"the last {len(streak)} trials failed alike here, and {well} of {len(others)} did well elsewhere meanwhile:"
        f" {streak[-1].system_attrs.get(studies.REASON)}"
    )


def _is_news(trial: FrozenTrial, since: datetime) -> bool:
    if trial.state == TrialState.RUNNING:
        return bool(trial.intermediate_values)
    return trial.datetime_complete is not None and trial.datetime_complete.astimezone() >= since


def _streak(trials: Sequence[FrozenTrial], place: Place) -> list[FrozenTrial]:
    """The last failures of one kind there, with nothing else between them."""
    streak: list[FrozenTrial] = []
    for trial in reversed(_ended_at(trials, place)):
        if trial.state != TrialState.FAIL or (streak and _kind(trial) != _kind(streak[0])):
            break
        streak.insert(0, trial)
    return streak


def _ended_at(trials: Sequence[FrozenTrial], place: Place) -> list[FrozenTrial]:
    own = [trial for trial in trials if place.worker in studies.claims(trial)]
    return [trial for trial in _by_end(own) if _begun(trial) >= place.since]


def _last_ended(trials: Sequence[FrozenTrial]) -> dict[int, FrozenTrial]:
    """By worker."""
    return {worker: trial for trial in _by_end(trials) for worker in studies.claims(trial)}


def _by_end(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    ended = [trial for trial in trials if trial.datetime_complete is not None]
    return sorted(ended, key=lambda trial: (trial.datetime_complete, trial.number))


def _begun(trial: FrozenTrial) -> datetime:
    assert trial.datetime_start is not None
    return trial.datetime_start.astimezone()


def _kind(trial: FrozenTrial) -> str:
    """What its error is, whichever values of the trial its message names."""
    return _NUMBER.sub("...", trial.system_attrs.get(studies.REASON, ""))
