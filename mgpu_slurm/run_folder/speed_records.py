"""How fast the ranks of a run were: what each of them measures, and the contents of `speed.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, TypeVar

from mgpu_slurm.run_folder.record_types import Record, from_known

S = TypeVar("S", bound="SpeedRecord")


@dataclass
class Interval:
    """The steps of one rank between two reports, or those of a run that measures its speed."""

    seconds: float = 0.0
    """From the end of the step before to the end of each step; after a report or an evaluation, from the beginning of
    the fetch of its first batch."""
    steps: float = 0.0
    samples: float = 0.0
    tokens: float = 0.0
    """Number of integers in the first tensor of each batch, if that has two dimensions."""
    waited: float = 0.0
    """Seconds for batches of the loader, in which a GPU had nothing to do."""
    forward: float = 0.0
    """Seconds from each batch, or backward pass, to the next backward pass."""
    backward: float = 0.0
    """Seconds of backward passes, in which copies of a model exchange their gradients."""
    allocated: float = 0.0
    """Peak bytes of tensors on the GPU."""
    reserved: float = 0.0
    """Peak bytes that torch has taken from the GPU."""
    gpu_utilization: float = 0.0
    """Part of the time in which the rank's GPUs run a kernel."""
    gpu_power: float = 0.0
    """Watts of these GPUs."""
    gpu_memory: float = 0.0
    """Peak bytes used on one of them, by all processes; 0 if nothing is known of them."""

    def numbers(self) -> list[float]:
        """Return the values, to be sent to other ranks."""
        return list(astuple(self))

    def __add__(self, later: Interval) -> Interval:
        """Return both intervals as one. The use of the GPUs is that of the later one."""
        sums = {name: getattr(self, name) + getattr(later, name) for name in _SUMS}
        peaks = {name: max(getattr(self, name), getattr(later, name)) for name in _PEAKS}
        return replace(later, **sums, **peaks)


_SUMS = ("seconds", "steps", "samples", "tokens", "waited", "forward", "backward")
_PEAKS = ("allocated", "reserved", "gpu_memory")


@dataclass(frozen=True, kw_only=True)
class SpeedRecord(Record):
    """The measured steps of a run."""

    warm_up: int = 0
    """Number of steps before them."""
    ranks: Sequence[Interval] = ()

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"ranks": [asdict(each) for each in self.ranks]}

    @classmethod
    def from_json(cls: type[S], values: Mapping[str, Any]) -> S:
        found = super().from_json(values)
        return replace(found, ranks=[from_known(Interval, each) for each in values.get("ranks") or ()])
