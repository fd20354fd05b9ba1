"""The summary of a sweep, `summary.json`: written by its workers, and read by whoever looks at the sweep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

TRIAL_STATES = ("COMPLETE", "PRUNED", "FAIL", "RUNNING", "WAITING")
"""Optuna's states of a trial."""


@dataclass(frozen=True)
class TrialSummary:
    """One trial."""

    number: int
    state: str
    """One of `TRIAL_STATES`."""
    value: float | None
    """The value of the metric, or the last one reported; None without any, or if it is NaN or infinite."""
    progress: int | None
    """The progress of the last report."""
    params: dict[str, object]
    """The parameters by name, as passed to the job."""
    seconds: float | None
    """How long workers have had it; None until it has ended."""
    reason: str
    """Why it failed or was pruned."""


@dataclass(frozen=True)
class SweepOver:
    """Why no more trials start."""

    reason: str
    failed: bool
    """Whether the sweep has failed; if not, its budget is spent."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @staticmethod
    def from_json(record: Mapping[str, Any] | None) -> SweepOver | None:
        return None if record is None else SweepOver(record["reason"], record["failed"])


@dataclass(frozen=True)
class SweepSummary:
    """The fields of `summary.json`; by default, those of a sweep that has not begun."""

    study: str = ""
    metric: str = ""
    direction: str = ""
    trials: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TRIAL_STATES, 0))
    """The number of trials by state; those that have not begun are waiting."""
    best: TrialSummary | None = None
    known: tuple[TrialSummary, ...] = ()
    """Trials with the points that the sweep file enqueues."""
    given_back: int = 0
    """Number of trials that were begun and wait to be resumed."""
    over: SweepOver | None = None
    seconds: dict[str, tuple[int, float]] = field(default_factory=dict)
    """For `complete` and `pruned` trials: their number, and how long workers have had all of them together."""
    recent: tuple[TrialSummary, ...] = ()
    """The trials that ended last, in that order."""
    updated: str = ""

    def to_json(self) -> dict[str, object]:
        # asdict copies every value, which takes longer than all else about a summary
        return {
            **vars(self),
            "best": None if self.best is None else vars(self.best),
            "known": [vars(trial) for trial in self.known],
            "over": None if self.over is None else vars(self.over),
            "recent": [vars(trial) for trial in self.recent],
        }

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> SweepSummary:
        best = record.get("best")
        parts = {
            "best": None if best is None else TrialSummary(**best),
            "known": tuple(TrialSummary(**each) for each in record.get("known", ())),
            "over": SweepOver.from_json(record.get("over")),
            "recent": tuple(TrialSummary(**each) for each in record.get("recent", ())),
        }
        return SweepSummary(**{**record, **parts})
