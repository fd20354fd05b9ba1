"""Restore a run: find the newest checkpoint that is sound on all ranks, and tell the job where it stands then."""

from __future__ import annotations

from collections.abc import Iterator

from mgpu_slurm.checkpoints.train_state import Keeper
from mgpu_slurm.core.checkpoint_names import Key
from mgpu_slurm.core.errors import MgpuError
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.rank.calls import Call
from mgpu_slurm.rank.collectives import Collectives
from mgpu_slurm.training.loop_control import Steering
from mgpu_slurm.training.progress import Position


class State:
    """Where a run stands: at the start, or at the checkpoint it was restored from."""

    def __init__(self, position: Position, steering: Steering) -> None:
        self._position = position
        self._steering = steering

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._position.step

    @property
    def progress(self) -> int:
        """The last progress reported; 0 before the first."""
        return self._position.progress

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs that are left, from 1 to `total`; the one that was interrupted comes first. If the job looks at
        batches of a loader before that, it uses up none of them.

        The end of each epoch is a boundary: a checkpoint is written, and a stop that was asked for happens.
        """
        return self._steering.epochs(total)


class CheckpointFinder:
    """Finds a checkpoint: each rank checks its share of the files, and all take the same one."""

    def __init__(
        self, files: RunFolder, is_main: bool, collectives: Collectives, keeper: Keeper, steering: Steering
    ) -> None:
        self._files = files
        self._is_main = is_main
        self._collectives = collectives
        self._keeper = keeper
        self._steering = steering

    def newest_sound(self) -> Key | None:
        """Return the newest checkpoint that is what was written; newer ones are set aside. Every rank calls it."""
        while True:
            # rank 0 decides, because a shared file system may show the others an older folder
            found, count = self._keeper.newest() if self._is_main else (Key(0, 0), 0)
            step, number, count = map(int, self._collectives.total([*found, count]))
            if not count:
                return None
            newest = Key(step, number)
            problem = self._keeper.problem(newest)
            if not self._steering.any_rank(problem is not None, Call.RESTORE):
                return newest
            self._set_aside(newest, problem, is_last=count == 1)

    def _set_aside(self, key: Key, problem: str | None, is_last: bool) -> None:
        """Move a damaged checkpoint out of the way, so that the one before it is the newest.

        Args:
            problem: what this rank has found.

        Raises:
            MgpuError: there is none before it.
        """
        path = self._files.checkpoint(*key)
        said = f"checkpoint {str(path)!r} is damaged{f' ({problem})' if problem else ''}"
        if is_last:
            raise MgpuError(f"{said}, and there is none before it: delete it to start at the beginning")
        if problem is not None:
            print(f"mgpu_slurm: WARNING: {said}: going back to the one before it", flush=True)
        if self._is_main:
            self._keeper.set_aside(key)
        self._steering.sync(Call.RESTORE)
