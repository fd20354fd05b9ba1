"""Agreement between ranks: whether to stop, whether to save, and that they all make the same call.

Each call that all ranks have to make sends one small message of a fixed format over a separate `ControlGroup`. Because
the format is fixed, ranks that make different calls still complete each other's message. They detect the difference and
report which rank made which call, instead of hanging until the time-out. Between these calls `step_sync` has the ranks
agree.

`SaveBarrier` tracks which ranks have finished a save, through the store of their attempt, so that no step costs a
message.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from mgpu_slurm.core import log_lines
from mgpu_slurm.core.errors import (
    ClusterError,
    CollectiveMismatch,
    MgpuError,
    NoStudy,
    RunFailed,
    TrialPruned,
    UserError,
)
from mgpu_slurm.rank.communication import codec
from mgpu_slurm.rank.communication.control_group import ControlGroup, Exchange
from mgpu_slurm.rank.communication.rendezvous import collective_timeout
from mgpu_slurm.rank.communication.signed_store import signed
from mgpu_slurm.rank.communication.step_sync import Agreed, Call, StepSync, different_calls
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.rank.torch_adapter import default_store

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch._C._distributed_c10d import Store

    from mgpu_slurm.rank.rank_info import RankInfo


T = TypeVar("T")

LOOKS = (1.0, 1.0, 8.0, 50.0)
"""Seconds for which a rank waits for the others in a call, between checks of where they are."""

_ERRORS = (MgpuError, UserError, NoStudy, ClusterError, RunFailed, TrialPruned)
"""Errors that keep their type on the ranks that receive them."""

_WRITTEN, _LOST = "written", "lost"
"""How a rank's part of a save has ended."""

VALUES = 14
"""Largest number of values in a rank's row of a message."""

_ROW = np.dtype(
    [("stop", "i1"), ("save", "?"), ("failed", "?"), ("passed", "<i8"), ("call", "i1"), ("values", "<f8", VALUES)]
)
"""A rank's row of the exchange; `passed` is its number of boundaries."""

_numbers = itertools.count()
"""Numbers of this process's `Collectives`, which all ranks create in the same order."""


