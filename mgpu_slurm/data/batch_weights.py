"""Which batch a loss is the mean of, and so what weight its gradient has.

Every pass over a loader notes which batches it has handed out, and each model which of them it was given since the last
loss. If it was given something else, which the job has made of a batch, the loss is that of the batch at which the
training's loop is: batches of evaluations and of passes that are over do not count. If several batches may be meant,
and their weights differ, the job has to name one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from mgpu_slurm.checkpoints.tensors import place_of
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.data.batches import Share
from mgpu_slurm.data.nests import leaves_of
from mgpu_slurm.data.passes import Handed, Pass

Samples = TypeVar("Samples")

MOST_PASSES = 16
"""That are over and remembered: a dataset may hand out the same tensors in each."""

MOST_INPUTS = 256
"""Batches that models were given and of which there was no loss, as in a job that calls `loss.backward` itself."""


class Split:
    """A batch that is in the middle of being split into micro-batches."""

    def __init__(self, handed: list[Handed], newest: int) -> None:
        self.handed = handed
        """The batches it comes from, as far as they are known."""
        self.newest = newest
        """The number of the newest batch when it began."""
        self.part = 1.0
        """The share of its samples in the present micro-batch."""
        self.is_at_last = False
        """Ranks exchange gradients with the last micro-batch only."""


class Shares:
    """The batches that one rank has in hand, and their shares."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._passes: list[Pass] = []
        self._splits: list[Split] = []
        self._newest = 0
        self.uses = 0
        """How often a model, a loss or a meter was given anything."""
        self.losses = 0
        """How often a loss was weighted."""
        self._inputs: dict[Handed, bool] = {}
        """What models were given since the last loss, and whether one of them was in training mode."""
        self._has_other_inputs = False
        """They were given something else, too."""
        self._loops_at: dict[Share | None, Handed] = {}
        """The batches at which loops were then, the newest of each share."""
        self._differentiated: set[Handed] = set()
        """What they were given for the last loss, if that is known."""
        self._differentiated_at = 0
        """The newest batch then."""
        self._is_named = False
        """The job said so."""
        self._preloaded: dict[object, set[Share | None]] = {}
        """Shares of passes that are forgotten, none of whose batches was used: the job may have made others of them. By
        `Pass.batches`."""
        self._lost: dict[Share | None, int] = {}
        """Shares of passes that are forgotten, see `Pass.gone`, and where these began."""
        self._trains_since = 0
        """Where the first of the passes began in which a loss was weighted last. What was lost before is not used any
        more."""
        self.has_warned = False
        """Of an evaluation that counts samples twice."""

    # -- loaders and run.accumulate tell

    @contextmanager
    def passing(self, batches: object = None, place: object = None) -> Iterator[Pass]:
        """Note a pass over a loader, as long as that lasts.

        Args:
            batches: equal for passes over the same batches, also if another loader has made them.
            place: of a loader: of its passes only the newest continues; None for a pass beside others.
        """
        self._forget_passes()
        begun = Pass(self._newest, self.losses == 0, batches, place)
        for each in self._passes:
            if place is not None and each.place is place:
                each.close()
            if not each.is_open and each.uses == self.uses:
                begun.follow(each)
            if batches is not None and each.batches == batches:
                # these come again: they were only looked at
                each.is_used = True
        self._preloaded.pop(batches, None)
        self._passes.append(begun)
        try:
            yield begun
            self._hold_evaluations(begun)
        finally:
            begun.uses = self.uses
            begun.close()

    def _forget_passes(self) -> None:
        """Forget passes that are over and of which the job has no batch any more, and the oldest of all others."""
        over = [each for each in self._passes if not each.is_open]
        for each in over:
            each.tidy()
        kept = [each for each in over if each.has_batches() or each is over[-1]][-MOST_PASSES:]
        for each in over:
            if each not in kept:
                lost = each.gone | _shares_of(each.unused())
                self._lost |= dict.fromkeys(lost, each.began_at)
                if each.may_be_preloaded():
                    self._preloaded.setdefault(each.batches, set()).update(lost)
        self._passes = [each for each in self._passes if each.is_open or each in kept]

    def hand_out(self, passing: Pass, share: Share | None, samples: Samples) -> Samples:
        """Note a batch, and return it."""
        self._hold_evaluations(passing)
        self._newest += 1
        passing.hand_out(Handed(self._newest, share, samples, passing))
        return samples

    def _hold_evaluations(self, passing: Pass) -> None:
        """Note that a loop continues, or ends, in front of evaluations that have begun in its body.

        Raises:
            UserError: a meter may have taken the number of samples of such an evaluation for that of this loop's batch.
        """
        last = passing.trained
        if last is None:
            return
        for each in self._passes:
            evaluated = each.current
            if evaluated is None or evaluated.trains or evaluated.number < last.number or each.is_held:
                continue
            each.is_held = True
            if each.was_measured and _total(evaluated.share) != _total(last.share):
                raise _unclear_count({evaluated.share, last.share})

    @contextmanager
    def splitting(self, batch: Any) -> Iterator[Split]:
        """Note that a batch is being split, as long as that lasts."""
        split = Split([each for each in self._holding(batch) if each.share is not None], self._newest)
        self._splits.append(split)
        try:
            yield split
        finally:
            self._splits.remove(split)

    def check_innermost(self, split: Split) -> None:
        """
        Raises:
            UserError: micro-batches of two batches alternate.
        """
        if self._splits[-1] is not split:
            raise UserError(
                "run.accumulate: two loops over it alternate, as in zip: split both batches at once, as in"
                " run.accumulate((a, b), parts)"
            )

    def check_exchanged(self) -> None:
        """
        Raises:
            UserError: ranks have not exchanged their gradients.
        """
        if not all(split.is_at_last for split in self._splits):
            raise UserError(
                "run.accumulate: a step of the optimizer before the last micro-batch, with which ranks exchange their"
                " gradients: call run.update after the loop; if you have left the loop, close its iterator"
            )

    # -- models tell

    def note_inputs(self, model: nn.Module, inputs: Any) -> None:
        """Note what a model is given."""
        self.uses += 1
        leaves = leaves_of(inputs)
        try:
            found = {owner for leaf in leaves for owner in self._owners(leaf)}
        except RuntimeError:
            # such as tensors within torch.func
            found = set()
        at = found or self._at()
        for each in at:
            each.give()
        if not torch.is_grad_enabled():
            return
        for each in found:
            self._inputs[each] = model.training or self._inputs.get(each, False)
        # another model's outputs tell nothing
        if not found and not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            self._has_other_inputs = True
            if model.training:
                self._loops_at |= {each.share: each for each in at}
        if len(self._inputs) > MOST_INPUTS:
            self._inputs, self._has_other_inputs = {}, True

    def _at(self) -> set[Handed]:
        """Return the batches at which the loops are: of an evaluation, or of the training."""
        current = [each.current for each in self._passes if each.current is not None]
        newest = max(current, key=lambda each: each.number, default=None)
        if newest is None or not newest.trains:
            return {newest} if newest is not None else set()
        return {each for each in current if each.trains}

    def _forget_inputs(self) -> None:
        self._inputs, self._has_other_inputs, self._loops_at = {}, False, {}

    # -- what a loss is the mean of

    def weight(self, batch: Any = None) -> float:
        """Return by what the gradient of a loss is multiplied.

        Args:
            batch: any of its tensors, or a nest of them; None for what the models were given, or the batch of the loop.

        Raises:
            UserError: it cannot be known, or this batch is not one of a loader.
        """
        if loops := [each.began_at for each in self._passes if each.trained is not None]:
            self._trains_since = min(loops)
        self.uses += 1
        self.losses += 1
        if batch is None:
            shares, part = self._of_loss()
            self._forget_inputs()
        else:
            shares, part = self._of_named(batch)
        if len({*map(self._kind, shares)}) > 1:
            raise UserError(
                f"run.backward: several batches may be meant ({_said(shares)}); name the one that the loss is the mean"
                " of, as in run.backward(loss, images), and evaluate with run.shard or under torch.no_grad()"
                + "; for data of your own, call loss.backward()"
                * (None in shares)
            )
        share = shares.pop()
        return part if share is None else part * share.weight(self._world_size)

    def _kind(self, share: Share | None) -> int:
        """Return a number that is the same for shares whose weights are the same on all ranks: if several batches may
        be meant, all ranks say so."""
        return 0 if share is None or share.total % self._world_size == 0 else share.total

    def samples(self, value: Any = None) -> float | None:
        """Return how many of its own samples this rank has in the batch of the loop; None if there is no such loop.

        Args:
            value: their mean. If it can be differentiated, it is that of a batch for training.

        Raises:
            UserError: it cannot be known.
        """
        self.uses += 1
        is_loss = isinstance(value, torch.Tensor) and value.requires_grad
        shares, part = self._measured(is_loss)
        if len({*map(_total, shares)}) > 1:
            raise _unclear_count(shares)
        share = shares.pop() if shares else None
        return None if share is None else share.count * part

    def _measured(self, is_loss: bool) -> tuple[set[Share | None], float]:
        """Return the shares of what a meter measures, in an evaluation within the training's loop too, and the part of
        each."""
        current = [each.current for each in self._passes if each.current is not None]
        newest = max(current, key=lambda each: each.number, default=None)
        if newest is not None and newest.share is None:
            return {None}, 1.0
        begun = [each.number for each in current if each.trains] + [each.newest for each in self._splits]
        evaluated = [each for each in current if not each.trains and each.number > max(begun, default=0)]
        is_held = any(each.of.is_held for each in evaluated)
        if is_loss or is_held or not evaluated or torch.is_grad_enabled():
            if self._has_just_differentiated() and not self._inputs:
                return self._of(self._differentiated)
            meant, gone, part = self._in_hand("meter.add")
            if meant:
                others = evaluated if is_held and not is_loss else []
                return _shares_of([*meant, *others, *self._given()]) | gone, part
        self._use(evaluated)
        for each in evaluated:
            each.of.was_measured = True
        return _shares_of(evaluated), 1.0

    def _given(self) -> list[Handed]:
        """Return what the models were given last, unless it is there as the variable of a loop only."""
        given = self._inputs or self._differentiated
        return [each for each in given if each.is_kept()]

    def _of_loss(self) -> tuple[set[Share | None], float]:
        """Return the shares of what a loss may be the mean of, and the part of each."""
        inputs = {each for each, has_trained in self._inputs.items() if has_trained and each.is_in_hand()}
        # what a model evaluated may be there as the variable of that loop
        inputs |= {each for each in self._inputs if each.is_kept()}
        if not self._has_other_inputs:
            if inputs:
                self._differentiated, self._differentiated_at, self._is_named = inputs, self._newest, False
                return self._of(inputs)
            if not self._inputs and not self._is_named and self._has_just_differentiated():
                # another loss of the same outputs
                return self._of(self._differentiated)
        meant, gone, part = self._in_hand("run.backward")
        others = gone if meant else self._outside_of_loops()
        if any(each.is_open and each.runs_ahead for each in self._passes):
            # a model was given one that a loop has left, and another model something else
            inputs |= {each for each in self._differentiated if each.is_in_hand()}
        self._differentiated = set()
        return _shares_of([*meant, *inputs, *self._loops_at.values()]) | others, part

    def _has_just_differentiated(self) -> bool:
        """Return whether the batch of the last loss is known, and none was fetched since."""
        return bool(self._differentiated) and self._differentiated_at == self._newest

    def _of_named(self, batch: Any) -> tuple[set[Share | None], float]:
        """
        Raises:
            UserError: it is not one of a loader.
        """
        meant = self._holding(batch)
        if not meant:
            raise UserError(
                "run.backward(loss, batch): no tensor of this batch is as run.loader has given it: name the batch"
                " before it is changed, or any tensor that came with it"
            )
        rest = {each: has_trained for each, has_trained in self._inputs.items() if each not in meant}
        self._forget_inputs()
        self._inputs = rest
        self._differentiated, self._differentiated_at, self._is_named = meant, self._newest, True
        return self._of(meant)

    def _of(self, meant: Collection[Handed]) -> tuple[set[Share | None], float]:
        """Return the shares of batches that are certain, and the part of each.

        Raises:
            UserError: one of them is being split, and another one is not, or into other parts.
        """
        for each in meant:
            each.use()
        parts = {next((split.part for split in self._splits if each in split.handed), 1.0) for each in meant}
        if len(parts) > 1:
            raise _fetched_within("run.backward")
        return _shares_of(meant), parts.pop()

    def _in_hand(self, call: str) -> tuple[Collection[Handed], set[Share | None], float]:
        """Return the batches of the loop if none is certain, shares of others that may be meant, and the part of each.

        Raises:
            UserError: it may be a micro-batch or another batch.
        """
        is_loss, part = call == "run.backward", 1.0
        meant = self._in_loops([*self._loops_at.values()] if is_loss else [])
        gone = self._gone(is_loss)
        if self._splits:
            split = self._splits[-1]
            if any(each.number > split.newest for each in meant):
                raise _fetched_within(call)
            part = split.part
            if split.handed:
                meant, gone = split.handed, set()
        self._use(meant)
        return meant, gone, part

    def _use(self, meant: Collection[Handed]) -> None:
        for each in meant:
            each.may_be_used = True
            if len(meant) == 1:
                each.use()

    def _holding(self, batch: Any) -> set[Handed]:
        """Return the batches that tensors belong to."""
        return {owner for leaf in leaves_of(batch) for owner in self._owners(leaf) or self._searched(leaf)}

    def _owners(self, leaf: Any) -> list[Handed]:
        """Return the batches that something is a part of, unless it is a part of all. A dataset may hand out the same
        one again and again: the loops are at that batch then, or have handed it out last."""
        place = place_of(leaf)
        current = [each.current for each in self._passes if each.current is not None]
        return [each for each in current if each.holds(leaf, place)] or _newest(
            each.find(leaf, place) for each in self._passes
        )

    def _searched(self, leaf: Any) -> list[Handed]:
        """Return the same, also of what is a part of all, and of an array of which the leaf shares the end only."""
        current = [each.last for each in self._passes if each.last is not None and each.is_at(leaf)]
        return current or _newest(each.search(leaf) for each in self._passes)

    def _in_loops(self, loops_at: Collection[Handed] = ()) -> list[Handed]:
        """Return the batches at which loops over loaders are, and others that the job has fetched and not used: ahead
        of their use, or into a list.

        Args:
            loops_at: where the loops were when the models were given something.
        """
        found = [each.trained for each in self._passes if each.trained is not None]
        if not found:
            return []
        found = [*loops_at] or found
        for each in self._passes:
            if each.is_open or each.keeps_unused():
                found += each.unused()
        return found

    def _gone(self, of_loss: bool) -> set[Share | None]:
        """Return the shares of batches that the job has fetched and not used, and may have in another form: ahead of
        their use, or into a list."""
        gone = {share for each in self._passes if each.is_open and each.runs_ahead for share in each.gone}
        if of_loss:
            gone.update(*self._preloaded.values())
            gone.update(*(each.gone for each in self._passes if each.may_be_preloaded()))
        return gone

    def _outside_of_loops(self) -> set[Share | None]:
        """Return the shares of the batches that the job has kept. If it has kept none, the loss may be that of data of
        its own, of which all ranks have as many (None), or of the variable of a loop. It may always be that of a batch
        that was fetched and not used, in another form."""
        kept: set[Share | None] = set()
        others: set[Share | None] = {None}
        lost = {share for share, began_at in self._lost.items() if began_at >= self._trains_since}
        for passing in self._passes:
            if passing.began_at >= self._trains_since:
                passing.tidy()
                lost |= passing.gone
            if passing.current is not None:
                others.add(passing.current.share)
            elif passing.is_kept():
                kept |= passing.shares_alive()
            else:
                others |= passing.shares_alive()
        return (kept or others) | lost


def _newest(found: Iterable[Handed | None]) -> list[Handed]:
    return sorted((each for each in found if each is not None), key=lambda each: each.number)[-1:]


def _shares_of(meant: Iterable[Handed]) -> set[Share | None]:
    return {each.share for each in meant}


def _total(share: Share | None) -> int | None:
    return None if share is None else share.total


def _fetched_within(call: str) -> UserError:
    return UserError(
        f"{call}: a batch was fetched within a loop over run.accumulate, or that loop was left and its iterator kept:"
        " name the batch, as in run.backward(loss, images), or close the iterator"
    )


def _unclear_count(shares: Collection[Share | None]) -> UserError:
    return UserError(
        f"meter.add: several batches may be meant ({_said(shares)}); specify the number of samples as `count`"
    )


def _said(shares: Collection[Share | None]) -> str:
    """Return the batches that may be meant, in words."""
    batches = sorted(f"one of which this rank has {each.count} of {each.total} samples" for each in shares if each)
    return " or ".join(batches + ["data of your own"] * (None in shares))
