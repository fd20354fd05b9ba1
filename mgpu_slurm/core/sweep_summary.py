"""The summary of a sweep, `summary.json`: written by its workers, and read by whoever looks at the sweep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from mgpu_slurm.core.record_types import Record

S = TypeVar("S", bound="SweepSummary")

TRIAL_STATES = ("COMPLETE", "PRUNED", "FAIL", "RUNNING", "WAITING")
"""Optuna's states of a trial."""


@dataclass(frozen=True, kw_only=True)
class TrialSummary(Record):
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


@dataclass(frozen=True, kw_only=True)
class SweepOver(Record):
    """Why no more trials start."""

    reason: str
    failed: bool
    """Whether the sweep has failed; if not, its budget is spent."""


@dataclass(frozen=True, kw_only=True)
class SweepSummary(Record):
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

    def to_json(self) -> dict[str, Any]:
        nested = {"best": self.best and self.best.to_json(), "over": self.over and self.over.to_json()}
        lists = {"known": self.known, "recent": self.recent}
        return super().to_json() | nested | {name: [each.to_json() for each in lists[name]] for name in lists}

    @classmethod
    def from_json(cls: type[S], values: Mapping[str, Any]) -> S:
        found = super().from_json(values)
        return replace(
            found,
            best=values.get("best") and TrialSummary.from_json(values["best"]),
            known=tuple(map(TrialSummary.from_json, values.get("known", ()))),
            over=values.get("over") and SweepOver.from_json(values["over"]),
            recent=tuple(map(TrialSummary.from_json, values.get("recent", ()))),
        )

    @property
    def ended(self) -> int:
        """The number of trials that have ended."""
        return sum(self.trials[state] for state in ("COMPLETE", "PRUNED", "FAIL"))
