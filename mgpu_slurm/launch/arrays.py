"""The job arrays of a group: SLURM numbers the tasks of each from 0, and limits how many one may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mgpu_slurm.hostlist import ranges


@dataclass(frozen=True)
class Array:
    """Some runs of a group that are one job array."""

    first: int
    """Index in the group of the run that is task 0 of the array."""
    tasks: tuple[int, ...]
    """Indices in the group, rising."""

    def option(self, at_once: int | None) -> str:
        """What sbatch's --array takes: `0-4,7%2`."""
        limit = f"%{at_once}" if at_once is not None else ""
        return ranges(task - self.first for task in self.tasks) + limit


def split(tasks: Sequence[int], largest: int) -> list[Array]:
    """The arrays for these runs of a group.

    Args:
        tasks: indices in the group, rising.
        largest: SLURM's MaxArraySize; task numbers of an array are below it.
    """
    blocks: dict[int, list[int]] = {}
    for task in tasks:
        blocks.setdefault(task // largest * largest, []).append(task)
    return [Array(first, tuple(block)) for first, block in blocks.items()]
