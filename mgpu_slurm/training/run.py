"""`Run`: the primitives a job function trains with. Each can be used on its own in an existing training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeVar

import torch
from torch import nn
from torch.utils.data import Dataset

from mgpu_slurm.checkpoints.policy import Plan
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.data import randomness
from mgpu_slurm.data.evaluation import Shard, StreamShard
from mgpu_slurm.data.loaders import Loader
from mgpu_slurm.metrics.report_socket import JudgeCallback
from mgpu_slurm.rank.communication.collectives import Collectives
from mgpu_slurm.rank.rank_info import RankInfo, own_devices
from mgpu_slurm.rank.signals import StopFlag
from mgpu_slurm.rank.watchdog import Watchdog
from mgpu_slurm.request.parallelism import Layout
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.training.parallel.gradient_check import check_loss
from mgpu_slurm.training.parallel.mesh import mesh_of
from mgpu_slurm.training.parallel.pipeline import Metric, Options, Pipeline, Schedule
from mgpu_slurm.training.parts import Parts
from mgpu_slurm.training.progress import Meter
from mgpu_slurm.training.restore import State

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

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
        judge: JudgeCallback | None = None,
        watchdog: Watchdog | None = None,
        layout: Layout | None = None,
    ) -> None:
        """
        Args:
            collectives: that of the previous run, if this process has had one.
            judge: decides after each report whether the trial of a sweep continues.
            watchdog: ends this rank if it makes no progress.
            layout: how the ranks share models; None for a copy on each.
        """
        self.rank = facts.rank
        self.world_size = facts.world_size
        self.local_rank = facts.local_rank
        self.node = facts.node_name
        self.device = device
        self.devices = [device] if device.type == "cpu" else own_devices(facts)
        """The devices of this rank: its equal share of the node's GPUs, beginning with `device`."""
        self.is_main = facts.rank == 0
        self.folder = folder
        self.attempt = attempt
        self._layout = layout or Layout(replicas=facts.world_size)
        self._parts = parts = Parts(
            facts, RunFolder(folder), device, self.devices, attempt, stop, collectives, judge, watchdog, self._layout
        )
        self._collectives, self._position, self._loop_control = parts.collectives, parts.position, parts.loop_control
        self._saver, self._steps = parts.loop_control.saver, parts.steps
        self._batch_weights, self._models, self._data = parts.batch_weights, parts.models, parts.data

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
        self._loop_control.seed, self._models.is_deterministic = seed, deterministic
        randomness.seed(randomness.mixed(seed, self._layout.random_rank(self.rank)), deterministic)

    def wrap(
        self,
        model: nn.Module,
        *,
        blocks: Sequence[type[nn.Module]] = (),
        plan: Mapping[str, str] | None = None,
        recompute: bool = False,
        offload: bool = False,
    ) -> nn.Module:
        """Return this model, on this rank's device, and shared with the other ranks by the strategy of the run.

        With `ddp`, the default, each rank has a copy, and DistributedDataParallel exchanges the gradients of calls of
        the model, but not of its parts. With `fsdp`, `zero2` and `hsdp`, the model is sharded by torch's `fully_shard`,
        and with `--tensor` its layers are divided; both replace parameters: create the optimizer afterwards. A model
        that lies on several `devices` stays there, and one that is already sharded is returned unchanged. Compile it by
        `--compile`, or before this call: `backward` cannot see the inputs of a wrapped model that is compiled later.

        All ranks start from rank 0's parameters and buffers. Buffers (batch norm statistics) are not broadcast at each
        forward, which would cost time and hang uneven evaluation; iterating `run.shard` broadcasts rank 0's buffers.

        Args:
            blocks: classes of the repeated layers, such as a transformer's block. A strategy that shards the model
                gathers the parameters of one block at a time; `ddp` needs none. `--compile` compiles each by itself.
            plan: how `--tensor` divides layers: `column`, `row`, `embedding` or `output` by the names of `nn.Linear`
                and `nn.Embedding` modules, with `*` for one part of a name, as in `{"blocks.*.up": "column"}`.
            recompute: compute the activations of each block again in the backward pass, to save their memory.
            offload: keep a sharded model and its optimizer state in main memory; other strategies ignore it.

        Raises:
            UserError: the model is sharded by FullyShardedDataParallel, or blocks or plan do not fit it or the run.
        """
        return self._models.wrap(model, blocks, plan, recompute, offload)

    def pipeline(
        self, layers: Sequence[nn.Module], loss_of: Metric, *, micro_batches: int, schedule: Schedule = "1f1b"
    ) -> Pipeline:
        """Return this rank's stage of a model whose layers are divided over ranks by `--pipeline`.

        Layers are called one after the other, and divided such that stages have similar numbers of parameters. Without
        the option, all are on each rank. Train with `loss = pipe.gradients(inputs, targets)`, then `run.update`. Random
        transforms of a batch must be the same in all stages, whose generators differ.

        Args:
            loss_of: returns the mean loss of a micro-batch from the last layer's outputs and the targets.
            micro_batches: number of parts of a rank's batch, which pass through the stages one after the other.
            schedule: `1f1b`, or `gpipe`, which keeps the activations of all micro-batches.

        Raises:
            UserError: there are too few layers or micro-batches for the stages.
        """
        return self._models.pipeline(layers, Options(loss_of, micro_batches, schedule), self._parts.pipeline_hooks)

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh of the ranks: pipeline, replicate, shard and tensor. Collective: every rank must ask for it.

        Raises:
            UserError: there is one rank.
        """
        return mesh_of(self._layout, self.device)

    def alive(self) -> None:
        """Report that this rank makes progress. Call it in long work without any other call of the run, such as a
        custom evaluation: an attempt that reports no progress for `--stuck-after` minutes is stopped."""
        self._parts.alive()

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
            options: further arguments of `torch.utils.data.DataLoader`; `num_workers="auto"` goes by the rank's cores.
                A `sampler` or `batch_sampler` must cover the whole dataset, and is seeded identically on all ranks.
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
                the batch that the model was given or, if you computed that from a batch, as in `x = x * 2`, the current
                batch of the loop over `run.loader`: pass the original one if the loop has moved on by then.

        Raises:
            UserError: several batches may be meant, and their weights differ, or no parameter is trained by the loss.
        """
        check_loss(loss)
        # DDP divides the sum of gradients by the world size
        weight = self._batch_weights.weight(batch)
        if weight != 1.0:
            loss = loss * weight
        if self._steps.scaler is not None:
            loss = self._steps.scaler.scale(loss)
        with self._parts.backward_pass():
            loss.backward()  # type: ignore[no-untyped-call]

    def gradients(self, loss_of: Callable[..., torch.Tensor], *batch: Any) -> torch.Tensor:
        """Do forward and backward pass of this rank's batch in as few parts as fit into memory; return its mean loss.

        If memory runs out on any rank, all ranks repeat the step with parts of half the size, or, where they cannot,
        as with `--tensor`, the next attempt begins with it. The size is kept in checkpoints.

        Args:
            loss_of: returns the mean loss of a part of the batch; called again if the step is repeated.
            batch: tensors and nests of them, as for `accumulate`; `loss_of` gets the same arguments.

        Raises:
            UserError: a single sample does not fit, or the batch cannot be split between samples.
        """
        return self._parts.splitter.gradients(loss_of, batch, self.backward, self._loop_control.has_gradients)

    def update(self, optimizer: Any, clip: float | None = None) -> None:
        """Take an optimizer step, with gradients clipped to the norm `clip` before and cleared after.

        This is one step of the run however many torch optimizers step inside it, and none if it is skipped because of
        infinite gradients. Outside of it, each `step()` of a torch optimizer counts; `--precision fp16` allows none.

        Args:
            optimizer: a torch optimizer, or any object with `step` and `zero_grad`, and with `param_groups` for `clip`.

        Raises:
            UserError: the gradients cannot be clipped, or a loop over `accumulate` is not at its last micro-batch.
        """
        self._batch_weights.check_exchanged()
        self._models.check_optimizer(optimizer)
        self._steps.step(optimizer, clip)
        optimizer.zero_grad()
        # even if the step was skipped
        self._loop_control.has_gradients = False

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
        meter = Meter(self.device, self.mean, self._batch_weights.samples, self._layout.ranks_per_batch)
        self._loop_control.meters[name] = meter
        return meter

    def report(self, progress: SupportsIndex, *, total: SupportsIndex | None = None, **metrics: Any) -> None:
        """Report metrics to TensorBoard, `metrics.jsonl`, standard output and `status`.

        Collective: every rank must call it; rank 0's values are used. It does not return if a sweep prunes the trial.

        Args:
            progress: number of finished units of work (usually epochs), from 1, strictly increasing; any integer type,
                such as NumPy's.
            total: progress at the end, for `status`; `state.epochs` passes it on itself.
            metrics: numbers, or tensors of one element.
        """
        self._parts.reporting.report(progress, metrics, total)

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
        return self._parts.restorer.restore(objects, self._models.add_restored)

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
        self._parts.plan_saves(plan)

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

    def note_failure(self, error: BaseException) -> None:
        """Record an error that ends this rank, if the next attempt can avoid it."""
        self._parts.note_failure(error)

    def close(self, waits: bool = False) -> None:
        """Release this rank's resources: stop the watchdog, the step counter, the saver and the reporter.

        Args:
            waits: wait for the other ranks' parts of a checkpoint; only if they end without an error, as this one does.
        """
        self._parts.close(waits)
