"""Find the batch that a loss is the mean of, and thus the weight of its gradient.

DDP averages gradients over the ranks. That is the gradient of the mean over a global batch only if each rank's loss is
multiplied by `count * data_ranks / total`: ranks may have different numbers of its samples, and a rank without any
computes on a stand-in of weight 0. `run.backward(loss)` does not specify the batch, so it is inferred from what has
happened since the last loss. From the strongest evidence to the weakest:

1. The job names the batch, as in `run.backward(loss, images)`.
2. Models were given tensors of a batch, or views of them.
3. Models were given something else, which the job has computed from a batch: from the current batch of the training
   loop, or from one that was fetched ahead and not used yet. Evaluations and finished passes do not count.

If that leaves several batches of different weights, the job must name one: a wrong gradient would go unnoticed. All
ranks raise that error, as it depends only on the sizes of global batches. The counts of meters are found the same way.

`pass_history` and `passes` record what was handed out, and recognize tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.data.batching.batches import Share
from mgpu_slurm.data.batching.nests import leaves_of
from mgpu_slurm.data.batching.pass_history import PassHistory, shares_of
from mgpu_slurm.data.batching.passes import HandedBatch, Pass

Samples = TypeVar("Samples")

MOST_INPUTS = 256
"""Maximum number of batches given to models without a loss, as in a job that calls `loss.backward` itself."""


class Split:
    """A batch that is being split into micro-batches."""

    def __init__(self, handed: list[HandedBatch], newest: int) -> None:
        self.handed = handed
        """The batches it comes from, as far as known."""
        self.shares = {each.share for each in handed if each.share is not None}
        self.newest = newest
        """The number of the newest batch when the split began."""
        self.part = 1.0
        """The fraction of its samples in the current micro-batch."""
        self.is_at_last = False
        """Whether this is the last micro-batch, the only one with which ranks exchange gradients."""


class ModelInputs:
    """The inputs of the models since the last loss."""

    def __init__(self) -> None:
        self.batches: dict[HandedBatch, bool] = {}
        """Batches of which models were given a tensor, and whether one of the models was in training mode."""
        self.has_others = False
        """Whether models were given something else, too."""
        self.loops_at: dict[Share | None, HandedBatch] = {}
        """The current batches of the loops at that time, the newest of each share."""

    def note(self, model: nn.Module, leaves: list[Any], found: set[HandedBatch], loops_at: set[HandedBatch]) -> None:
        """Record that a model is given these leaves of a nest.

        Args:
            found: the batches that they are parts of.
            loops_at: the current batches of the loops.
        """
        for each in found:
            self.batches[each] = model.training or self.batches.get(each, False)
        # another model's outputs are no evidence
        if not found and not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            self.has_others = True
            if model.training:
                self.loops_at |= {each.share: each for each in loops_at}
        if len(self.batches) > MOST_INPUTS:
            self.batches, self.has_others = {}, True

    def forget(self) -> None:
        """Begin again after a loss."""
        self.batches, self.has_others, self.loops_at = {}, False, {}


class BatchWeights:
    """Weights the losses of one rank, and counts its samples for meters."""

    def __init__(self, data_ranks: int) -> None:
        self._data_ranks = data_ranks
        self._history = PassHistory()
        self._splits: list[Split] = []
        self.uses = 0
        """Number of times that a model, a loss or a meter was given anything."""
        self.losses = 0
        """Number of losses weighted."""
        self._inputs = ModelInputs()
        self._differentiated: set[HandedBatch] = set()
        """The batches of the last loss, if known."""
        self._differentiated_at = 0
        """The number of the newest batch at that time."""
        self._is_named = False
        """Whether the job named them."""
        self.has_warned = False
        """Whether it has warned of an evaluation that counts samples twice."""

    # -- called by loaders and run.accumulate

    @contextmanager
    def passing(self, batches: object = None, place: object = None) -> Iterator[Pass]:
        """Track a pass over a loader while it lasts.

        Args:
            batches: equal for passes over the same batches, even by different loaders.
            place: place of a loader, of whose passes only the newest continues; None for a pass next to others.
        """
        begun = self._history.begin(self.uses, self.losses == 0, batches, place)
        try:
            yield begun
            self._record_open_evaluations(begun)
        finally:
            begun.uses = self.uses
            begun.close()

    def hand_out(self, passing: Pass, share: Share | None, samples: Samples) -> Samples:
        """Record a batch, and return it."""
        self._record_open_evaluations(passing)
        return self._history.hand_out(passing, share, samples)

    def _record_open_evaluations(self, passing: Pass) -> None:
        """Record that a loop continues, or ends, before evaluations that began in its body have ended.

        Raises:
            UserError: a meter may have used the number of samples of such an evaluation for this loop's batch.
        """
        last = passing.trained
        if last is None:
            return
        for evaluated in self._history.current():
            if evaluated.trains or evaluated.number < last.number or evaluated.of.is_held:
                continue
            evaluated.of.is_held = True
            if evaluated.of.was_measured and _total(evaluated.share) != _total(last.share):
                raise _unclear_count({evaluated.share, last.share})

    @contextmanager
    def splitting(self, batch: Any) -> Iterator[Split]:
        """Track the splitting of a batch while it lasts."""
        split = Split([each for each in self._history.holding(batch) if each.share is not None], self._history.newest)
        self._splits.append(split)
        try:
            yield split
        finally:
            self._splits.remove(split)

    def check_innermost(self, split: Split) -> None:
        """Check that a split is the innermost one.

        Raises:
            UserError: micro-batches of two batches alternate.
        """
        if self._splits[-1] is not split:
            raise UserError(
                "run.accumulate: two loops over it alternate, as in zip: split both batches together, as in"
                " run.accumulate((a, b), parts)"
            )

    def check_exchanged(self) -> None:
        """Check that the optimizer may step.

        Raises:
            UserError: ranks have not exchanged their gradients.
        """
        if not all(split.is_at_last for split in self._splits):
            raise UserError(
                "run.accumulate: the optimizer stepped before the last micro-batch, at which ranks exchange their"
                " gradients: call run.update after the loop; if you have left the loop, close its iterator"
            )

    # -- called by models

    def note_inputs(self, model: nn.Module, inputs: Any) -> None:
        """Record the inputs of a model."""
        self.uses += 1
        leaves = leaves_of(inputs)
        try:
            found = {owner for leaf in leaves for owner in self._history.owners(leaf)}
        except RuntimeError:
            # raised by tensors within torch.func, for example
            found = set()
        at = found or self._history.at()
        for each in at:
            each.give()
        if torch.is_grad_enabled():
            self._inputs.note(model, leaves, found, at)

    # -- the batch of a loss

    def weight(self, batch: Any = None) -> float:
        """Return the factor by which the gradient of a loss is multiplied.

        Args:
            batch: any tensor of the batch, or a nest of them; None for the batch that the models were given, or that of
                the loop.

        Raises:
            UserError: it cannot be determined, or `batch` is not one of a loader.
        """
        self._history.note_loss()
        self.uses += 1
        self.losses += 1
        if batch is None:
            shares, part = self._of_loss()
            self._inputs.forget()
        else:
            shares, part = self._of_named(batch)
        if len({*map(self._kind, shares)}) > 1:
            raise UserError(
                f"run.backward: the loss may be of several batches ({_said(shares)}); name the one that it is the mean"
                " of, as in run.backward(loss, images), and evaluate with run.shard or under torch.no_grad()"
                + "; for data of your own, call loss.backward()"
                * (None in shares)
            )
        share = shares.pop()
        return part if share is None else part * share.weight(self._data_ranks)

    def _kind(self, share: Share | None) -> int:
        """Return a number that is equal for shares whose weights are equal on all ranks, so that all ranks agree
        whether several batches may be meant."""
        return 0 if share is None or share.total % self._data_ranks == 0 else share.total

    def samples(self, value: Any = None) -> float | None:
        """Return the number of this rank's samples in the batch of the loop; None if there is no such loop.

        Args:
            value: their mean. If it requires gradients, it is that of a training batch.

        Raises:
            UserError: it cannot be determined.
        """
        self.uses += 1
        is_loss = isinstance(value, torch.Tensor) and value.requires_grad
        shares, part = self._measured(is_loss)
        if len({*map(_total, shares)}) > 1:
            raise _unclear_count(shares)
        share = shares.pop() if shares else None
        return None if share is None else share.count * part

    def _measured(self, is_loss: bool) -> tuple[set[Share | None], float]:
        """Return the shares that a meter may measure, also in an evaluation within the training loop, and the part of
        each."""
        current = self._history.current()
        newest = max(current, key=lambda each: each.number, default=None)
        if newest is not None and newest.share is None:
            return {None}, 1.0
        begun = [each.number for each in current if each.trains] + [each.newest for each in self._splits]
        evaluated = [each for each in current if not each.trains and each.number > max(begun, default=0)]
        is_held = any(each.of.is_held for each in evaluated)
        if is_loss or is_held or not evaluated or torch.is_grad_enabled():
            if self._has_just_differentiated() and not self._inputs.batches:
                return self._of(self._differentiated)
            meant, gone, part = self._in_hand("meter.add")
            if meant:
                others = evaluated if is_held and not is_loss else []
                return shares_of([*meant, *others, *self._given()]) | gone, part
        self._use(evaluated)
        for each in evaluated:
            each.of.was_measured = True
        return shares_of(evaluated), 1.0

    def _given(self) -> list[HandedBatch]:
        """Return the batches that the models were given last, except those kept only by a loop variable."""
        given = self._inputs.batches or self._differentiated
        return [each for each in given if each.is_kept()]

    def _of_loss(self) -> tuple[set[Share | None], float]:
        """Return the shares of the batches that a loss may be the mean of, and the part of each."""
        inputs = {each for each, has_trained in self._inputs.batches.items() if has_trained and each.is_referenced()}
        # a batch that a model evaluated may only be kept by the variable of that loop
        inputs |= {each for each in self._inputs.batches if each.is_kept()}
        if not self._inputs.has_others:
            if inputs:
                self._differentiated, self._differentiated_at, self._is_named = inputs, self._history.newest, False
                return self._of(inputs)
            if not self._inputs.batches and not self._is_named and self._has_just_differentiated():
                # another loss of the same outputs
                return self._of(self._differentiated)
        meant, gone, part = self._in_hand("run.backward")
        others = gone if meant else self._history.outside_of_loops()
        if self._history.runs_ahead():
            # a model was given a batch that a loop has left, and another model something else
            inputs |= {each for each in self._differentiated if each.is_referenced()}
        self._differentiated = set()
        return shares_of([*meant, *inputs, *self._inputs.loops_at.values()]) | others, part

    def _has_just_differentiated(self) -> bool:
        """Return whether the batch of the last loss is known, and no batch was fetched since."""
        return bool(self._differentiated) and self._differentiated_at == self._history.newest

    def _of_named(self, batch: Any) -> tuple[set[Share | None], float]:
        """Return the shares of the batch that the job names, and the part of each.

        Raises:
            UserError: it is not one of a loader.
        """
        meant = self._history.holding(batch)
        if not meant:
            raise UserError(
                "run.backward(loss, batch): no tensor of this batch comes unchanged from run.loader: pass the batch"
                " before it is changed, or any tensor that came with it"
            )
        rest = {each: has_trained for each, has_trained in self._inputs.batches.items() if each not in meant}
        self._inputs.forget()
        self._inputs.batches = rest
        self._differentiated, self._differentiated_at, self._is_named = meant, self._history.newest, True
        return self._of(meant)

    def _of(self, meant: Collection[HandedBatch]) -> tuple[set[Share | None], float]:
        """Return the shares of batches that are certain, and the part of each.

        Raises:
            UserError: one of them is being split, and another is not, or is split into other parts.
        """
        for each in meant:
            each.use()
        parts = {next((split.part for split in self._splits if each in split.handed), 1.0) for each in meant}
        if len(parts) > 1:
            raise _fetched_within("run.backward")
        return shares_of(meant), parts.pop()

    def _in_hand(self, call: str) -> tuple[Collection[HandedBatch], set[Share | None], float]:
        """Return the batches of the loop if none is certain, the shares of other candidates, and the part of each.

        Raises:
            UserError: a micro-batch or another batch may be meant.
        """
        is_loss, part = call == "run.backward", 1.0
        meant = self._history.in_loops([*self._inputs.loops_at.values()] if is_loss else [])
        gone = self._history.gone(is_loss)
        if self._splits:
            split = self._splits[-1]
            if any(each.number > split.newest for each in meant):
                raise _fetched_within(call)
            part = split.part
            if split.handed:
                meant, gone = split.handed, set()
        self._use(meant)
        return meant, gone, part

    def _use(self, meant: Collection[HandedBatch]) -> None:
        for each in meant:
            each.may_be_used = True
            if len(meant) == 1:
                each.use()


def _total(share: Share | None) -> int | None:
    return None if share is None else share.total


def _fetched_within(call: str) -> UserError:
    return UserError(
        f"{call}: a batch was fetched within a loop over run.accumulate, or after leaving that loop with its iterator"
        " open: name the batch, as in run.backward(loss, images), or close the iterator"
    )


def _unclear_count(shares: Collection[Share | None]) -> UserError:
    return UserError(
        f"meter.add: the value may be of several batches ({_said(shares)}); specify the number of samples as `count`"
    )


def _said(shares: Collection[Share | None]) -> str:
    """Return a text that lists the batches that may be meant."""
    batches = sorted(f"one with {each.count} of {each.total} samples on this rank" for each in shares if each)
    return " or ".join(batches + ["data of your own"] * (None in shares))
