"""`Run`: the primitives a job function trains with. Each works alone in a loop that the user already has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypeVar

import torch
from torch import nn
from torch.utils.data import Dataset

from mgpu_slurm.checkpoints.policy import Plan
from mgpu_slurm.checkpoints.train_state import Keeper
from mgpu_slurm.core.checkpoint_names import Key
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.data import randomness
from mgpu_slurm.data.batch_weights import BatchWeights
from mgpu_slurm.data.batches import mixed
from mgpu_slurm.data.evaluation import Shard, StreamShard
from mgpu_slurm.data.loaders import Loader
from mgpu_slurm.metrics.reporter import Reporter
from mgpu_slurm.rank.calls import Call
from mgpu_slurm.rank.collectives import Collectives
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.signals import StopFlag
from mgpu_slurm.rank.watchdog import Watchdog
from mgpu_slurm.training.loop_control import Steering
from mgpu_slurm.training.meter import Meter
from mgpu_slurm.training.progress import Position
from mgpu_slurm.training.reporting import Judge, Reporting
from mgpu_slurm.training.restore import CheckpointFinder, State
from mgpu_slurm.training.run_data import RunData
from mgpu_slurm.training.step_counter import StepCounter
from mgpu_slurm.training.wrap import Models

Batch = TypeVar("Batch")


class Run:
    """One rank's handle on a submitted training."""

    def __init__(
        self,
        facts: RankInfo,
        folder: Path,
        device: torch.device,
        attempt: int,
        stop: StopFlag,
        collectives: Collectives | None = None,
        judge: Judge | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        """
        Args:
            collectives: that of the run before, if this process has had one.
            judge: decides on each report whether the training continues.
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
        self._steering = Steering(self._position, device, facts.rank, self._collectives, self._keeper, stop, self.alive)
        self._saver = self._steering.saver
        self._finder = CheckpointFinder(self._files, self.is_main, self._collectives, self._keeper, self._steering)
        self._reporting = Reporting(self._reporter, judge, self._position, self._steering, self._collectives)
        self._steps = StepCounter(self._step_done)
        self._data = RunData(
            facts,
            device,
            self._position,
            self._steering,
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
        """Those of the last report."""
        return self._position.metrics

    @property
    def has_trained(self) -> bool:
        """Whether this attempt has taken a step or reported anything; one restored at its end has nothing to do."""
        return self._position.has_moved

    # -- the model and its data

    def seed(self, seed: int, deterministic: bool = False) -> None:
        """Seeds Python, NumPy and torch from the seed and the rank, and the order of loaders from the seed alone.

        Args:
            deterministic: the same numbers come out again on the same number of the same devices, also where a run was
                interrupted. Two CPU ranks need nothing for that. Else torch takes the algorithms that sum in one order,
                or says that it has none, and DDP keeps its gradients in the order of its first step, which costs time:
                it looks at each step for parameters without any. Call it before `wrap`.
        """
        self._data.seed, self._models.is_deterministic = seed, deterministic
        randomness.seed(mixed(seed, self.rank), deterministic)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model on this rank's device, in DistributedDataParallel where there are other ranks. One that is sharded
        already, by `fully_shard` or otherwise, is returned as it is. Compile a model before: `backward` does not see
        what one is given that is compiled around.

        All ranks start from rank 0's parameters and buffers. Buffers (batch norm statistics) are not broadcast at each
        forward, which costs time and hangs uneven evaluation; iterating `run.shard` brings rank 0's to all.

        Raises:
            UserError: it is sharded by FullyShardedDataParallel.
        """
        return self._models.wrap(model)

    def alive(self) -> None:
        """Says that this rank comes on, for what takes long without any other call of the run: an evaluation of one's
        own, or work on the data. What says nothing for `--stuck-after` is ended."""
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
        """Iterates this rank's share of global batches, on the run's device.

        Args:
            dataset: a map-style dataset, or an `IterableDataset`, which has to give the same samples on every rank: all
                ranks and workers read it, and keep their own samples. Put what is expensive into `collate_fn`.
            batch_size: of all ranks together. Every sample of an epoch is seen once; the last batch may be smaller.
            shuffle: a new order each epoch, which depends on the seed and the epoch alone.
            drop_last: leave the last batch out where it is smaller; batch norm fails on a share of one sample.
            options: further arguments of `torch.utils.data.DataLoader`, such as `num_workers`. A `sampler` or a
                `batch_sampler` is one of the whole dataset, and is seeded alike on all ranks.
        """
        return self._data.loader(dataset, batch_size, shuffle, drop_last, **options)

    def shard(self, dataset: Dataset[Any], batch_size: int = 256, **options: Any) -> Shard | StreamShard:
        """Iterates this rank's part of a dataset for evaluation: no sample twice and none padded.

        Ranks may get different numbers of samples, so sum over them, do not average, and weigh what you count with
        `run.mean(sum, count)`. If a model is sharded, all ranks get the same number of batches, some of zero rows.
        """
        return self._data.shard(dataset, batch_size, **options)

    # -- a step

    def backward(self, loss: torch.Tensor, batch: Any = None) -> None:
        """Backpropagate the mean loss of this rank's batch, weighted so that the world's gradient is that of the mean
        over the global batch, also if ranks hold different numbers of samples.

        Args:
            batch: the batch that the loss is the mean of, or any tensor of it, as `run.loader` gave it. None for the
                one that the model was given; if that was given something which you have made of a batch, the one at
                which the loop over `run.loader` is. So name one that you have changed, as in `x = x * 2`, and keep
                beyond its turn: when the loop is at another batch, its loss cannot be told from that one's.

        Raises:
            UserError: several batches may be meant, and their weights differ.
        """
        # DDP divides the sum of gradients by the world size
        weight = self._batch_weights.weight(batch)
        if weight != 1.0:
            loss = loss * weight
        loss.backward()  # type: ignore[no-untyped-call]
        self._steering.has_gradients = True
        self.alive()

    def update(self, optimizer: Any, clip: float | None = None) -> None:
        """One optimizer step, gradients clipped to the norm `clip` first and cleared after.

        It counts as one step of the run however many torch optimizers step inside it, and as none if it is skipped for
        infinite gradients. Elsewhere each `step()` of a torch optimizer counts.

        Args:
            optimizer: a torch optimizer, or any object with `step` and `zero_grad`, and with `param_groups` for `clip`.

        Raises:
            UserError: an optimizer that cannot be clipped, or the middle of a loop over `accumulate`.
        """
        self._batch_weights.check_exchanged()
        if clip is not None:
            if not hasattr(optimizer, "param_groups"):
                raise UserError(
                    f"run.update(clip={clip!r}): a {type(optimizer).__name__} has no param_groups: clip the gradients"
                    " before, or give it that attribute"
                )
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(parameters, clip)
        self._steps.step(optimizer)
        optimizer.zero_grad()
        # also after a step that was skipped
        self._steering.has_gradients = False

    def _step_done(self) -> None:
        self._batch_weights.check_exchanged()
        self.step += 1
        self._steering.step_done()
        self.alive()
        if self._reporter is not None:
            self._reporter.step_done(self.step)

    def accumulate(self, batch: Batch, parts: int) -> Iterator[Batch]:
        """Splits this rank's batch into micro-batches, for gradient accumulation where a batch does not fit at once.

        Call `run.backward` on each micro-batch's mean loss and `run.update` once after the loop: the gradient is that
        of the whole batch. Ranks exchange gradients with the last micro-batch only, and make the same number of them: a
        rank with fewer samples fills up with one that has no weight. To leave one out, multiply its loss by 0; which
        samples are in it depends on the number of ranks.

        Args:
            batch: tensors, arrays, lists of samples, and tuples, lists, mappings and dataclasses of them.

        Raises:
            UserError: the batch cannot be cut between samples, or some micro-batches have no `run.backward`.
        """
        if parts < 1:
            raise UserError(f"run.accumulate: parts={parts}: expected at least 1")
        return self._data.micro_batches(batch, parts)

    # -- what was reached

    def mean(self, total: torch.Tensor | float, count: torch.Tensor | float) -> float:
        """The sum of `total` over the ranks divided by the sum of `count`, in double precision; NaN for no count.

        Collective: every rank calls it.
        """
        return self._steering.mean(float(total), float(count))

    def meter(self, name: str) -> Meter:
        """A mean over the samples of an epoch, such as the loss: `add` them as they come, and report its `mean()`.
        Checkpoints in the middle hold what was added so far.

        Args:
            name: under which it does.

        Raises:
            UserError: a second one of that name, or one that comes after `restore`.
        """
        if name in self._steering.meters:
            raise UserError(f"run.meter({name!r}): there is one of that name: take it, or another name")
        if self._steering.keeps:
            raise UserError(f"run.meter({name!r}): run.restore has been called: make it before that")
        self._steering.meters[name] = Meter(self.device, self.mean, self._batch_weights.samples)
        return self._steering.meters[name]

    def report(self, progress: SupportsIndex, **metrics: Any) -> None:
        """Reports metrics to TensorBoard, `metrics.jsonl`, the screen and `status`.

        Collective: every rank calls it; rank 0's values count. In a sweep it does not return where the study gives the
        trial up.

        Args:
            progress: finished units of the job's own (epochs, mostly), from 1, strictly rising; any integer, such as
                NumPy's.
            metrics: numbers, or tensors of one element.
        """
        self._reporting.report(progress, metrics)

    # -- keeping the work

    def restore(self, **objects: Any) -> State:
        """Loads the newest checkpoint into these objects, or leaves them as they are at the start of a run.

        What is given here is what checkpoints hold: model, optimizer, scheduler, the loader that drives the loop,
        anything with `state_dict` and `load_state_dict`. Names are free and have to stay the same. Every other
        `run.loader` continues where it was, too, known by its size, its batch size, and the order of their creation. A
        job that continues has to fetch before its loop what it fetched there at first.

        Collective: every rank calls it.

        Raises:
            UserError: an object that cannot be saved, or names that the checkpoint does not have.
        """
        self._steering.sync(Call.RESTORE)
        for name, value in objects.items():
            if isinstance(value, Loader):
                self._position.follow(name, value)
            else:
                self._keeper.add(name, value)
                self._models.add_restored(value)
        self._keeper.check_names()
        self._steering.keeps = True
        self._position.loaders.begin_loop()
        newest = self._finder.newest_sound()
        if newest is not None:
            self._load(newest)
        return State(self._position, self._steering)

    def _load(self, key: Key) -> None:
        names = [*self._keeper.objects, *([self._position.loader_name] if self._position.loader is not None else [])]
        with self._steps.paused():
            shared, owns = self._keeper.load(key, names)
        self._steering.resume_from(key, shared, owns)
        if self._reporter is not None:
            self._reporter.begins_at = self.step + 1
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
        """Says when to save, and what stays, for a run that saves otherwise at the end of each epoch and every ten
        minutes, and keeps the newest two checkpoints. What a run restores is saved; the training waits only until it is
        copied in main memory, unless the checkpoint before is still being written. It is copied before the last batch
        of each pass, too (the last one at which the pass before could stop), for a stop in the evaluation that may
        follow.

        Every rank calls it, alike.

        Args:
            every_steps: optimizer steps.
            every_minutes: at the next batch after so many minutes without a checkpoint; None for never.
            keep: how many of the newest stay.
            best: a metric that is reported. The checkpoint of its best report stays too, and `checkpoints/best` is a
                link to it; one is written for each report that is better than those before.
            direction: which values of it are better.

        Raises:
            UserError: names the value that is none.
        """
        plan = Plan(every_steps, every_minutes, keep, best, direction)
        plan.check()
        self._saver.plan = plan

    def save(self) -> None:
        """Ask for a checkpoint at the next boundary: the next batch of a restored loader, the end of the epoch, or the
        end of the job function."""
        self._steering.save_wanted = True

    # -- the end

    def finish(self) -> None:
        """Wait until every rank's job function has returned, and write a checkpoint that is still wanted; a rank that
        still makes other calls is named. A script that is attached calls it at its end, if it wants that."""
        self._steering.finish()

    def await_save(self) -> None:
        """Wait until this rank's part of a checkpoint that is on its way is written, for a limited time."""
        self._saver.await_write()

    def close(self, waits: bool = False) -> None:
        """
        Args:
            waits: for the other ranks' parts of a checkpoint, where they end in good order like this one.
        """
        if self._watchdog is not None:
            self._watchdog.rest()
        self._steps.close()
        if waits:
            self._steering.warn_of_lost_save()
        if self._owns_collectives:
            # the others may wait for what this rank has to say
            self._collectives.close()
        self._saver.close(waits)
        if self._reporter is not None:
            self._reporter.close(self.step)
