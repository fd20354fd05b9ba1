"""What rank 0 of a worker tells its ranks, and what they tell it: the next trial, how one ended, why to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from mgpu_slurm.sweeping.space import Values

if TYPE_CHECKING:
    from mgpu_slurm.sweeping.participant import Participant

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


@dataclass(frozen=True)
class Ending:
    """What has become of a trial on a rank."""

    tell: Callable[[Participant], None]
    """How rank 0 tells the study."""
    leave: Leave | None = None
    """Whether the worker leaves its nodes, too; the same on all ranks."""


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


def undisturbed(ask: Callable[[], T]) -> T:
    """What a call on the study answers.

    Raises:
        StudyLost: for whatever it raises that is not meant for the ranks.
    """
    try:
        return ask()
    except Exception as error:
        raise StudyLost(f"{type(error).__name__}: {error}") from error
