"""The contents of files as typed records: `state.json`, the lines of `attempts.jsonl` and `metrics.jsonl`,
`failure.json`, `memory.json`.

A record keeps values under names that this version does not know, so that a newer version's are still there when an
older one has written the file again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any, TypeVar

from mgpu_slurm.core.formatting import time_of

D = TypeVar("D")
R = TypeVar("R", bound="Record")
P = TypeVar("P", bound="MemoryPlan")

UNRECORDED = "unrecorded"
"""Stands for a checkpoint's name that version 0.1 did not record."""


def from_known(kind: type[D], values: Mapping[str, Any]) -> D:
    """Return a dataclass with those of the values that it has a field for: a newer version may have written more."""
    return kind(**{name: values[name] for name in _may_be_none(kind) if name in values})


_MAY_BE_NONE: dict[type, dict[str, bool]] = {}
"""For the fields of each class, whether they may be None; found once, as `status` reads many records."""


def _may_be_none(cls: type) -> dict[str, bool]:
    if cls not in _MAY_BE_NONE:
        _MAY_BE_NONE[cls] = {each.name: "None" in str(each.type) for each in fields(cls) if each.name != "others"}
    return _MAY_BE_NONE[cls]


@dataclass(frozen=True)
class Record:
    """A JSON object whose names are the fields of a subclass."""

    others: Mapping[str, object] = field(default_factory=dict, kw_only=True)
    """Values under names that are not fields."""

    @classmethod
    def from_json(cls: type[R], values: Mapping[str, Any]) -> R:
        """Return the record of a JSON object.

        Fields that it lacks have their defaults, as have those that are null and cannot be.
        """
        may_be_none = _may_be_none(cls)
        known, others = {}, {}
        for name, value in values.items():
            if name not in may_be_none:
                others[name] = value
            elif value is not None or may_be_none[name]:
                known[name] = value
        return cls(**known, others=others)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object, without optional fields that have their default."""
        known = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name != "others" and not (each.metadata.get("optional") and value == each.default):
                known[each.name] = value
        return {**known, **self.others}


def optional(default: Any = None) -> Any:
    """Return a field that is left out of the JSON object if it has its default."""
    return field(default=default, metadata={"optional": True})


@dataclass(frozen=True, kw_only=True)
class RunState(Record):
    """The live state of a run, of a group, or of a sweep's worker."""

    run: str = ""
    kind: str = "run"
    """`run`, `sweep`, or `worker` for a run of a sweep."""
    state: str = "PENDING"
    job_id: str | None = None
    attempts: int = 0
    """The number of attempts that have started."""
    nodes: int = 1
    ranks: int = 1
    step: int = 0
    """Optimizer steps."""
    progress: int = 0
    """The progress that the training last reported, such as its epoch."""
    metrics: Mapping[str, float | str] = field(default_factory=dict)
    """The last value of each metric; text for those of a group, with mean and spread."""
    total: int | None = optional()
    """The progress at which the training ends, if it has said so in this attempt."""
    pace: Sequence[float] | None = optional()
    """Seconds for one unit of progress, and from one report to the next: medians of this attempt's last reports."""
    best_by: Mapping[str, str] | None = optional()
    """The metric by which the best checkpoint is chosen, with `minimize` or `maximize`."""
    reported: str | None = optional()
    """When the last report of this attempt was made."""
    submitted: str | None = None
    """ISO 8601 with the time zone, as all times here."""
    started: str | None = None
    """When the first attempt since the last submission or resumption began."""
    first_started: str | None = optional()
    """When the first of all attempts began; `started` is reset by `resume`."""
    ended: str | None = None
    reason: str = ""
    """Why it is in this state, in one line."""
    executor: str = ""
    slurm_cluster: str | None = None
    """The cluster whose SLURM has the job, if known."""
    tasks: int | None = None
    """The number of runs in a group; None for a single run."""
    supervisor: Sequence[int] | None = optional()
    """The supervisor's process id, and its start time in clock ticks; only of a run without a queue."""
    host: str | None = optional()
    """The supervisor's machine."""
    trial: int | None = optional()
    """The trial that a worker runs."""
    curves: Mapping[str, float] | None = optional()
    """What was measured without the job's code, at the last report: see `training.speed.curves`."""
    processes: Mapping[str, Mapping[str, Any]] | None = optional()
    """Of a worker that trains several trials at the same time: `trial`, `progress`, `metrics` and `reason` of each of
    its processes, by number."""
    leaving: int | None = optional()
    """The attempt in which a worker has found nothing left to do."""
    gpu: str | None = optional()
    """The kind of rank 0's GPU."""
    gpu_memory: int | None = optional()
    """Bytes of that GPU's memory."""

    def by_process(self) -> list[RunState]:
        """Return this state once for each trial that a worker trains at the same time."""
        if not self.processes:
            return [self]
        return [replace(self, **self.processes[number]) for number in sorted(self.processes, key=int)]

    def seconds_left(self, now: datetime) -> float | None:
        """Return for about how long the training continues, judged by its last reports; None if that is unknown."""
        reported = time_of(self.reported)
        if self.state != "RUNNING" or self.total is None or self.pace is None or reported is None:
            return None
        of_one, to_next = self.pace
        # a report that is late does not bring the end any nearer
        since = min((now - reported).total_seconds(), to_next)
        return max(0.0, (self.total - self.progress) * of_one - since)

    def updated(self, change: StateChange) -> RunState:
        """Return the state with the values that a change knows."""
        return replace(self, **change.known())


