"""The contents of a sweep's `summary.json` as typed records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from mgpu_slurm.run_folder.record_types import Record, optional

S = TypeVar("S", bound="SweepSummary")
T = TypeVar("T", bound="TrialSummary")

TRIAL_WORDS = {
    "COMPLETE": "complete",
    "PRUNED": "pruned",
    "FAIL": "failed",
    "PAUSED": "paused",
    "RUNNING": "running",
    "WAITING": "waiting",
}
"""Words for Optuna's states of a trial, and for that of one which waits at a rung, for which Optuna's is WAITING too;
in the order in which they are shown."""


def confirmation_of(study: str) -> str:
    """Return the name of the study in which the best trials of a study are trained again."""
    return f"{study}-confirm"


@dataclass(frozen=True, kw_only=True)
class SchedulePart(Record):
    """The values by which a trial of population based training was trained for a while."""

    trial: int
    """The trial that was trained then, of which a later one is a copy."""
    until: int
    """The progress at which these values ended."""
    params: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrialSummary(Record):
    """One trial."""

    number: int
    state: str
    """One of `TRIAL_WORDS`."""
    value: float | None = None
    """The value of the metric, or the last one reported; None without any, or if it is NaN or infinite."""
    progress: int | None = None
    """The progress of the last report."""
    params: dict[str, object] = field(default_factory=dict)
    """The parameters by name, as passed to the job."""
    seconds: float | None = None
    """How long workers have had it; None until it has ended."""
    reason: str = ""
    """Why it failed or was pruned."""
    values: Mapping[str, float] | None = optional()
    """Of a complete trial with several objectives: all values by metric."""
    infeasible: bool = optional(False)
    """Whether it violates a constraint."""
    schedule: tuple[SchedulePart, ...] = optional(())
    """Of the best trial, if it is a copy: the values by which it was trained, in their order."""

    def to_json(self) -> dict[str, Any]:
        nested = {"schedule": [each.to_json() for each in self.schedule]} if self.schedule else {}
        return super().to_json() | nested

    @classmethod
    def from_json(cls: type[T], values: Mapping[str, Any]) -> T:
        parts = tuple(map(SchedulePart.from_json, values.get("schedule") or ()))
        return replace(super().from_json(values), schedule=parts)


@dataclass(frozen=True, kw_only=True)
class SweepOver(Record):
    """Why no more trials start."""

    reason: str = ""
    failed: bool = False
    """Whether the sweep has failed; if not, its budget is spent."""


@dataclass(frozen=True, kw_only=True)
class SweepSummary(Record):
    """The fields of `summary.json`; by default, those of a sweep that has not begun."""

    study: str = ""
    metric: str = ""
    direction: str = ""
    metrics: Mapping[str, str] | None = optional()
    """With several objectives: their directions by metric, the first as in `metric` and `direction`."""
    trials: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TRIAL_WORDS, 0))
    """The number of trials by state; those that have not begun are waiting."""
    best: TrialSummary | None = None
    """With several objectives, that with the best value of the first one."""
    front: tuple[TrialSummary, ...] = optional(())
    """With several objectives, the complete trials that no other is better than in all of them."""
    known: tuple[TrialSummary, ...] = ()
    """Trials with the points that the sweep file enqueues."""
    given_back: int = 0
    """Number of trials that were begun and wait to be resumed."""
    paused: dict[str, int] = field(default_factory=dict)
    """Number of paused trials by the progress of their rung."""
    promotable: int = 0
    """Number of paused trials that would be promoted if more workers came."""
    narrow: Mapping[str, str] | None = optional()
    """The parameters of which all of the best values are at one end of their range: `lower` or `upper`."""
    furthest: TrialSummary | None = None
    """While no trial is complete: the best of the paused trials that have come furthest."""
    confirm: int = optional(0)
    """How many of the best trials are trained again when the sweep is over."""
    unconfirmed: int = optional(0)
    """How many of them are left; in the file, without those that the confirmation has already."""
    over: SweepOver | None = None
    seconds: dict[str, tuple[int, float]] = field(default_factory=dict)
    """For `complete` and `pruned` trials: their number, and how long workers have had all of them together."""
    recent: tuple[TrialSummary, ...] = ()
    """The trials that ended last, in that order."""
    updated: str = ""

    def to_json(self) -> dict[str, Any]:
        one = {"best": self.best, "furthest": self.furthest, "over": self.over}
        nested = {name: each and each.to_json() for name, each in one.items()}
        lists = {"known": self.known, "recent": self.recent} | ({"front": self.front} if self.front else {})
        return super().to_json() | nested | {name: [each.to_json() for each in lists[name]] for name in lists}

    @classmethod
    def from_json(cls: type[S], values: Mapping[str, Any]) -> S:
        found = super().from_json(values)
        return replace(
            found,
            best=values.get("best") and TrialSummary.from_json(values["best"]),
            furthest=values.get("furthest") and TrialSummary.from_json(values["furthest"]),
            trials=dict.fromkeys(TRIAL_WORDS, 0) | found.trials,
            front=tuple(map(TrialSummary.from_json, values.get("front") or ())),
            known=tuple(map(TrialSummary.from_json, values.get("known") or ())),
            over=values.get("over") and SweepOver.from_json(values["over"]),
            seconds={name: (count, seconds) for name, (count, seconds) in found.seconds.items()},
            recent=tuple(map(TrialSummary.from_json, values.get("recent") or ())),
        )

    @property
    def is_over(self) -> bool:
        """Whether no more trials start, and none of the best is left to be trained again."""
        return self.over is not None and not self.unconfirmed

    @property
    def ended(self) -> int:
        """The number of trials that have ended."""
        return sum(self.trials[state] for state in ("COMPLETE", "PRUNED", "FAIL"))
