"""`Run`: the primitives a job function trains with. Each works alone in a loop that the user already has."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from mgpu_slurm.errors import MgpuError, RunStopped, TrialPruned, UserError
from mgpu_slurm.paths import RunFolder
from mgpu_slurm.runtime import randomness
from mgpu_slurm.runtime.agreement import Agreement
from mgpu_slurm.runtime.calls import Agreed, Call
from mgpu_slurm.runtime.data import GlobalBatches, Loader, Shard, Share, first_dimension, mixed, size_of, split
from mgpu_slurm.runtime.facts import RankFacts
from mgpu_slurm.runtime.keeping import Keeper
from mgpu_slurm.runtime.metrics import Reporter, as_numbers
from mgpu_slurm.runtime.plan import Plan
from mgpu_slurm.runtime.saving import Saver
from mgpu_slurm.runtime.stopping import Stop, StopFlag
from mgpu_slurm.runtime.watchdog import Watchdog
from mgpu_slurm.spec import REQUEUE_EXIT_CODE, TERMINATED_EXIT_CODE

Batch = TypeVar("Batch")

Judge = Callable[[int, dict[str, float]], str | None]
"""Hears the progress and its metrics on rank 0; answers why the training is to end, or None where it goes on."""

# torch 2.13 renamed the option and warns about the old name
_NO_BUFFER_SYNC: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else {"broadcast_buffers": False}
)


class State:
    """Where a run stands: at the start, or at the checkpoint it was restored from."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._run.step

    @property
    def progress(self) -> int:
        """The last progress reported; 0 before the first."""
        return self._run.progress

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs that are left, from 1 to `total`; the one that was interrupted comes first.

        The end of each epoch is a boundary: a checkpoint is written, and a stop that was asked for happens.
        """
        return self._run._epochs(total)


class Run:
    """One rank's handle on a submitted training."""

    def __init__(
        self,
        facts: RankFacts,
        folder: Path,
        device: torch.device,
        attempt: int,
        stop: StopFlag,
        agreement: Agreement | None = None,
        judge: Judge | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        """
        Args:
            agreement: that of the run before, where this process has had one.
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
        self.step = 0
        """Optimizer steps done, over all attempts."""
        self.progress = 0
        self.last_metrics: dict[str, float] = {}
        self._files = RunFolder(folder)
        self._agreement = agreement or Agreement(facts)
        self._owns_agreement = agreement is None
        self._judge = judge
        self._watchdog = watchdog
        self._reporter = Reporter(self._files, attempt) if self.is_main else None
        self._stop = stop
        self._seed = 0
        self._is_deterministic = False
        self._models: list[DistributedDataParallel] = []
        self._keeper = Keeper(self._files, facts, attempt)
        self._saver = Saver(self._keeper, facts.rank, self._agreement.tally(), self._is_so_anywhere, self.alive)
        self._loader: Loader | None = None
        self._loader_name = ""
        self._restored = False
        self._next_epoch = 1
        self._epoch: int | None = None
        self._has_gradients = False
        self._save_wanted = False
        self._agreed = Agreed()
        self._random_to_restore: dict[str, Any] | None = None
        self._in_mid_epoch = False
        self._evaluates, self._has_evaluated = True, False
        """Whether there was an evaluation after the pass before this one, which nobody knows at first; and whether one
        has begun since."""
        self._share: Share | None = None
        self._part = 1.0
        if watchdog is not None:
            watchdog.watch(lambda: self.step)

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
        """The model on this rank's device, in DistributedDataParallel where there are other ranks.

        All ranks start from rank 0's parameters and buffers. Buffers (batch norm statistics) are not broadcast at each
        forward, which costs time and hangs uneven evaluation; iterating `run.shard` brings rank 0's to all.
        """
        model = model.to(self.device)
        if self.world_size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            # else it shares the gradients out anew after its first step, and after the first of each restart: of three
            # numbers and more the sum depends on where in the exchange they stand
            find_unused_parameters=self._is_deterministic and self.world_size > 2,
            **_NO_BUFFER_SYNC,
        )
        self._models.append(wrapped)
        self._bring_buffers()
        return wrapped

    def alive(self) -> None:
        """Says that this rank comes on, for what takes long without any other call of the run: an evaluation of one's
        own, or work on the data. What says nothing for `--stuck-after` is ended."""
        if self._watchdog is not None:
            self._watchdog.alive()

    def _start_shard(self) -> None:
        self._has_evaluated = True
        self._together(Call.SHARD)
        self._leave_evaluation()
        self._bring_buffers()

    def _bring_buffers(self) -> None:
        for model in self._models:
            for buffer in model.module.buffers():
                torch.distributed.broadcast(buffer, src=0)

    def loader(
        self, dataset: Dataset[Any], batch_size: int, shuffle: bool = False, drop_last: bool = False, **options: Any
    ) -> Loader:
        """Iterates this rank's share of global batches, on the run's device.

        Args:
            dataset: a map-style dataset.
            batch_size: of all ranks together. Every sample of an epoch is seen once; the last batch may be smaller.
            shuffle: a new order each epoch, which depends on the seed and the epoch alone.
            drop_last: leave the last batch out where it is smaller; batch norm fails on a share of one sample.
            options: further arguments of `torch.utils.data.DataLoader`, such as `num_workers`.
        """
        for name in ("sampler", "batch_sampler"):
            if name in options:
                raise UserError(f"run.loader({name}=...): it shares out the samples itself: leave that out")
        if batch_size < 1:
            raise UserError(f"batch_size={batch_size}: expected at least 1 sample for all ranks together")
        size = size_of(dataset)
        if drop_last and size < batch_size:
            raise UserError(f"drop_last leaves nothing of {size} samples with batch_size={batch_size}: lower one")
        sampler = GlobalBatches(size, batch_size, shuffle, drop_last, self.rank, self.world_size, self._seed)
        return Loader(
            dataset,
            sampler,
            self.device,
            self._at_boundary,
            self._take_share,
            lambda: self._epoch,
            **options,
        )

    def shard(self, dataset: Dataset[Any], batch_size: int = 256, **options: Any) -> Shard:
        """Iterates this rank's part of a dataset for evaluation: no sample twice and none padded.

        Ranks may get different numbers of samples, so weigh what you count with `run.mean(sum, count)`.
        """
        return Shard(
            dataset,
            self.rank,
            self.world_size,
            self.device,
            self._start_shard,
            self.alive,
            batch_size=batch_size,
            **options,
        )

    def _take_share(self, share: Share | None) -> None:
        self._share = share

    # -- a step

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagates the mean loss of this rank's batch, weighted so that the world's gradient is that of the
        mean over the global batch, also where ranks hold different numbers of samples."""
        weight = self._part
        if self._share is not None:
            # DDP divides the sum of gradients by the world size
            weight *= self._share.count * self.world_size / self._share.total
        if weight != 1.0:
            loss = loss * weight
        loss.backward()  # type: ignore[no-untyped-call]
        self._has_gradients = True
        self.alive()

    def update(self, optimizer: torch.optim.Optimizer, clip: float | None = None) -> None:
        """One optimizer step, gradients clipped to the norm `clip` first and cleared after."""
        if clip is not None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if optimizer not in self._keeper.objects.values():
            self._step_done()

    def _step_done(self, *_: Any) -> None:
        """After each step of an optimizer, whoever called it: for restored ones this is a hook."""
        self.step += 1
        self._has_gradients = False
        self.alive()
        if self._reporter is not None:
            self._reporter.step_done(self.step)

    def accumulate(self, batch: Batch, parts: int) -> Iterator[Batch]:
        """Splits this rank's batch into micro-batches, for gradient accumulation where a batch does not fit at once.

        Call `run.backward` on each micro-batch's mean loss and `run.update` once after the loop: the gradient is that
        of the whole batch. Ranks exchange gradients with the last micro-batch only.
        """
        if parts < 1:
            raise UserError(f"run.accumulate: parts={parts}: expected at least 1")
        pieces = split(batch, parts)
        size = first_dimension(batch)
        try:
            for index, piece in enumerate(pieces):
                self._part = first_dimension(piece) / size
                with contextlib.ExitStack() as stack:
                    if index < len(pieces) - 1:
                        for model in self._models:
                            stack.enter_context(model.no_sync())
                    yield piece
        finally:
            self._part = 1.0

    # -- what was reached

    def mean(self, total: torch.Tensor | float, count: torch.Tensor | float) -> float:
        """The sum of `total` over the ranks divided by the sum of `count`, in double precision; NaN for no count.

        Collective: every rank calls it.
        """
        self._together(Call.MEAN)
        self._leave_evaluation()
        sums = self._agreement.total([float(total), float(count)])
        return sums[0] / sums[1] if sums[1] else float("nan")

    def report(self, progress: int, **metrics: Any) -> None:
        """Reports metrics to TensorBoard, `metrics.jsonl`, the screen and `status`.

        Collective: every rank calls it; rank 0's values count. In a sweep it does not return where the study gives the
        trial up.

        Args:
            progress: finished units of the job's own (epochs, mostly), from 1, strictly rising.
            metrics: numbers, or tensors of one element.
        """
        numbers = as_numbers(metrics)
        if self.is_main and self._restored and self._saver.hear_report(self.step, numbers):
            self._save_wanted = True
        self._together(Call.REPORT)
        if progress <= self.progress:
            raise UserError(
                f"report(progress={progress}): progress counts from 1 and rises, and it was {self.progress} before"
            )
        self.progress = progress
        self.last_metrics = numbers
        if self._reporter is not None:
            self._reporter.report(progress, self.step, self.last_metrics)
        if self._judge is not None:
            self._listen_to(self._judge)
        if not self._restored:
            # a loop of one's own may have no other boundary, and there is nothing to save
            self._act(active=None)

    def _listen_to(self, judge: Judge) -> None:
        """Rank 0 asks, and all ranks end alike where the answer is no."""
        given_up = self._agreement.told(lambda: judge(self.progress, self.last_metrics))
        if given_up is not None:
            print(f"mgpu_slurm: {given_up}: stopped at progress {self.progress}", flush=True)
            self._saver.finish()
            raise TrialPruned(given_up)

    # -- keeping the work

    def restore(self, **objects: Any) -> State:
        """Loads the newest checkpoint into these objects, or leaves them as they are at the start of a run.

        What is given here is what checkpoints hold: model, optimizer, scheduler, the loader, anything with `state_dict`
        and `load_state_dict`. Names are free and have to stay the same.

        Collective: every rank calls it.

        Raises:
            UserError: an object that cannot be saved, or names that the checkpoint does not have.
        """
        self._together(Call.RESTORE)
        for name, value in objects.items():
            if isinstance(value, Loader):
                if self._loader is not None:
                    raise UserError(
                        f"run.restore({name}=...): a run stops at the batches of one loader;"
                        f" {self._loader_name!r} is restored already"
                    )
                self._loader_name, self._loader = name, value
            else:
                self._keeper.add(name, value)
        self._restored = True
        step = self._newest_sound()
        if step is not None:
            self._load(step)
        for value in objects.values():
            if isinstance(value, torch.optim.Optimizer):
                value.register_step_post_hook(self._step_done)
        return State(self)

    def _newest_sound(self) -> int | None:
        """The step of the newest checkpoint that is what was written; newer ones are set aside."""
        while True:
            # rank 0 decides, because a shared file system may show the others an older folder
            step, count = map(int, self._agreement.total(list(self._keeper.newest() if self.is_main else (0, 0))))
            if not count:
                return None
            problem = self._keeper.problem(step)
            agreed = self._agreement.together(Call.RESTORE, replace(self._wish(), failed=problem is not None))
            self._remember(agreed)
            if not agreed.failed:
                return step
            self._set_aside(step, problem, is_last=count == 1)

    def _set_aside(self, step: int, problem: str | None, is_last: bool) -> None:
        """
        Args:
            problem: what this rank has found.

        Raises:
            MgpuError: there is none before it.
        """
        path = self._files.checkpoint(step)
        said = f"checkpoint {str(path)!r} is damaged{f' ({problem})' if problem else ''}"
        if is_last:
            raise MgpuError(f"{said}, and there is none before it: delete it to start at the beginning")
        if problem is not None:
            print(f"mgpu_slurm: WARNING: {said}: going back to the one before it", flush=True)
        if self.is_main:
            self._keeper.set_aside(step)
        self._together(Call.RESTORE)

    def _load(self, step: int) -> None:
        shared, own = self._keeper.load(step, [*self._keeper.objects, *([self._loader_name] if self._loader else [])])
        if self._loader is not None:
            self._loader.first_batch, self._loader.passes = shared["loader"]["batch"], shared["loader"]["passes"]
        self.step, self.progress, self.last_metrics = shared["step"], shared["progress"], shared["metrics"]
        self._next_epoch = shared["next_epoch"]
        self._saver.restored(shared)
        self._in_mid_epoch = shared["loader"]["active"]
        self._random_to_restore = own["random"] if own is not None else None
        if self._reporter is not None:
            self._reporter.begins_at = self.step + 1
            name = self._files.checkpoint(step).name
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
        of each pass, too, for a stop in the evaluation that may follow.

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
        """Asks for a checkpoint at the next boundary: the next batch of a restored loader, or the end of the epoch."""
        self._save_wanted = True

    def _epochs(self, total: int) -> Iterator[int]:
        if not self._in_mid_epoch:
            self._restore_random()
        for epoch in range(self._next_epoch, total + 1):
            self._epoch = epoch
            yield epoch
            self._epoch = None
            self._next_epoch = epoch + 1
            self._together(Call.EPOCH)
            self._act(active=None, save=True, wait=epoch == total)

    def _at_boundary(self, loader: Loader) -> None:
        is_restored = loader is self._loader
        if is_restored:
            self._in_mid_epoch = False
            self._restore_random()
            self._go_on_training()
        else:
            self._has_evaluated = True
        self._pass_boundary()
        # neither a loader whose position is not saved nor the middle of an accumulated step is a place to stop at,
        # unless nothing is saved anyway
        if (is_restored and not self._has_gradients) or not self._restored:
            self._act(active=loader, save=self._saver.is_due_at(self.step))
            if is_restored and self._evaluates and loader.batch == len(loader) - 1:
                self._hold()
        else:
            self._leave_evaluation()

    def _pass_boundary(self) -> None:
        self._remember(self._agreement.step(self._wish()))
        self._saver.check()
        self.alive()

    # -- where it evaluates

    def _hold(self) -> None:
        """An evaluation may follow, and nowhere in that can a run stop."""
        facts, own = self._moment(in_mid_pass=True)
        # nobody waits long for another checkpoint that is still being written, and all do the same
        if not self._is_so_anywhere(self._saver.is_writing_other(facts)):
            self._saver.hold(facts, own)

    def _go_on_training(self) -> None:
        assert self._loader is not None
        self._saver.release()
        if self._loader.batch == 0 and self._loader.passes > 1:
            # by the pass before
            self._evaluates, self._has_evaluated = self._has_evaluated, False

    def _leave_evaluation(self) -> None:
        """Where a stop was agreed: with a checkpoint of the last batch of the pass before, which is done again then."""
        if self._agreed.stop is not Stop.NO and self._saver.save_held(self.step):
            self._saver.finish()
            self._leave()

    def _restore_random(self) -> None:
        """At the very place where the state was taken, so that what user code draws before it changes nothing."""
        if self._random_to_restore is not None:
            randomness.set_random_state(self._random_to_restore, self.device)
            self._random_to_restore = None

    def _wish(self) -> Agreed:
        save = self._restored and not self._agreed.save and (self._save_wanted or self._saver.is_due_now())
        return Agreed(self._stop.due, save)

    def _remember(self, agreed: Agreed) -> None:
        self._agreed = Agreed(max(self._agreed.stop, agreed.stop), self._agreed.save or agreed.save)
        if agreed.save:
            # what is agreed is not asked for again
            self._save_wanted = False

    def _together(self, call: Call) -> Agreed:
        agreed = self._agreement.together(call, self._wish())
        self._remember(agreed)
        self.alive()
        return agreed

    def _is_so_anywhere(self, is_so: bool) -> bool:
        """At a place for a checkpoint: whether that is so on any rank."""
        agreed = self._agreement.together(Call.SAVE, replace(self._wish(), failed=is_so))
        self._remember(agreed)
        self.alive()
        return agreed.failed

    def _act(self, active: Loader | None, save: bool = False, wait: bool = False) -> None:
        """Does what was agreed, on all ranks at the same boundary.

        Args:
            active: the loader in whose pass this is.
            save: whether a checkpoint is due here anyway.
            wait: until it is written.
        """
        if self._restored and (save or self._agreed.save or self._agreed.stop is not Stop.NO):
            self._saver.save(*self._moment(active is not None))
        # asked again: a stop may have been agreed while the checkpoint before was waited for
        if wait or self._agreed.stop is not Stop.NO:
            self._saver.finish()
        self._agreed = replace(self._agreed, save=False)
        self._leave()

    def _leave(self) -> None:
        """If that was agreed."""
        # a run that keeps nothing would start at nothing, again and again
        if self._agreed.stop is Stop.LEAVE or (self._agreed.stop is Stop.REQUEUE and self._restored):
            _stop(REQUEUE_EXIT_CODE, f"the time limit is near: stopped at step {self.step}")
        if self._agreed.stop is Stop.END:
            _stop(TERMINATED_EXIT_CODE, f"asked to end: stopped at step {self.step}")

    def _moment(self, in_mid_pass: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Where the run stands, which is the same on all ranks, and what this rank keeps for itself."""
        batch, passes = (self._loader.batch, self._loader.passes) if self._loader is not None else (0, 0)
        facts = {
            "step": self.step,
            "progress": self.progress,
            "metrics": self.last_metrics,
            "next_epoch": self._epoch if in_mid_pass and self._epoch is not None else self._next_epoch,
            "loader": {
                "name": self._loader_name,
                "active": in_mid_pass,
                "batch": batch if in_mid_pass else 0,
                # the pass that was begun is begun again
                "passes": passes - in_mid_pass,
            },
        }
        return facts, {"random": randomness.random_state(self.device)}

    # -- the end

    def finish(self) -> None:
        """Waits until every rank's job function has returned; a rank that still makes other calls is named."""
        self._together(Call.FINISH)
        self._saver.finish()

    def close(self, waits: bool = False) -> None:
        """
        Args:
            waits: for the other ranks' parts of a checkpoint, where they end in good order like this one.
        """
        if self._watchdog is not None:
            self._watchdog.rest()
        self._saver.close(waits)
        if self._owns_agreement:
            self._agreement.close()
        if self._reporter is not None:
            self._reporter.close(self.step)


def _stop(exit_code: int, reason: str) -> NoReturn:
    print(f"mgpu_slurm: {reason}", flush=True)
    raise RunStopped(exit_code, reason)
