"""`Run`: the primitives a job function trains with. Each can be used on its own in an existing training loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypeVar

import torch
from torch import nn
from torch.utils.data import Dataset

from mgpu_slurm.checkpoints.policy import Plan
from mgpu_slurm.checkpoints.train_state import Keeper
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.data import randomness
from mgpu_slurm.data.batch_weights import BatchWeights
from mgpu_slurm.data.batches import mixed
from mgpu_slurm.data.evaluation import Shard, StreamShard
from mgpu_slurm.data.loaders import Loader
from mgpu_slurm.metrics.report_socket import PruneCallback
from mgpu_slurm.metrics.reporter import Reporter
from mgpu_slurm.rank.collectives import Collectives
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.signals import StopFlag
from mgpu_slurm.rank.step_sync import Call
from mgpu_slurm.rank.watchdog import Watchdog
from mgpu_slurm.run_folder.layout import CheckpointKey, RunFolder
from mgpu_slurm.training.loop_control import LoopControl
from mgpu_slurm.training.progress import Meter, Position
from mgpu_slurm.training.reporting import Reporting
from mgpu_slurm.training.restore import CheckpointFinder, State
from mgpu_slurm.training.run_data import RunData
from mgpu_slurm.training.step_counter import StepCounter
from mgpu_slurm.training.wrap import Models

Batch = TypeVar("Batch")


class Run:
    """One rank's handle on its run."""

    def __init__(
        self,
        facts: RankInfo,
        folder: Path,
        device: torch.device,
        attempt: int,
        stop: StopFlag,
        collectives: Collectives | None = None,
        prune: PruneCallback | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        """
        Args:
            collectives: that of the previous run, if this process has had one.
            prune: decides after each report whether the trial is pruned.
            watchdog: ends this rank if it makes no progress.
        """
        self.rank = facts.rank
        self.world_size = facts.world_size
        self.local_rank = facts.local_rank
        self.node = facts.node_name
        self.device = device
        self.is_main = facts.rank == 0
        self.folder = folder
        self.attempt = attempt
        self._files = RunFolder(folder)
        self._collectives = collectives or Collectives(facts)
        self._owns_collectives = collectives is None
        self._watchdog = watchdog
        self._reporter = Reporter(self._files, attempt) if self.is_main else None
        self._position = Position()
        self._batch_weights = BatchWeights(facts.world_size)
        self._models = Models(device, facts.world_size, self._batch_weights.note_inputs)
        self._keeper = Keeper(self._files, facts, attempt, self._models.wrapped, self._collectives)
        control = LoopControl(self._position, device, facts.rank, self._collectives, self._keeper, stop, self.alive)
        self._loop_control = control
        self._saver = control.saver
        self._finder = CheckpointFinder(self._files, self.is_main, self._collectives, self._keeper, self._loop_control)
        self._reporting = Reporting(self._reporter, prune, self._position, self._loop_control, self._collectives)
        self._steps = StepCounter(self._step_done)
        self._data = RunData(
            facts,
            device,
            self._position,
            self._loop_control,
            self._collectives,
            self._models,
            self._batch_weights,
            self.alive,
        )
        if watchdog is not None:
            watchdog.watch(lambda: self.step)

    @property
    def step(self) -> int:
        """Optimizer steps done, over all attempts."""
        return self._position.step

    @step.setter
    def step(self, step: int) -> None:
        self._position.step = step

    @property
    def progress(self) -> int:
        """The last progress reported; 0 before the first."""
        return self._position.progress

    @property
    def last_metrics(self) -> dict[str, float]:
        """The metrics of the last report."""
        return self._position.metrics

    @property
    def has_trained(self) -> bool:
        """Whether this attempt has taken a step or reported anything. A run restored at its end has nothing to do."""
        return self._position.has_moved

    # -- the model and its data

    def seed(self, seed: int, deterministic: bool = False) -> None:
        """Seed Python, NumPy and torch from the seed and the rank, and the order of loaders from the seed alone.

        Args:
            deterministic: make results reproducible on the same number of the same devices, even if a run was
                interrupted; up to two CPU ranks need nothing for that. Torch then uses deterministic algorithms, or
                raises an error if it has none, and DDP keeps the gradients in the order of its first step, which costs
                time: it searches for parameters without gradients at each step. Call it before `wrap`.
        """
        self._data.seed, self._models.is_deterministic = seed, deterministic
        randomness.seed(mixed(seed, self.rank), deterministic)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model on this rank's device, in DistributedDataParallel if there are other ranks.

        A model that is already sharded, by `fully_shard` or in another way, is returned unchanged. Compile a model
        before you wrap it: `backward` cannot see the inputs of a wrapped model that is compiled afterwards.

        All ranks start from rank 0's parameters and buffers. Buffers (batch norm statistics) are not broadcast at each
        forward, which would cost time and hang uneven evaluation; iterating `run.shard` broadcasts rank 0's buffers.

        Raises:
            UserError: the model is sharded by FullyShardedDataParallel.
        """
        return self._models.wrap(model)

    def alive(self) -> None:
        """Report that this rank makes progress. Call it in long work without any other call of the run, such as a
        custom evaluation: an attempt that reports no progress for `--stuck-after` minutes is stopped."""
        if self._watchdog is not None:
            self._watchdog.alive()

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        **options: Any,
    ) -> Loader:
        """Return a loader that iterates over this rank's share of global batches, on the run's device.

        Args:
            dataset: a map-style dataset, or an `IterableDataset`, which must yield the same samples on every rank: all
                ranks and workers read it and keep their own samples. Put expensive work into `collate_fn`.
            batch_size: total over all ranks. Every sample of an epoch is seen once; the last batch may be smaller.
            shuffle: use a new order each epoch, which depends only on the seed and the epoch.
            drop_last: skip the last batch if it is smaller; batch norm fails on a share of one sample.
            options: further arguments of `torch.utils.data.DataLoader`, such as `num_workers`. A `sampler` or
                `batch_sampler` must cover the whole dataset, and is seeded identically on all ranks.
        """
        return self._data.loader(dataset, batch_size, shuffle, drop_last, **options)

    def shard(self, dataset: Dataset[Any], batch_size: int = 256, **options: Any) -> Shard | StreamShard:
        """Return an iterable over this rank's part of a dataset, for evaluation without repeated or padded samples.

        Ranks may get different numbers of samples, so do not average over ranks: compute weighted means with
        `run.mean(sum, count)`. If a model is sharded, all ranks get the same number of batches, some with zero rows.
        """
        return self._data.shard(dataset, batch_size, **options)

    # -- a step

    def backward(self, loss: torch.Tensor, batch: Any = None) -> None:
        """Backpropagate the mean loss of this rank's batch, weighted so that the gradient over all ranks is that of the
        mean over the global batch, even if ranks hold different numbers of samples.

        Args:
            batch: the batch that the loss is the mean of, or any tensor of it, as `run.loader` yielded it. None for
                the batch that the model was given or, if the model was given something you computed from a batch, the
                current batch of the loop over `run.loader`. So pass the original batch if you change it, as in
                `x = x * 2`, and use the result after the loop has moved on: its loss then looks like the new batch's.

        Raises:
            UserError: several batches may be meant, and their weights differ.
        """
        # DDP divides the sum of gradients by the world size
        weight = self._batch_weights.weight(batch)
        if weight != 1.0:
            loss = loss * weight
        loss.backward()  # type: ignore[no-untyped-call]
        self._loop_control.has_gradients = True
        self.alive()

    def update(self, optimizer: Any, clip: float | None = None) -> None:
        """Take an optimizer step, with gradients clipped to the norm `clip` before and cleared after.

        This counts as one step of the run however many torch optimizers step inside it, and as none if the step is
        skipped because of infinite gradients. Outside of `update`, each `step()` of a torch optimizer counts.

        Args:
            optimizer: a torch optimizer, or any object with `step` and `zero_grad`, and with `param_groups` for `clip`.

        Raises:
            UserError: the gradients cannot be clipped, or a loop over `accumulate` is not at its last micro-batch.
        """
        self._batch_weights.check_exchanged()
        if clip is not None:
            if not hasattr(optimizer, "param_groups"):
                raise UserError(
                    f"run.update(clip={clip!r}): a {type(optimizer).__name__} has no param_groups: clip the gradients"
                    " before run.update, or add that attribute"
                )
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(parameters, clip)
        self._steps.step(optimizer)
        optimizer.zero_grad()
        # even if the step was skipped
        self._loop_control.has_gradients = False

    def _step_done(self) -> None:
        self._batch_weights.check_exchanged()
        self.step += 1
        self._loop_control.step_done()
        self.alive()
        if self._reporter is not None:
            self._reporter.step_done(self.step)

    def accumulate(self, batch: Batch, parts: int) -> Iterator[Batch]:
        """Split this rank's batch into micro-batches, for gradient accumulation if the batch does not fit into memory.

        Call `run.backward` on each micro-batch's mean loss, and `run.update` once after the loop: the gradient is that
        of the whole batch. Ranks exchange gradients only with the last micro-batch, and all iterate over the same
        number of them: a rank with fewer samples gets extra ones without weight. To skip one, multiply its loss by 0;
        which samples it holds depends on the number of ranks.

        Args:
            batch: tensors, arrays, lists of samples, and tuples, lists, mappings and dataclasses of them.
            parts: number of micro-batches; fewer if the ranks do not have that many samples.

        Raises:
            UserError: the batch cannot be split between samples, or some micro-batches have no `run.backward`.
        """
        if parts < 1:
            raise UserError(f"run.accumulate: parts={parts}: expected at least 1")
        return self._data.micro_batches(batch, parts)

    # -- what was reached

    def mean(self, total: torch.Tensor | float, count: torch.Tensor | float) -> float:
        """Return the sum of `total` over the ranks divided by that of `count`, in double precision; NaN if that is 0.

        Collective: every rank must call it.
        """
        return self._loop_control.mean(float(total), float(count))

    def meter(self, name: str) -> Meter:
        """Return a meter for a mean over the samples of an epoch, such as the loss: `add` values, and report `mean()`.
        Checkpoints within the epoch contain what was added so far.

        Args:
            name: key of the meter in checkpoints.

        Raises:
            UserError: there is a meter of that name, or `restore` has already been called.
        """
        if name in self._loop_control.meters:
            raise UserError(f"run.meter({name!r}): a meter of that name exists: use it, or choose another name")
        if self._loop_control.keeps:
            raise UserError(f"run.meter({name!r}): create it before calling run.restore")
        self._loop_control.meters[name] = Meter(self.device, self.mean, self._batch_weights.samples)
        return self._loop_control.meters[name]

    def report(self, progress: SupportsIndex, **metrics: Any) -> None:
        """Report metrics to TensorBoard, `metrics.jsonl`, standard output and `status`.

        Collective: every rank must call it; rank 0's values are used. It does not return if a sweep prunes the trial.

        Args:
            progress: number of finished units of work (usually epochs), from 1, strictly increasing; any integer type,
                such as NumPy's.
            metrics: numbers, or tensors of one element.
        """
        self._reporting.report(progress, metrics)

    # -- keeping the work

    def restore(self, **objects: Any) -> State:
        """Load the newest checkpoint into these objects; at the start of a run, leave them unchanged.

        Checkpoints contain the objects passed here: model, optimizer, scheduler, the loader that drives the loop,
        anything with `state_dict` and `load_state_dict`. Choose any names, but keep them. All other `run.loader`s
        continue where they were, too; they are identified by size, batch size, and order of creation. A resumed job
        must fetch the same batches before its loop as the first attempt did.

        Collective: every rank must call it.

        Raises:
            UserError: an object cannot be saved, or a name is not in the checkpoint.
        """
        self._loop_control.sync(Call.RESTORE)
        for name, value in objects.items():
            if isinstance(value, Loader):
                self._position.follow(name, value)
            else:
                self._keeper.add(name, value)
                self._models.add_restored(value)
        self._keeper.check_names()
        self._loop_control.keeps = True
        self._position.loaders.begin_loop()
        newest = self._finder.newest_intact()
        if newest is not None:
            self._load(newest)
        return State(self._position, self._loop_control)

    def _load(self, key: CheckpointKey) -> None:
        names = [*self._keeper.objects, *([self._position.loader_name] if self._position.loader is not None else [])]
        with self._steps.paused():
            self._loop_control.resume_from(self._keeper.load(key, names))
        if self._reporter is not None:
            self._reporter.resume(self.step)
            name = self._files.checkpoint(*key).name
            print(f"restored step {self.step} from {name} (attempt {self.attempt})", flush=True)

    def checkpoints(
        self,
        *,
        every_steps: int | None = None,
        every_minutes: float | None = 10.0,
        keep: int = 2,
        best: str | None = None,
        direction: Literal["minimize", "maximize"] | None = None,
    ) -> None:
        """Set when to save and what to keep; by default, each epoch and every ten minutes, and the newest two.

        The objects passed to `restore` are saved. Training waits only until they are copied to main memory, unless the
        previous checkpoint is still being written. They are also copied before the last batch of each pass (the last
        one at which the previous pass could stop), in case the run has to stop in the evaluation that may follow.

        Every rank must call it with the same arguments.

        Args:
            every_steps: save after this many optimizer steps.
            every_minutes: save at the next batch after this many minutes without a checkpoint; None for never.
            keep: number of newest checkpoints to keep.
            best: a reported metric. The checkpoint of its best report is kept too, and `checkpoints/best` links to it;
                each report that is better than all before is saved.
            direction: whether lower or higher values of `best` are better.

        Raises:
            UserError: an argument is invalid.
        """
        plan = Plan(every_steps, every_minutes, keep, best, direction)
        plan.check()
        self._saver.plan = plan

    def save(self) -> None:
        """Request a checkpoint at the next batch of the loader passed to `restore`, or the end of epoch or job."""
        self._loop_control.save_wanted = True

    # -- the end

    def finish(self) -> None:
        """Wait until every rank's job function has returned, and write a checkpoint that is still requested. A rank
        that still makes other calls is named in the error. Attached scripts may call this at their end."""
        self._loop_control.finish()

    def await_save(self) -> None:
        """Wait, for a limited time, until this rank's part of a checkpoint in progress is written."""
        self._saver.await_write()

    def close(self, waits: bool = False) -> None:
        """Release this rank's resources: stop the watchdog, the step counter, the saver and the reporter.

        Args:
            waits: wait for the other ranks' parts of a checkpoint; only if they end without an error, as this one does.
        """
        if self._watchdog is not None:
            self._watchdog.rest()
        self._steps.close()
        if waits:
            self._loop_control.warn_of_lost_save()
        if self._owns_collectives:
            # the others may be waiting for this rank's message
            self._collectives.close()
        self._saver.close(waits)
        if self._reporter is not None:
            self._reporter.close(self.step)
