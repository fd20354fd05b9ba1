"""Messages between rank 0 of a worker and its other ranks: the next trial, how one ended, why to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mgpu_slurm.sweeps.search.parameters import Values

if TYPE_CHECKING:
    from mgpu_slurm.sweeps.client.study_client import StudyClient

T = TypeVar("T")


@dataclass(frozen=True)
class Assignment:
    """A trial that this worker has taken."""

    number: int
    attempt: int
    """Number of the attempt, from 1, over all workers."""
    study: str
    """The study: that of the worker's sweep, or its confirmation."""
    values: Values
    """Values of the parameters by name, without inactive ones."""
    words: tuple[str, ...] = ()
    """Words of the command, with the values inserted."""
    seed: int | None = None
    """The seed with which to train it now, if it has several."""


@dataclass(frozen=True)
class Leave:
    """The order to leave, as there is nothing to do here any more."""

    exit_code: int
    reason: str


def as_plain(order: Assignment | Leave | None) -> dict[str, object] | None:
    """Return an order as plain values that rank 0 can broadcast."""
    if not isinstance(order, Assignment):
        return None if order is None else {"is_trial": False, **vars(order)}
    # a user's sampler may choose NumPy numbers
    values = {name: each.item() if isinstance(each, np.generic) else each for name, each in order.values.items()}
    return {"is_trial": True, **vars(order), "values": values}


def from_plain(told: dict[str, Any] | None) -> Assignment | Leave | None:
    """Return the order that rank 0 has broadcast."""
    if told is None:
        return None
    fields = {name: value for name, value in told.items() if name != "is_trial"}
    return Assignment(**fields) if told["is_trial"] else Leave(**fields)


class WorkerFinished(SystemExit):
    """The ranks cannot continue their trial. A SystemExit, so that `except Exception` in its code does not catch it."""


class SweepFailed(WorkerFinished):
    """The sweep cannot continue: its trials fail with the same error, or one says that the others will fail too."""


class BrokenWorker(WorkerFinished):
    """Trials fail on this worker that succeed elsewhere."""


class Superseded(WorkerFinished):
    """This worker was taken for dead, and its trial was given to another one."""


class StudyLost(WorkerFinished):
    """The study could not be read or written, which is not the trial's fault."""


RAISED_TOGETHER = (SweepFailed, BrokenWorker, Superseded, StudyLost)
"""Errors that all ranks raise when rank 0 does."""


def undisturbed(ask: Callable[[], T]) -> T:
    """Call a function on the study and return its result.

    Raises:
        StudyLost: the call raised an error that is not meant for the ranks.
    """
    try:
        return ask()
    except Exception as error:
        raise StudyLost(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Ending:
    """How a trial ended on a rank."""

    tell: Callable[[StudyClient], None]
    """Call by which rank 0 reports it to the study."""
    leave: Leave | None = None
    """Why the worker leaves its nodes too, or None if it stays; the same on all ranks."""
