"""The facts of a report: what its page shows, and what `report --json` prints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mgpu_slurm.reports.facts.series import Series
from mgpu_slurm.reports.usage.advice import Advice
from mgpu_slurm.reports.usage.ledger import Ledger, Outcome
from mgpu_slurm.reports.usage.resource_use import Asked, Used
from mgpu_slurm.run_folder.usage_records import NodeUsage

if TYPE_CHECKING:
    from mgpu_slurm.sweeps.analysis.study_facts import StudyFacts

Kind = Literal["run", "trial", "foreign"]


@dataclass(frozen=True)
class AttemptFacts:
    """An attempt of a run, or of a sweep's worker."""

    attempt: int
    job_id: str | None
    nodes: Sequence[str]
    started: str
    """ISO 8601 with the time zone, as all times here."""
    ended: str | None
    """None while it runs."""
    seconds: float
    ended_by: str
    """Why it ended, in words; empty if it completed or runs."""
    then: str
    """What restarted the run; empty if nothing did."""
    outcome: Outcome


@dataclass(frozen=True)
class MetricFacts:
    last: float
    best: float | None
    direction: str
    is_assumed: bool
    """Whether the direction was taken from the metric's name."""


def plain(value: Any) -> Any:
    """Return a config value as JSON has it; text for a date and the like."""
    return json.loads(json.dumps(value, default=str))


@dataclass
class RunFacts:
    """A run, a trial of a sweep, or a folder with event files of another program."""

    run: str
    kind: Kind
    group: str | None
    """The group or study to which it belongs."""
    state: str
    reason: str
    attempts: Sequence[AttemptFacts] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    """Config values by dotted name."""
    metrics: dict[str, MetricFacts] = field(default_factory=dict)
    progress: int = 0
    total: int | None = None
    step: int = 0
    seconds: float = 0.0
    """Of all attempts together."""
    asked: Asked | None = None
    used: Used | None = None
    ledger: Ledger | None = None
    directions: Mapping[str, str] = field(default_factory=dict)
    """Whether metrics are to `minimize` or `maximize`, as the job says."""
    series: dict[str, Series] = field(default_factory=dict)
    usage: Sequence[NodeUsage] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the facts for programs, without the curves."""
        own = {
            name: getattr(self, name)
            for name in ("run", "kind", "group", "state", "reason", "progress", "total", "step", "seconds")
        }
        return own | {
            "attempts": [asdict(each) | {"nodes": list(each.nodes)} for each in self.attempts],
            "config": {key: plain(value) for key, value in self.config.items()},
            "metrics": {name: asdict(each) for name, each in self.metrics.items()},
            "asked": self.asked and asdict(self.asked),
            "used": self.used and asdict(self.used),
            "ledger": self.ledger and self.ledger.to_json(),
        }


@dataclass(frozen=True)
class Piece:
    """What a worker trained from one time to another, in seconds since 1970."""

    trial: int
    begin: float
    end: float
    is_confirming: bool = False
    """Whether it is a trial of the confirmation, with its number there."""


@dataclass(frozen=True)
class WorkerFacts:
    """A worker of a sweep."""

    worker: int
    state: str
    attempts: Sequence[AttemptFacts]
    pieces: Sequence[Piece]
    ledger: Ledger
    asked: Asked | None = None
    used: Used | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "worker": self.worker,
            "state": self.state,
            "attempts": [asdict(each) | {"nodes": list(each.nodes)} for each in self.attempts],
            "trials": [asdict(each) for each in self.pieces],
            "ledger": self.ledger.to_json(),
            "asked": self.asked and asdict(self.asked),
            "used": self.used and asdict(self.used),
        }


@dataclass(frozen=True)
class SweepFacts:
    """A sweep. Its trials are runs of the report, too."""

    run: str
    state: str
    study: StudyFacts
    workers: Sequence[WorkerFacts]

    def to_json(self) -> dict[str, Any]:
        workers = [each.to_json() for each in self.workers]
        return {"run": self.run, "state": self.state, **self.study.to_json(), "workers": workers}


@dataclass
class Facts:
    """All of a report."""

    made: str
    version: str
    title: str
    metric: str | None
    """The metric that comes first; None if no run has any."""
    runs: list[RunFacts]
    sweeps: list[SweepFacts]
    ledger: Ledger
    """Of all runs and workers."""
    unit: str
    """What is allocated, for the ledger: `gpu`, or `core` without GPUs."""
    advice: list[Advice]
    warnings: list[str]
    """What was left out, and why."""

    def to_json(self) -> dict[str, Any]:
        return {
            "made": self.made,
            "version": self.version,
            "title": self.title,
            "metric": self.metric,
            "runs": [each.to_json() for each in self.runs],
            "sweeps": [each.to_json() for each in self.sweeps],
            "unit": self.unit,
            "ledger": self.ledger.to_json(),
            "advice": [asdict(each) | {"runs": list(each.runs)} for each in self.advice],
            "warnings": list(self.warnings),
        }

    @property
    def metric_names(self) -> list[str]:
        """Return the metrics of all runs, the main one first."""
        names = dict.fromkeys(name for run in self.runs for name in run.series)
        return sorted(names, key=lambda name: name != self.metric)

    @property
    def differing_keys(self) -> list[str]:
        """Return the config values in which runs differ."""
        keys = dict.fromkeys(key for run in self.runs for key in run.config)
        return [key for key in keys if len({repr(run.config.get(key)) for run in self.runs}) > 1]