@dataclass(frozen=True)
class StateChange:
    """Newly known values of a run's state; None where nothing is known."""

    state: str | None = None
    reason: str | None = None
    ended: str | None = None
    job_id: str | None = None

    def known(self) -> dict[str, Any]:
        """Return the known values by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Event(Record):
    """A line of a run's history. Which fields have a value depends on the event."""

    event: str = ""
    """`submitting`, `submitted`, `refused`, `started`, `ended`, `requeued`, `retried`, `resumed`, `changed` or
    `lost`."""
    time: str = ""
    """ISO 8601 with the time zone."""
    token: str = ""
    """The submission's token."""
    job_id: str | None = None
    first: int = 0
    """The index in the group of task 0 of a submitted array."""
    tasks: str | None = None
    """The indices in the group of a submitted array's tasks, as ranges; None for a single run."""
    continues: str | None = None
    """The token of the submission that a new job continues."""
    attempt: int = 0
    asked: Mapping[str, Any] | None = None
    """What an attempt that starts has asked for: `nodes`, `ntasks_per_node`, `gpus_per_node` and `cpus_per_task`."""
    nodes: Sequence[str] = ()
    restarts: int = 0
    """How often SLURM had restarted the job when the attempt started."""
    newest: str | None = UNRECORDED
    """The name of the newest checkpoint; None if there was none."""
    in_vain: bool | None = None
    """Whether the attempt reached its time limit without a new checkpoint; None if it did not reach it."""
    trial: int | None = None
    """The trial in which a worker's attempt failed."""
    error: str | None = None
    """The name of the type of the exception that ended the attempt."""
    message: str | None = None
    """The message of the failure that ended the attempt."""
    why: str = ""
    """The failure that is retried, in one line."""
    node: str | None = None
    """The node of that failure."""
    checkpoint: int | None = None
    """The step of the checkpoint from which it is retried."""
    avoid: Sequence[str] = ()
    """Nodes to avoid."""
    pause: float = 0.0
    """Seconds until the retry."""
    state: str = ""
    """The state before a run was resumed."""
    reason: str = ""
    """The reason of that state, or of a refusal or loss."""


@dataclass(frozen=True, kw_only=True)
class Failure(Record):
    """Why an attempt failed: the record of one rank, or the first cause of all."""

    attempt: int = optional(0)
    who: str = optional("")
    """The process that ended first: `rank 3`, or what else failed."""
    exit_code: int = optional(0)
    rank: int | None = optional()
    """The rank that recorded an error; None if none did."""
    node: str | None = optional()
    time: str | None = optional()
    """ISO 8601 with the time zone."""
    error: str | None = optional()
    """The name of the exception's type."""
    message: str = ""
    traceback: str | None = optional()
    consequence: bool = False
    """Whether the rank failed because another one had."""
    is_silent: bool = optional(False)
    """Whether the rank left no record, and others waited for it."""
    doing: str = optional("")
    """What a stuck rank did."""
    collectives: int = optional(0)
    """How many collectives a stuck rank had made."""
    oom_kills: int = optional(0)
    """How many processes the kernel had killed for memory on the node."""
    trial: int | None = optional()
    """The sweep's trial in which it failed."""


@dataclass(frozen=True, kw_only=True)
class MemoryRecord(Record):
    """How many samples each rank of a run computes at once, because a whole batch does not fit into memory."""

    samples: int = 0
    of: str = ""
    """The kind of device and the layout."""
    first: int = 0
    """The number with which the next attempts should begin, because one failed with more; 0 if none did."""
    attempt: int = 0
    """The attempt that failed; 0 if its step was repeated."""


@dataclass(frozen=True, kw_only=True)
class LayerMemory(Record):
    """A layer of a model, and what its forward pass keeps in memory for the backward pass."""

    name: str = ""
    kind: str = ""
    """Its class."""
    shape: Sequence[int] = ()
    """That of its first output."""
    parameters: int = 0
    """Their number, with those of its own layers."""
    memory: int = 0
    """Bytes."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan(Record):
    """What a rank would hold in the memory of its GPU."""

    peak: int = 0
    """Bytes."""
    phase: str = ""
    """What the job does at the peak."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """Bytes of parameters, gradients, optimizer, inputs and activations at the peak."""
    samples: int = 0
    """Number of samples of the largest batch of the rank."""
    splits: bool = False
    """Whether the job leaves the size of micro-batches to the run."""
    can_recompute: bool = False
    """Whether the job names blocks that it does not recompute."""
    layers: Sequence[LayerMemory] = ()
    error: str | None = optional()
    """Why there is no plan."""

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"layers": [each.to_json() for each in self.layers]}

    @classmethod
    def from_json(cls: type[P], values: Mapping[str, Any]) -> P:
        return replace(super().from_json(values), layers=tuple(map(LayerMemory.from_json, values["layers"])))


@dataclass(frozen=True)
class Report:
    """One report of a run; the fields are those of a line of `metrics.jsonl`."""

    progress: int
    """It increases with each report, also over attempts."""
    step: int
    time: str
    """When it was reported, as `records.now` returns it."""
    attempt: int
    metrics: dict[str, float]
    curves: dict[str, float] = field(default_factory=dict)
    """What was measured without the job's code, such as the time of a step."""

    @property
    def shown_step(self) -> int:
        """The step at which TensorBoard and MLflow show it: the progress, as long as the job has taken no optimizer
        step, or all of its reports would be at 0."""
        return self.step or self.progress

    @property
    def values(self) -> dict[str, float]:
        """All of it: a job's own metric of the same name as a curve is what it means."""
        return self.curves | self.metrics
