"""Restore a run: find the newest checkpoint that is intact on all ranks, and report its progress to the job."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mgpu_slurm.checkpoints.state.own_settings import OwnSettings
from mgpu_slurm.checkpoints.state.train_state import Keeper
from mgpu_slurm.core import log_lines
from mgpu_slurm.core.errors import MgpuError, SweepError, UserError
from mgpu_slurm.core.files import read_json
from mgpu_slurm.core.formatting import cut
from mgpu_slurm.data.loaders import Loader
from mgpu_slurm.metrics.reporter import Reporter
from mgpu_slurm.rank.communication.collectives import Collectives
from mgpu_slurm.rank.communication.step_sync import Call
from mgpu_slurm.run_folder.checkpoint_names import CheckpointKey
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.training.loop_control import LoopControl
from mgpu_slurm.training.memory.found_size import FoundSize
from mgpu_slurm.training.progress import Position
from mgpu_slurm.training.step_counter import StepCounter


class State:
    """The progress of a run after `restore`: at the start, or at the checkpoint it was restored from."""

    def __init__(self, position: Position, loop_control: LoopControl, reporter: Reporter | None) -> None:
        self._position = position
        self._loop_control = loop_control
        self._reporter = reporter

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._position.step

    @property
    def progress(self) -> int:
        """The last progress reported; 0 before the first."""
        return self._position.progress

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the remaining epochs from 1 to `total`, beginning with the one that was interrupted. Batches that the
        job looks at before this loop do not count as used.

        The end of each epoch is a boundary: a checkpoint is written, and a requested stop takes place.
        """
        if self._reporter is not None:
            # one that continues in the middle of an epoch works for a part of the time
            begins = not self._position.continues_in_pass
            self._reporter.expect(operator.index(total), self._position.progress if begins else None)
        return self._loop_control.epochs(total)


class Restorer:
    """Restores a run from a checkpoint: each rank checks its share of the files, and all use the same one."""

    def __init__(
        self,
        files: RunFolder,
        attempt: int,
        position: Position,
        loop_control: LoopControl,
        collectives: Collectives,
        keeper: Keeper,
        found_size: FoundSize,
        steps: StepCounter,
        reporter: Reporter | None,
    ) -> None:
        """
        Args:
            reporter: writes what is reported, on rank 0.
        """
        self._files = files
        self._attempt = attempt
        self._position = position
        self._loop_control = loop_control
        self._collectives = collectives
        self._keeper = keeper
        self._found_size = found_size
        self._steps = steps
        self._reporter = reporter

    def restore(self, objects: Mapping[str, Any], added: Callable[[Any], None]) -> State:
        """See `Run.restore`.

        Args:
            added: called with each object that is saved.
        """
        self._loop_control.sync(Call.RESTORE)
        for name, value in objects.items():
            if isinstance(value, Loader):
                self._position.follow(name, value)
            else:
                self._steps.add(value)
                self._keeper.add(name, value)
                added(value)
        self._keeper.check_names()
        self._loop_control.keeps = True
        self._position.loaders.begin_loop()
        newest = self._newest_intact()
        if newest is not None:
            self._load(newest)
        self._found_size.begin_with(self._first_of_rank_0())
        return State(self._position, self._loop_control, self._reporter)

    def _load(self, key: CheckpointKey) -> None:
        names = [*self._keeper.objects, *([self._position.loader_name] if self._position.loader is not None else [])]
        # a copy of another trial has its weights, and values of its own
        own = OwnSettings(self._keeper.objects) if self._is_copied(key) else None
        try:
            with self._steps.paused():
                self._loop_control.resume_from(self._keeper.load(key, names))
        except (RuntimeError, ValueError, UserError) as error:
            if own is None or isinstance(error, torch.cuda.OutOfMemoryError) or "CUDA error" in str(error):
                raise
            raise SweepError(
                "this trial is a copy of another one, whose checkpoint does not fit: remove the parameters that the"
                f" shapes of the model depend on from the pruner's `perturb` ({cut(' '.join(str(error).split()), 300)})"
            ) from error
        if own is not None:
            own.put_back()
        if self._reporter is not None:
            step = self._position.step
            self._reporter.resume(step, self._position.progress)
            name = self._files.checkpoint(*key).name
            print(f"restored step {step} from {name} (attempt {self._attempt})", flush=True)

    def _is_copied(self, key: CheckpointKey) -> bool:
        """Return whether the checkpoint is another trial's, of which this one is a copy; the same on all ranks."""
        # a shared file system may not show the others the file yet
        copied = read_json(self._files.copied) if self._reporter is not None else None
        is_it = copied is not None and copied["checkpoint"] == self._files.checkpoint(*key).name
        return bool(self._collectives.total([float(is_it)])[0])

    def _first_of_rank_0(self) -> int:
        (first,) = self._collectives.total([self._found_size.first() if self._reporter is not None else 0])
        return int(first)

    def _newest_intact(self) -> CheckpointKey | None:
        """Return the newest intact checkpoint; newer ones are set aside. Every rank must call it."""
        while True:
            # rank 0 decides, because a shared file system may show the others an older folder
            found, count = self._keeper.newest() if self._reporter is not None else (CheckpointKey(0, 0), 0)
            step, number, count = map(int, self._collectives.total([*found, count]))
            if not count:
                return None
            newest = CheckpointKey(step, number)
            problem = self._keeper.problem(newest)
            if not self._loop_control.any_rank(problem is not None, Call.RESTORE):
                return newest
            self._set_aside(newest, problem, is_last=count == 1)

    def _set_aside(self, key: CheckpointKey, problem: str | None, is_last: bool) -> None:
        """Set a damaged checkpoint aside, so that the previous one is the newest.

        Args:
            problem: the problem that this rank found, if any.
            is_last: whether no other checkpoint is left.

        Raises:
            MgpuError: there is no previous one.
        """
        path = self._files.checkpoint(*key)
        said = f"checkpoint {str(path)!r} is damaged{f' ({problem})' if problem else ''}"
        if is_last:
            raise MgpuError(f"{said}, and there is no earlier one: delete it to start from the beginning")
        if problem is not None:
            log_lines.warn(f"{said}: falling back to the previous one")
        if self._reporter is not None:
            self._keeper.set_aside(key)
        self._loop_control.sync(Call.RESTORE)
