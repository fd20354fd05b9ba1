"""What failed trials say: of the sweep, where all fail alike, or of one worker, whose node may be broken.

All functions read the study's own trials, and none goes by a clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from optuna.trial import FrozenTrial, TrialState

from mgpu_slurm.sweeping import study as studies

LEAST_FAILURES = 2
"""Trials that have to fail alike before anything is made of it."""

LEAST_FAILURES_OF_ONE = 3
"""Trials that one worker may use up while others do well."""

UNLIKELY = 0.01
"""Chance below which a worker's failures are not put down to its trials' parameters."""

_NUMBER = re.compile(r"\d[\d.eE+-]*")


def goes_well(trials: Sequence[FrozenTrial]) -> bool:
    """Whether any trial has come to anything."""
    return any(map(_goes_well, trials))


def _goes_well(trial: FrozenTrial) -> bool:
    if trial.state == TrialState.RUNNING:
        return bool(trial.intermediate_values)
    return trial.state in (TrialState.COMPLETE, TrialState.PRUNED)


def common_failure(trials: Sequence[FrozenTrial], at_work: Iterable[int], limit: int | None) -> str | None:
    """Why the next trials will fail like the first ones did; None where they may do better.

    Args:
        at_work: workers, the first trial of each of which has to fail.
        limit: how many trials there may be.
    """
    failed = _failed(trials)
    if goes_well(trials) or len(set(map(_kind, failed))) != 1 or is_awaited(trials, at_work):
        return None
    if len(failed) < min(LEAST_FAILURES, limit or LEAST_FAILURES):
        return None
    alike = "the only trial" if len(failed) == 1 else f"all of the first {len(failed)} trials"
    return f"{alike} failed alike: {failed[-1].system_attrs.get(studies.REASON)}"


def failed_first(trials: Sequence[FrozenTrial], worker: int) -> bool:
    """Whether a worker had better hear of the others' first trials before it uses up more."""
    own = [trial for trial in _failed(trials) if worker in studies.claims(trial)]
    return len(own) >= LEAST_FAILURES and not goes_well(trials)


def is_awaited(trials: Sequence[FrozenTrial], at_work: Iterable[int]) -> bool:
    """Whether a worker has not come to the end of its first trial, so that nobody knows whether that will fail too."""
    return not {worker for trial in _failed(trials) for worker in studies.claims(trial)}.issuperset(at_work)


def broken_worker(trials: Sequence[FrozenTrial], worker: int) -> str | None:
    """What is wrong with a worker whose last trials failed alike where those of others do well; None if nothing is."""
    own = [trial for trial in trials if worker in studies.claims(trial)]
    streak = _failures_at_the_end([trial for trial in own if trial.state.is_finished()])
    others = [trial for trial in trials if worker not in studies.claims(trial)]
    failed, well = len(_failed(others)), sum(map(_goes_well, others))
    # by Laplace's rule of succession
    chance = ((failed + 1) / (failed + well + 2)) ** len(streak)
    if len(streak) < LEAST_FAILURES_OF_ONE or chance >= UNLIKELY:
        return None
    return (
        f"the last {len(streak)} trials failed alike here, and {well} of {failed + well} did well elsewhere:"
        f" {streak[-1].system_attrs.get(studies.REASON)}"
    )


def _failures_at_the_end(ended: list[FrozenTrial]) -> list[FrozenTrial]:
    """The last failures of one kind, with nothing else between them."""
    ended.sort(key=lambda trial: (trial.datetime_complete, trial.number))
    streak: list[FrozenTrial] = []
    for trial in reversed(ended):
        if trial.state != TrialState.FAIL or (streak and _kind(trial) != _kind(streak[0])):
            break
        streak.insert(0, trial)
    return streak


def _failed(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    return [trial for trial in trials if trial.state == TrialState.FAIL]


def _kind(trial: FrozenTrial) -> str:
    """What its error is, whichever values of the trial its message names."""
    return _NUMBER.sub("...", trial.system_attrs.get(studies.REASON, ""))
