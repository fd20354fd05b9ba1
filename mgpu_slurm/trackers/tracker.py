"""`Tracker`, the interface of a run in an experiment tracker, and what a tracker is told of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mgpu_slurm.run_folder.record_types import Report

PROGRESS = "mgpu/progress"
"""The name under which trackers have a report's progress."""

Status = Literal["running", "waiting", "completed", "failed", "stopped"]
"""How a run stands; one that waits will be restarted."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker gets of a run in addition to its reports."""

    name: str
    key: str
    """Identifies the run in all trackers, over all attempts: 12 hexadecimal digits."""
    folder: Path
    started: str
    """ISO 8601 with the time zone."""
    group: str | None = None
    """The name of the group or sweep that it belongs to."""
    is_trial: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    """The job's config, with one level of names."""
    tags: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None
    """The git commit of its code."""


class Tracker(ABC):
    """One run in a tracker. It is found there or created when this object is made.

    Methods may raise any error: the object is then dropped, and another one made later, which asks the tracker again
    what it has.
    """

    @property
    @abstractmethod
    def id(self) -> str:
        """The tracker's own id of the run."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where people find the run."""

    @abstractmethod
    def missing(self, reports: Sequence[Report]) -> list[Report]:
        """Return those of the first reports of the run that the tracker does not have yet; asks the tracker."""

    @abstractmethod
    def send(self, reports: Sequence[Report]) -> None:
        """Add the reports that follow those it has; return once they are stored."""

    @abstractmethod
    def finish(self, status: Status, tags: Mapping[str, str], ended: str | None) -> None:
        """Record how the run stands, and let go of it.

        Args:
            tags: their values now.
            ended: when it ended, in ISO 8601; None for now.
        """
