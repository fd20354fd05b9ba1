"""The record of a rank in a checkpoint: everything that it saves except its tensors, as JSON.

Names and shapes are the format of checkpoints. A record of version 0.1 lacks some values, for which there are defaults;
values that a later version adds are ignored, as version 0.1 does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from mgpu_slurm.checkpoints.policy import Best
from mgpu_slurm.checkpoints.writer import Written
from mgpu_slurm.rank.communication.codec import Plain
from mgpu_slurm.run_folder.record_types import from_known

Record = TypeVar("Record")


@dataclass(frozen=True)
class PassRecord:
    """The position of the loader that drives the loop."""

    name: str
    """Its name in `run.restore`; empty if there is no such loader."""
    active: bool
    """Whether the checkpoint is at a batch of it."""
    batch: int
    passes: int
    """Passes begun before the one that continues."""


@dataclass(frozen=True)
class LoaderRecord:
    """The position of any loader of the run."""

    size: int
    """Samples in a pass; with `batch_size`, it identifies the loader."""
    batch_size: int
    outside: bool
    """Whether its pass continues outside of `state.epochs`."""
    active: bool
    """Whether there is a pass to continue."""
    batch: int
    """First batch of the next pass."""
    epoch: int | None
    """Epoch of the next pass, if it continues one."""
    passes: int
    """Passes begun before the next one."""
    order: int | None
    """Digest of the order of the epoch's samples, if the pass continues at a later batch."""


@dataclass(frozen=True, kw_only=True)
class ProgressRecord:
    """The progress of a run; the same on all ranks."""

    step: int
    progress: int
    metrics: Mapping[str, float]
    """Metrics of the last report."""
    next_epoch: int
    """The epoch of `state.epochs` that continues, or begins next."""
    in_epochs: bool = False
    """Whether it is within a loop over `state.epochs`; version 0.1 did not save this."""
    place: list[int | list[int]] | None = None
    """Distinguishes checkpoints of the same step; None in version 0.1, which kept one of each step."""
    loader: PassRecord
    loaders: tuple[LoaderRecord, ...] = ()
    """All loaders that last or are within a pass; none in version 0.1."""

    @staticmethod
    def from_json(facts: Mapping[str, Any]) -> ProgressRecord:
        loader = from_known(PassRecord, facts["loader"])
        loaders = tuple(from_known(LoaderRecord, each) for each in facts.get("loaders", ()))
        return from_known(ProgressRecord, {**facts, "loader": loader, "loaders": loaders})


@dataclass(frozen=True)
class SharedRecord:
    """The part of a checkpoint that all ranks have in common; in the record of rank 0."""

    progress: ProgressRecord
    best: Best | None
    """The best checkpoint at that time."""
    objects: Mapping[str, Plain]
    """States of the restored objects, by name."""
    differing: list[str] | None
    """Names of the objects whose states differ between ranks; None in version 0.1, which saved rank 0's only."""
    stages: tuple[int, ...] = ()
    """The first ranks of the other stages of a pipeline, which saved their parts of some objects."""

    @staticmethod
    def from_json(shared: Mapping[str, Any]) -> SharedRecord:
        facts = shared["facts"]
        return SharedRecord(
            ProgressRecord.from_json(facts),
            Best.from_json(facts),
            shared["objects"],
            shared.get("differing"),
            tuple(shared.get("stages", ())),
        )

    def to_json(self) -> dict[str, Any]:
        facts = asdict(self.progress) | Best.to_json(self.best)
        stages = {"stages": self.stages} if self.stages else {}
        return {"facts": facts, "objects": self.objects, "differing": self.differing} | stages


@dataclass(frozen=True)
class Content:
    """The state in a rank's record."""

    own: Plain
    """The rank's own state."""
    shared: SharedRecord | None = None
    """On rank 0."""
    objects: Mapping[str, Plain] = field(default_factory=dict)
    """On the other ranks: states of the objects that differ between ranks, and parts of those divided into stages."""
    frozen: list[str] | None = None
    """On the first rank of each stage: names of the parameters that are not trained; None in earlier versions."""


@dataclass(frozen=True)
class RankRecord:
    """The record of one rank."""

    rank: int
    world_size: int
    tensors: Written
    """Size and checksum of its file of tensors."""
    content: Content

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> RankRecord:
        shared = SharedRecord.from_json(body["shared"]) if "shared" in body else None
        content = Content(body["own"], shared, body.get("objects", {}), body.get("frozen"))
        return RankRecord(body["rank"], body["world_size"], from_known(Written, body["tensors"]), content)

    def to_json(self) -> dict[str, Any]:
        content = self.content
        state = {"objects": content.objects} if content.shared is None else {"shared": content.shared.to_json()}
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "tensors": asdict(self.tensors),
            "own": content.own,
            **state,
            **({} if content.frozen is None else {"frozen": content.frozen}),
        }