class Collectives:
    """One rank's channel to the other ranks; a world of one needs no messages."""

    def __init__(self, facts: RankInfo, errors: Iterable[type[BaseException]] = ()) -> None:
        """
        Args:
            errors: Errors that keep their type on the ranks that receive them, in addition to the package's own;
                each is created from a message.
        """
        self._facts = facts
        self._errors = {error.__name__: error for error in (*_ERRORS, *errors)}
        self._group: ControlGroup | None = None
        self._store: Store = HashStore()
        self._step_sync: StepSync | None = None
        self._save_barriers = 0
        if facts.world_size > 1:
            # the default group may have been created by a script
            store = signed(default_store(), facts.rank)
            self._store = PrefixStore(f"mgpu_slurm {next(_numbers)}", store)
            self._group = ControlGroup(facts, self._store, collective_timeout())
            self._rows = Exchange(self._group, _ROW.itemsize)
            self._sent = np.frombuffer(self._rows.own, _ROW)
            self._received = np.frombuffer(self._rows.table, _ROW)
            self._step_sync = StepSync(facts, self._store)

    def step(self, request: Agreed) -> Agreed:
        """Pass a boundary, and return what all ranks do at it.

        This costs a message only if a rank requests something. The request is carried out here, or at the first
        boundary that no rank has passed.
        """
        return request if self._step_sync is None else self._step_sync.pass_one(request)

    def sync(self, call: Call, request: Agreed) -> Agreed:
        """Check that all ranks make this call now, and return what they agreed.

        Raises:
            CollectiveMismatch: some ranks made a different call; the message states which rank made which call.
            UserError: the same, if a stream has ended on some ranks only.
        """
        return self.with_values(call, request, [])[0]

    def with_sums(self, call: Call, request: Agreed, values: list[float]) -> tuple[Agreed, list[float]]:
        """Do what `sync` does, and also return the sums of values over the ranks, in double precision.

        All of this takes one message.
        """
        agreed, columns = self.with_values(call, request, values)
        return agreed, [sum(column) for column in columns]

    def with_values(self, call: Call, request: Agreed, values: list[float]) -> tuple[Agreed, Sequence[Sequence[float]]]:
        """Do what `sync` does, and also return each value from all ranks, in the same message.

        Args:
            values: at most `VALUES`.
        """
        if self._step_sync is None:
            return request, [[value] for value in values]
        self._step_sync.begin(call, request.stop)
        self._exchange(call, request, values, self._step_sync)
        rows = self._received
        _check_same_call(rows["call"])
        if call is not Call.END:
            # at the end of a stream, the caller compares the batches drawn and can name the stream
            _check_same_place(rows["passed"])
        agreed = Agreed(Stop(int(rows["stop"].max())), bool(rows["save"].any()), bool(rows["failed"].any()))
        self._step_sync.end(agreed.stop)
        return agreed, rows["values"].T[: len(values)].tolist()

    def take_batch(self) -> None:
        """Note that this rank has a batch of a stream, so that the stream does not end before the next boundary."""
        if self._step_sync is not None:
            self._step_sync.take_batch()

    def save_barrier(self) -> SaveBarrier:
        """Create the save barrier of a run; every rank has to make this call."""
        self._save_barriers += 1
        return SaveBarrier(
            PrefixStore(f"saves {self._save_barriers}", self._store), self._facts.rank, self._facts.world_size
        )

    def close(self) -> None:
        if self._step_sync is not None:
            self._step_sync.close()

    def total(self, values: list[float]) -> list[float]:
        """Return the sum of each value over the ranks, in double precision and in their order; call it after `sync`."""
        if self._group is None:
            return values
        return [sum(column) for column in self._columns(self._group, "d", values)]

    def differ(self, numbers: Sequence[int]) -> list[bool]:
        """Return for each of these 64-bit integers whether it differs between ranks; call it after `sync`."""
        if self._group is None:
            return [False] * len(numbers)
        return [len(set(column)) > 1 for column in self._columns(self._group, "q", numbers)]

    @staticmethod
    def _columns(group: ControlGroup, code: str, numbers: Sequence[float]) -> list[tuple[Any, ...]]:
        """Return each of these numbers from all ranks.

        Args:
            code: type of the numbers; see `struct`.
        """
        if not numbers:
            return []
        row = struct.Struct(f"<{len(numbers)}{code}")
        return [*zip(*map(row.unpack, group.gather(row.pack(*numbers))), strict=True)]

    def broadcast_from_rank0(self, find: Callable[[], T]) -> T:
        """Return on every rank what `find` returns on rank 0; call it after `sync`.

        The result may contain numbers, strings and collections of them, whose types are kept. If `find` fails, its
        error is raised on every rank. The result is sent as JSON, because a pickle could run any code of its sender.
        """
        if self._group is None:
            return find()
        if self._facts.rank == 0:
            return self._tell(self._group, find)
        said = json.loads(self._group.broadcast(b""))
        if "error" in said:
            raise self._errors[said["error"]](said["message"])
        return cast(T, codec.joined(said["found"], {}))

    def _tell(self, group: ControlGroup, find: Callable[[], T]) -> T:
        """Send the result, or the error, to the other ranks."""
        failure: BaseException | None = None
        try:
            found = find()
            state, tensors = codec.split(found, "what rank 0 tells")
            assert not tensors, found
            said = {"found": state}
        except (Exception, SystemExit) as error:
            failure, said = error, self._in_words(error)
        group.broadcast(json.dumps(said).encode())
        if failure is not None:
            raise failure
        return found

    def _in_words(self, error: BaseException) -> dict[str, str]:
        message = error.reason if isinstance(error, TrialPruned) else str(error)
        name = type(error).__name__
        if self._errors.get(name) is type(error):
            return {"error": name, "message": message}
        return {"error": MgpuError.__name__, "message": f"{name}: {message}"}

    def _exchange(self, call: Call, request: Agreed, values: list[float], step_sync: StepSync) -> None:
        """Fill the table with the rows of all ranks."""
        assert self._group is not None
        # the format is fixed, so that ranks which make different calls complete each other's message
        padded = (*values, *([0.0] * (VALUES - len(values))))
        self._sent[0] = request.stop, request.save, request.failed, step_sync.passed, call, padded
        try:
            for work in self._rows.steps():
                self._wait(work, call, step_sync)
        except MgpuError:
            self._group.keep_open()
            raise
        except RuntimeError:
            # the other ranks may have left because of a mismatch
            step_sync.settle()
            step_sync.check()
            raise

    def _wait(self, work: dist.Work, call: Call, step_sync: StepSync) -> None:
        for seconds in LOOKS:
            if _is_done_within(work, seconds):
                return
            # a missing rank may have passed this call, and wait for this rank elsewhere
            step_sync.check()
            step_sync.ring()
        self._note_wait(call)
        work.wait()

    def _note_wait(self, call: Call) -> None:
        log_lines.say(
            f"rank {self._facts.rank} has waited {sum(LOOKS):.0f} s at {call.words} for the other ranks;"
            " every rank must make that call"
        )


def _is_done_within(work: dist.Work, seconds: float) -> bool:
    with suppress(RuntimeError):
        work.wait(timedelta(seconds=seconds))
        return True
    if not work.is_completed():
        return False
    # it failed, or completed at the last moment; after the `with`, so that its error is shown once
    work.wait()
    return True


def _check_same_call(calls: NDArray[Any]) -> None:
    if (calls != calls[0]).any():
        raise different_calls((rank, Call(call)) for rank, call in enumerate(calls))


def _check_same_place(passed: NDArray[Any]) -> None:
    most, least = passed.argmax(), passed.argmin()
    if passed[most] != passed[least]:
        raise CollectiveMismatch(
            f"rank {most} has taken {passed[most] - passed[least]} more batches of run.loader than rank"
            f" {least}: every rank must take the same number, even if only one of them needs the result"
        )


class SaveBarrier:
    """The saves of one run, by number, and which ranks have finished each.

    Each rank sets a separate value. A counter would be faster to read, but could not be signed.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size

    def done(self, save: int, is_lost: bool) -> None:
        """Note that this rank is done with a save.

        Args:
            is_lost: whether this rank could not write its part.
        """
        self._store.set(f"{save}/{self._rank}", _LOST if is_lost else _WRITTEN)

    def is_over(self, save: int) -> bool:
        """Return whether all ranks are done with a save."""
        return bool(self._store.check(self._keys(save)))

    def is_lost(self, save: int) -> bool:
        """Return whether any rank could not write its part; call it when all ranks are done."""
        return any(self._store.get(key) == _LOST.encode() for key in self._keys(save))

    def forget(self, save: int) -> None:
        """Delete the ranks' values of a save."""
        for key in self._keys(save):
            self._store.delete_key(key)

    def _keys(self, save: int) -> list[str]:
        return [f"{save}/{rank}" for rank in range(self._world_size)]
