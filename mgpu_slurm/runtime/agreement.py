"""How ranks agree: whether to stop, whether to save, and that they all make the same call.

Each call that all ranks have to make sends one small message of one form over a gloo group of its own. As all messages
have the same form, ranks that make different calls still complete each other's message, read that they differ, and say
which rank called what, where other tools hang until the time-out.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from mgpu_slurm.errors import CollectiveMismatch, MgpuError
from mgpu_slurm.patience import saying_so_after
from mgpu_slurm.runtime.rendezvous import collective_timeout
from mgpu_slurm.runtime.stopping import Stop

if TYPE_CHECKING:
    from mgpu_slurm.runtime.facts import RankFacts

T = TypeVar("T")

SLOW_CALL_SECONDS = 60


class Call(IntEnum):
    """The calls that every rank makes."""

    STEP = 0
    REPORT = 1
    MEAN = 2
    RESTORE = 3
    EPOCH = 4
    SAVE = 5
    SHARD = 6
    FINISH = 7
    TRIAL = 8

    @property
    def words(self) -> str:
        return {
            Call.STEP: "the next batch of a loader",
            Call.REPORT: "run.report()",
            Call.MEAN: "run.mean()",
            Call.RESTORE: "run.restore()",
            Call.EPOCH: "the end of an epoch",
            Call.SAVE: "writing a checkpoint",
            Call.SHARD: "the start of a pass over run.shard()",
            Call.FINISH: "the end of the job function",
            Call.TRIAL: "the next trial",
        }[self]


@dataclass(frozen=True)
class Agreed:
    """What the ranks decided together: the strongest wish of any of them."""

    stop: Stop = Stop.NO
    save: bool = False
    failed: bool = False
    """Some rank could not do its part of the call before this one."""
    written: int = 0
    """The number of the last save that all ranks are done with."""
    lost: int = 0
    """The number of the last save that some rank could not write."""


# A message, reduced by MAX: stop, save, failed, -written, lost, then per call the highest rank that made it and the
# highest -rank.
_STOP, _SAVE, _FAILED, _WRITTEN, _LOST, _CALLS = 0, 1, 2, 3, 4, 5
_NOBODY = -(2**31)
_LENGTH = _CALLS + 2 * len(Call)


class Agreement:
    """The message channel of one rank; a world of one needs no messages."""

    def __init__(self, facts: RankFacts) -> None:
        self._facts = facts
        self._group = dist.new_group(backend="gloo", timeout=collective_timeout()) if facts.world_size > 1 else None
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def step(self, wish: Agreed) -> Agreed:
        """At a step boundary: sends this rank's wish without waiting and returns what was agreed a boundary ago.

        The message travels while the step computes, so it costs the step tens of microseconds, and all ranks read the
        same answer at the same boundary.
        """
        if self._group is None:
            return wish
        agreed = self._collect()
        # a save that is about to happen is not asked for again
        self._send(Call.STEP, replace(wish, save=wish.save and not agreed.save))
        return agreed

    def together(self, call: Call, wish: Agreed) -> Agreed:
        """Makes sure that all ranks make this call now, and returns what they agreed.

        Raises:
            CollectiveMismatch: some ranks called something else; the message says who called what.
        """
        if self._group is None:
            return wish
        before = self._collect()
        self._send(call, wish)
        with saying_so_after(SLOW_CALL_SECONDS, lambda: self._say_who_waits(call)):
            agreed = self._collect()
        return Agreed(
            stop=max(before.stop, agreed.stop),
            save=before.save or agreed.save,
            failed=before.failed or agreed.failed,
            written=agreed.written,
            lost=agreed.lost,
        )

    def total(self, values: list[float]) -> list[float]:
        """The sum of each value over the ranks, in double precision; comes after `together`."""
        if self._group is None:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self._group)
        return [float(value) for value in tensor]

    def told(self, find: Callable[[], T]) -> T:
        """What rank 0 finds out, on every rank; where that fails, the error.

        It travels pickled, so that numbers stay what they are; comes after `together`.
        """
        if self._group is None:
            return find()
        answer: list[Any] = [None, None]
        if self._facts.rank == 0:
            try:
                answer[0] = find()
            except (Exception, SystemExit) as error:
                answer[1] = _portable(error)
        dist.broadcast_object_list(answer, src=0, group=self._group, device=torch.device("cpu"))
        found, failure = answer
        if failure is not None:
            raise failure
        return cast(T, found)

    def _send(self, call: Call, wish: Agreed) -> None:
        message = [int(wish.stop), int(wish.save), int(wish.failed), -wish.written, wish.lost]
        message += [_NOBODY] * (2 * len(Call))
        message[_CALLS + 2 * call] = self._facts.rank
        message[_CALLS + 2 * call + 1] = -self._facts.rank
        tensor = torch.tensor(message, dtype=torch.int64)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._pending = work, tensor

    def _collect(self) -> Agreed:
        """The answer to the message on its way, or nothing agreed where none is."""
        if self._pending is None:
            return Agreed()
        work, tensor = self._pending
        self._pending = None
        work.wait()
        answer = tensor.tolist()
        _check_same_call(answer)
        return Agreed(Stop(answer[_STOP]), bool(answer[_SAVE]), bool(answer[_FAILED]), -answer[_WRITTEN], answer[_LOST])

    def _say_who_waits(self, call: Call) -> None:
        print(
            f"mgpu_slurm: rank {self._facts.rank} has waited {SLOW_CALL_SECONDS} s at {call.words} for the other ranks;"
            " every rank has to make that call",
            flush=True,
        )


def _portable(error: BaseException) -> BaseException:
    """The error, or what it says where it cannot be sent to other processes."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return MgpuError(f"{type(error).__name__}: {error}")
    return error


def _check_same_call(answer: list[int]) -> None:
    made = [call for call in Call if answer[_CALLS + 2 * call] != _NOBODY]
    if len(made) == 1:
        return
    parts = []
    for call in made:
        highest, lowest = answer[_CALLS + 2 * call], -answer[_CALLS + 2 * call + 1]
        who = f"rank {lowest}" if lowest == highest else f"ranks {lowest} to {highest}"
        parts.append(f"{who} at {call.words}")
    raise CollectiveMismatch(
        f"the ranks make different calls: {', '.join(parts)}. Every rank has to make these calls: "
        "move what only some make out of its `if`, such as `if run.is_main:`"
    )
