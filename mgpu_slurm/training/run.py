"""`Run`: the primitives a job function trains with. Each works alone in a loop that the user already has."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, IterableDataset

from mgpu_slurm.checkpoints.policy import Plan
from mgpu_slurm.checkpoints.tensors import is_sharded
from mgpu_slurm.checkpoints.train_state import Keeper
from mgpu_slurm.checkpoints.wrapping import Wrapped
from mgpu_slurm.core.checkpoint_names import Key
from mgpu_slurm.core.errors import MgpuError, TrialPruned, UserError
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.data import randomness
from mgpu_slurm.data.accumulation import Accumulation
from mgpu_slurm.data.batch_weights import Shares
from mgpu_slurm.data.batches import mixed
from mgpu_slurm.data.evaluation import RunOfShard, Shard, StreamShard
from mgpu_slurm.data.loaders import Loader, RunOfLoader, make_loader
from mgpu_slurm.metrics.reporter import Reporter, as_numbers
from mgpu_slurm.rank.calls import Call
from mgpu_slurm.rank.collectives import Collectives
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.signals import StopFlag
from mgpu_slurm.rank.watchdog import Watchdog
from mgpu_slurm.training.loop_control import Steering
from mgpu_slurm.training.meter import Meter
from mgpu_slurm.training.progress import Position
from mgpu_slurm.training.step_counter import StepCounter
from mgpu_slurm.training.wrap import TellInputs, bring, refuse_first_fsdp

Batch = TypeVar("Batch")

Judge = Callable[[int, dict[str, float]], str | None]
"""Hears the progress and its metrics on rank 0; answers why the training is to end, or None where it goes on."""


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
            collectives: that of the run before, where this process has had one.
            judge: decides on each report whether the training goes on.
            watchdog: ends this rank where it comes no further.
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
        self._restored_at: tuple[int, int] | None = None
        """Step and progress of the checkpoint that this attempt has loaded."""
        self._judge = judge
        self._watchdog = watchdog
        self._reporter = Reporter(self._files, attempt) if self.is_main else None
        self._seed = 0
        self._is_deterministic = False
        self._models: list[DistributedDataParallel] = []
        self._sharded: list[nn.Module] = []
        """A rank whose forwards were fewer would leave the others waiting."""
        self._position = Position()
        self._wrapped = Wrapped()
        self._keeper = Keeper(self._files, facts, attempt, self._wrapped, self._collectives)
        self._steering = Steering(self._position, device, facts.rank, self._collectives, self._keeper, stop, self.alive)
        self._saver = self._steering.saver
        self._steps = StepCounter(self._step_done)
        self._shares = Shares(facts.world_size)
        self._run_of_loader = RunOfLoader(
            self.rank,
            self.world_size,
            device,
            self._steering.before_batch,
            is_same=self._steering.is_same_everywhere,
            sync=self._steering.sync,
            drawn=self._steering.drawn,
            take_batch=self._collectives.take_batch,
            epoch=lambda: self._position.epoch,
            awaits_epochs=lambda: self._position.awaits_epochs,
            step=lambda: self.step,
            places=self._position.loaders,
            shares=self._shares,
        )
        self._run_of_shard = RunOfShard(
            self.rank,
            self.world_size,
            device,
            self._start_shard,
            self.alive,
            sync=self._steering.sync,
            drawn=self._steering.drawn,
            keeps_step=lambda: bool(self._sharded),
            shares=self._shares,
        )
        self._accumulation = Accumulation(self._shares, facts.world_size, self._models)
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
        return (self.step, self.progress) != self._restored_at

    # -- the model and its data

    def seed(self, seed: int, deterministic: bool = False) -> None:
        """Seeds Python, NumPy and torch from the seed and the rank, and the order of loaders from the seed alone.

        Args:
            deterministic: the same numbers come out again on the same number of the same devices, also where a run was
                interrupted. Two CPU ranks need nothing for that. Else torch takes the algorithms that sum in one order,
                or says that it has none, and DDP keeps its gradients in the order of its first step, which costs time:
                it looks at each step for parameters without any. Call it before `wrap`.
        """
        self._seed, self._is_deterministic = seed, deterministic
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
        refuse_first_fsdp(model)
        if is_sharded(model):
            self._sharded.append(model)
            self._wrapped.add(model)
            self._note_inputs_of(model)
            return model
        model = model.to(self.device)
        if self.world_size == 1:
            # nothing to keep in mind: a job may make model after model
            return model
        self._wrapped.add(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            # nothing for DDP to do, which does not take it
            bring([*model.parameters(), *model.buffers()])
            return model
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            # else it shares the gradients out anew after its first step, and after the first of each restart: of three
            # numbers and more the sum depends on where in the exchange they stand
            find_unused_parameters=self._is_deterministic and self.world_size > 2,
            # DDP gives all ranks rank 0's buffers here, and not again at each forward
            forward_sync_buffers=False,
        )
        self._models.append(wrapped)
        # not one of the model itself: torch.jit.script refuses it
        self._note_inputs_of(wrapped)
        return wrapped

    def _note_inputs_of(self, model: nn.Module) -> None:
        # before hooks that change the inputs, such as those of a sharded model
        model.register_forward_pre_hook(TellInputs(self._shares.note_inputs), prepend=True, with_kwargs=True)

    def alive(self) -> None:
        """Says that this rank comes on, for what takes long without any other call of the run: an evaluation of one's
        own, or work on the data. What says nothing for `--stuck-after` is ended."""
        if self._watchdog is not None:
            self._watchdog.alive()

    def _start_shard(self) -> None:
        self._steering.begin_evaluation()
        self._bring_buffers()

    def _bring_buffers(self) -> None:
        if self.world_size > 1:
            for model in self._wrapped:
                bring(model.buffers())

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
        return make_loader(dataset, batch_size, shuffle, drop_last, self._seed, self._run_of_loader, **options)

    def shard(self, dataset: Dataset[Any], batch_size: int = 256, **options: Any) -> Shard | StreamShard:
        """Iterates this rank's part of a dataset for evaluation: no sample twice and none padded.

        Ranks may get different numbers of samples, so sum over them, do not average, and weigh what you count with
        `run.mean(sum, count)`. If a model is sharded, all ranks get the same number of batches, some of zero rows.
        """
        if isinstance(dataset, IterableDataset):
            return StreamShard(dataset, self._run_of_shard, batch_size, **options)
        return Shard(dataset, self._run_of_shard, batch_size=batch_size, **options)

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
        weight = self._shares.weight(batch)
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
        self._shares.check_exchanged()
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
        self._shares.check_exchanged()
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
        return self._accumulation.micro_batches(batch, parts)

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
        self._steering.meters[name] = Meter(self.device, self.mean, self._shares.samples)
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
        try:
            progress = operator.index(progress)
        except TypeError:
            raise UserError(f"run.report({progress!r}): progress is a whole number, such as the epoch") from None
        numbers = as_numbers(metrics)
        if self.is_main and self._steering.keeps and self._saver.hear_report(self.step, numbers):
            self._steering.save_wanted = True
        self._steering.sync(Call.REPORT)
        if progress <= self.progress:
            raise UserError(
                f"report(progress={progress}): progress counts from 1 and rises, and it was {self.progress} before"
            )
        self._position.progress, self._position.metrics = progress, numbers
        if self._reporter is not None:
            self._reporter.report(progress, self.step, numbers)
        if self._judge is not None:
            self._listen_to(self._judge)
        self._steering.reported()

    def _listen_to(self, judge: Judge) -> None:
        """Rank 0 asks, and all ranks end alike where the answer is no."""
        given_up = self._collectives.broadcast_from_rank0(lambda: judge(self.progress, self.last_metrics))
        if given_up is not None:
            print(f"mgpu_slurm: {given_up}: stopped at progress {self.progress}", flush=True)
            self._saver.finish()
            raise TrialPruned(given_up)

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
                if self._position.loader is not None:
                    raise UserError(
                        f"run.restore({name}=...): {self._position.loader_name!r} is a loader already: give the one"
                        " that drives the loop, at whose batches the run can stop; the others are restored with it"
                    )
                self._position.loader_name, self._position.loader = name, value
                self._position.loaders.driver = value.place
            else:
                self._keeper.add(name, value)
                if isinstance(value, nn.Module) and is_sharded(value) and value not in self._sharded:
                    self._sharded.append(value)
                    self._wrapped.add(value)
        self._keeper.check_names()
        self._steering.keeps = True
        self._position.loaders.begin_loop()
        newest = self._newest_sound()
        if newest is not None:
            self._load(newest)
        return State(self._position, self._steering)

    def _newest_sound(self) -> Key | None:
        """The newest checkpoint that is what was written; newer ones are set aside."""
        while True:
            # rank 0 decides, because a shared file system may show the others an older folder
            found, count = self._keeper.newest() if self.is_main else (Key(0, 0), 0)
            step, number, count = map(int, self._collectives.total([*found, count]))
            if not count:
                return None
            newest = Key(step, number)
            problem = self._keeper.problem(newest)
            if not self._steering.any_rank(problem is not None, Call.RESTORE):
                return newest
            self._set_aside(newest, problem, is_last=count == 1)

    def _set_aside(self, key: Key, problem: str | None, is_last: bool) -> None:
        """
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
        if self.is_main:
            self._keeper.set_aside(key)
        self._steering.sync(Call.RESTORE)

    def _load(self, key: Key) -> None:
        names = [*self._keeper.objects, *([self._position.loader_name] if self._position.loader is not None else [])]
        with self._steps.paused():
            shared, owns = self._keeper.load(key, names)
        self._position.go_to(shared)
        self._restored_at = (self.step, self.progress)
        self._saver.restored(shared, key)
        # where there was no such rank its seed stays
        self._steering.random_to_restore = owns[0]["random"] if owns else None
        for name, meter in self._steering.meters.items():
            meter.go_on_from(own["meters"][name] for own in owns if name in own["meters"])
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
