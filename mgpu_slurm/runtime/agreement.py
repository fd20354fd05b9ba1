"""How ranks agree: whether to stop, whether to save, and that they all make the same call.

Each call that all ranks have to make sends one small message of one form over a gloo group of its own. As all messages
have the same form, ranks that make different calls still complete each other's message, read that they differ, and say
which rank called what, where other tools hang until the time-out. Between these calls `boundaries` has them agree.
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from mgpu_slurm.errors import CollectiveMismatch, MgpuError
from mgpu_slurm.runtime.boundaries import Boundaries
from mgpu_slurm.runtime.calls import Agreed, Call, different_calls
from mgpu_slurm.runtime.rendezvous import collective_timeout
from mgpu_slurm.runtime.stopping import Stop
from mgpu_slurm.runtime.tally import Tally

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from mgpu_slurm.runtime.facts import RankFacts

T = TypeVar("T")

LOOKS = (1.0, 1.0, 8.0, 50.0)
"""Seconds for which a rank waits for the others in a call, between looks at where they are."""

# A message, reduced by MAX: stop, save, failed, the boundaries passed with the rank, the same negative, then per call
# the highest rank that made it and the highest -rank.
_STOP, _SAVE, _FAILED, _MOST, _LEAST, _CALLS = 0, 1, 2, 3, 4, 5
_RANKS = 2**24
_NOBODY = -(2**31)


class Agreement:
    """The message channel of one rank; a world of one needs no messages."""

    def __init__(self, facts: RankFacts) -> None:
        self._facts = facts
        self._group: dist.ProcessGroup | None = None
        self._store: Store = HashStore()
        self._boundaries: Boundaries | None = None
        self._tallies = 0
        if facts.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=collective_timeout())
            self._store = dist.distributed_c10d._get_default_store()
            self._store = PrefixStore(f"mgpu_slurm {self._group.group_name}", self._store)
            self._boundaries = Boundaries(facts, self._store)

    def step(self, wish: Agreed) -> Agreed:
        """At a boundary: returns what all ranks do at this one. Costs a message only where somebody wishes something;
        that is done here, or at the first boundary that no rank has passed."""
        return wish if self._boundaries is None else self._boundaries.pass_one(wish)

    def together(self, call: Call, wish: Agreed) -> Agreed:
        """Makes sure that all ranks make this call now, and returns what they agreed.

        Raises:
            CollectiveMismatch: some ranks called something else; the message says who called what.
        """
        if self._boundaries is None:
            return wish
        self._boundaries.begin(call, wish.stop)
        answer = self._exchanged(call, wish, self._boundaries)
        _check_same_call(answer)
        _check_same_place(answer)
        agreed = Agreed(Stop(answer[_STOP]), bool(answer[_SAVE]), bool(answer[_FAILED]))
        self._boundaries.end(agreed.stop)
        return agreed

    def tally(self) -> Tally:
        """One for each run; every rank makes it."""
        self._tallies += 1
        return Tally(PrefixStore(f"saves {self._tallies}", self._store), self._facts.world_size)

    def close(self) -> None:
        if self._boundaries is not None:
            self._boundaries.close()

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

    def _exchanged(self, call: Call, wish: Agreed, boundaries: Boundaries) -> list[int]:
        rank, passed = self._facts.rank, boundaries.passed
        message = [int(wish.stop), int(wish.save), int(wish.failed), passed * _RANKS + rank, -passed * _RANKS + rank]
        message += [_NOBODY] * (2 * len(Call))
        message[_CALLS + 2 * call] = rank
        message[_CALLS + 2 * call + 1] = -rank
        tensor = torch.tensor(message, dtype=torch.int64)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        try:
            self._wait(work, call, boundaries)
        except CollectiveMismatch:
            # never to be destroyed: it would wait for the others to answer this message
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
            raise
        except RuntimeError:
            # the others may have left because of it
            boundaries.settle()
            boundaries.check()
            raise
        return cast("list[int]", tensor.tolist())

    def _wait(self, work: dist.Work, call: Call, boundaries: Boundaries) -> None:
        for seconds in LOOKS:
            if _is_done_within(work, seconds):
                return
            # who does not come may have gone past this call, and wait for this rank elsewhere
            boundaries.check()
            boundaries.ring()
        self._say_who_waits(call)
        work.wait()

    def _say_who_waits(self, call: Call) -> None:
        print(
            f"mgpu_slurm: rank {self._facts.rank} has waited {sum(LOOKS):.0f} s at {call.words} for the other ranks;"
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


def _is_done_within(work: dist.Work, seconds: float) -> bool:
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        # it failed, or came at the last moment
        work.wait()
    return True


def _check_same_call(answer: list[int]) -> None:
    made = [call for call in Call if answer[_CALLS + 2 * call] != _NOBODY]
    if len(made) > 1:
        ends = [((-answer[_CALLS + 2 * call + 1], call), (answer[_CALLS + 2 * call], call)) for call in made]
        raise different_calls(itertools.chain(*ends))


def _check_same_place(answer: list[int]) -> None:
    most, who_most = divmod(answer[_MOST], _RANKS)
    least, who_least = divmod(answer[_LEAST], _RANKS)
    if most != -least:
        raise CollectiveMismatch(
            f"rank {who_most} has taken {most + least} batches of run.loader more than rank {who_least}: every rank has"
            " to take as many, also where only one of them needs what comes of it"
        )
