"""What rank 0 of a worker tells its ranks, and what they tell it: the next trial, how one ended, why to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mgpu_slurm.sweeps.search.parameters import Values

T = TypeVar("T")


@dataclass(frozen=True)
class Assignment:
    """A trial that this worker has taken."""

    number: int
    attempt: int
    """From 1: how often it was begun, by any worker."""
    values: Values
    """Of its parameters, by name; one that is not active is missing."""
    words: tuple[str, ...] = ()
    """Of a command, with its values in their places."""


@dataclass(frozen=True)
class Leave:
    """There is nothing to do here any more."""

    exit_code: int
    reason: str


def as_plain(order: Assignment | Leave | None) -> dict[str, Any] | None:
    """Return an order as values that rank 0 can tell the others."""
    if not isinstance(order, Assignment):
        return None if order is None else {"is_trial": False, **vars(order)}
    # a sampler of the user's own may choose NumPy's numbers
    values = {name: each.item() if isinstance(each, np.generic) else each for name, each in order.values.items()}
    return {"is_trial": True, **vars(order), "values": values}


def from_plain(told: dict[str, Any] | None) -> Assignment | Leave | None:
    """Return the order that rank 0 has told."""
    if told is None:
        return None
    fields = {name: value for name, value in told.items() if name != "is_trial"}
    return Assignment(**fields) if told["is_trial"] else Leave(**fields)


class NoMoreHere(SystemExit):
    """The ranks cannot go on with their trial, whatever its code makes of errors: it passes `except Exception`."""


class SweepFailed(NoMoreHere):
    """The sweep cannot go on: its trials all fail alike, or the job does not report what is looked for."""


class BrokenWorker(NoMoreHere):
    """Trials fail here that would do well elsewhere."""


class Superseded(NoMoreHere):
    """This worker was taken for dead, and its trial is somebody else's now."""


class StudyLost(NoMoreHere):
    """The study could not be read or written, which is no fault of the trial."""


RAISED_TOGETHER = (SweepFailed, BrokenWorker, Superseded, StudyLost)
"""What all ranks raise when rank 0 does."""


def undisturbed(ask: Callable[[], T]) -> T:
    """What a call on the study answers.

    Raises:
        StudyLost: for whatever it raises that is not meant for the ranks.
    """
    try:
        return ask()
    except Exception as error:
        raise StudyLost(f"{type(error).__name__}: {error}") from error
