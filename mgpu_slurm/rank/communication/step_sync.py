"""Find the boundary at which all ranks act: only on request, so that other steps cost no message.

A rank with a request rings, and waits for the answer. A thread of every rank then reports the rank's requests and the
number of boundaries it has passed, and holds the rank at the next boundary until all ranks have reported. All ranks act
at the first boundary that none of them has passed; that is the current one if all made the same request there. Ranks
that are behind continue to it, so that no rank waits in a collective for a rank that is held.

The same reports show whether ranks have diverged: one has made a `Call` that another has skipped.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from mgpu_slurm.core import torch_versions
from mgpu_slurm.core.errors import CollectiveMismatch, MgpuError, UserError
from mgpu_slurm.rank import crash
from mgpu_slurm.rank.communication import rendezvous
from mgpu_slurm.rank.signals import Stop

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from mgpu_slurm.rank.rank_info import RankInfo

# -- which call a rank makes, and what it requests


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
    PASS = 9
    END = 10
    MEMORY = 11
    MEASURE = 12

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
            Call.PASS: "the start of a pass over a stream or a sampler",
            Call.END: "the end of a stream",
            Call.MEMORY: "an exchange in run.gradients()",
            Call.MEASURE: "the last step that is measured",
        }[self]


@dataclass(frozen=True)
class Agreed:
    """The common decision of the ranks: the strongest request of any of them."""

    stop: Stop = Stop.NO
    save: bool = False
    failed: bool = False
    """Whether any rank could not do its part of the previous call."""


def different_calls(made: Iterable[tuple[int, Call]]) -> MgpuError:
    """Return the error for ranks that make different calls: a UserError if a stream has ended on some ranks only.

    Args:
        made: ranks and their calls; of many ranks at the same call, the first and the last are enough.
    """
    error: type[MgpuError]
    ranks_at: dict[Call, list[int]] = defaultdict(list)
    for rank, call in made:
        ranks_at[call].append(rank)
    parts = [
        f"{_ranks(ranks)} at {call.words}" for call, ranks in sorted(ranks_at.items(), key=lambda each: min(each[1]))
    ]
    error, every = CollectiveMismatch, "Every"
    if Call.END in ranks_at:
        error, every = UserError, "A stream must yield all of its samples in the same order on each rank, and every"
    return error(
        f"the ranks make different calls: {', '.join(parts)}. {every} rank must make these calls: "
        "move them out of `if run.is_main:`"
    )


def _ranks(ranks: list[int]) -> str:
    """Return ranks in words; several ranks as the first and the last."""
    low, high = min(ranks), max(ranks)
    return f"rank {low}" if low == high else f"ranks {low} to {high}"


FOREVER = timedelta(days=7)
"""Time-out of the wait for a bell; when it expires, torch's store warns, and the wait begins again."""

CLOSE_SECONDS = 1.0
"""Seconds to wait for the thread to end, and for the last answer when ranks exit."""

LOOK_SECONDS = 2.0
"""Seconds to wait for an answer, between checks whether all ranks are still there."""

RING, CLOSE, GONE = "ring", "close", "gone"


class Place(NamedTuple):
    """A rank's place in the sequence of calls and boundaries."""

    calls: int
    """Number of calls common to all ranks that this rank has begun."""
    passed: int
    """Number of boundaries that this rank has passed."""
    at: Call
    """The rank's current call; a step if it is in no other call."""
    has_batch: bool = False
    """Whether it has taken a batch of a stream since the last boundary; the stream may end there instead."""

    @property
    def reached(self) -> tuple[int, bool]:
        return self.passed, self.has_batch


@dataclass(frozen=True)
class Answer:
    """What all ranks do, and at which boundary; sent as JSON."""

    boundary: int
    stop: Stop
    save: bool
    lost: list[tuple[int, Call]]
    """If the ranks have diverged: all ranks and their calls."""

    @staticmethod
    def from_text(text: str) -> Answer:
        said = json.loads(text)
        lost = [(rank, Call(call)) for rank, call in said["lost"]]
        return Answer(said["boundary"], Stop(said["stop"]), said["save"], lost)

    def to_text(self) -> str:
        return json.dumps(asdict(self))


class StepSync:
    """One rank's part in finding the boundary at which all ranks act."""

    def __init__(self, facts: RankInfo, store: Store) -> None:
        self._rank = facts.rank
        self._world_size = facts.world_size
        self._store = store
        self._waiting_store = torch_versions.waiting_client(store)
        self._changed = threading.Condition()
        self._round = 0
        self._rung = -1
        self._is_held = False
        self._is_deaf = False
        """Whether the other ranks can no longer be reached."""
        self._closed = threading.Event()
        self._request = Agreed()
        self._place = Place(0, 0, Call.STEP)
        self._due: list[tuple[int, Agreed]] = []
        """Pending agreements, each with the boundary at which it is carried out."""
        self._stop = Stop.NO
        """The strongest stop agreed so far."""
        self._lost: list[tuple[int, Call]] = []
        """All ranks and their calls, once they have diverged."""
        self._thread = crash.guarded_thread(self._listen, "boundaries")

    # -- the training thread

    def pass_one(self, request: Agreed) -> Agreed:
        """Pass a boundary, and return what all ranks do there.

        Raises:
            CollectiveMismatch: the ranks have diverged.
        """
        while True:
            with self._changed:
                self._await(lambda: not self._is_held)
                self.check()
                self._request = self._not_agreed_yet(request)
                if self._request == Agreed() or self._is_deaf:
                    return self._pass()
                turn = self._round
            # ring before passing, so that the ranks act here if no other rank has passed
            self.ring()
            self._wait_for_answer(turn)

    def _wait_for_answer(self, turn: int) -> None:
        with self._changed:
            self._await(lambda: self._round > turn)

    def _await(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition, as long as the other ranks can be reached."""
        while not (condition() or self._is_deaf):
            if not self._changed.wait(LOOK_SECONDS) and self._store.check([GONE]):
                self._is_deaf = True

    def _not_agreed_yet(self, request: Agreed) -> Agreed:
        stop = request.stop if request.stop > self._stop else Stop.NO
        return Agreed(stop, request.save and not any(due.save for _, due in self._due))

    def _pass(self) -> Agreed:
        self._place = self._place._replace(passed=self._place.passed + 1, has_batch=False)
        agreed = Agreed()
        while self._due and self._due[0][0] <= self._place.passed:
            _, due = self._due.pop(0)
            agreed = Agreed(max(agreed.stop, due.stop), agreed.save or due.save)
        return agreed

    @property
    def passed(self) -> int:
        return self._place.passed

    def begin(self, call: Call, stop: Stop) -> None:
        """Note that this rank begins a call that all ranks make."""
        with self._changed:
            self._request = Agreed(stop)
            self._place = self._place._replace(calls=self._place.calls + 1, at=call)

    def take_batch(self) -> None:
        """Note that the stream did not end at the last boundary."""
        with self._changed:
            self._place = self._place._replace(has_batch=True)

    def end(self, stop: Stop) -> None:
        """Note that the call has returned.

        Args:
            stop: the stop that all ranks agreed on in the call.
        """
        with self._changed:
            self._stop = max(self._stop, stop)
            self._place = self._place._replace(at=Call.STEP)

    def ring(self) -> None:
        """Ask all ranks to report their places and requests; return without waiting."""
        turn = self._round
        if self._rung == turn:
            return
        self._rung = turn
        if self._store.add(f"rung/{turn}", 1) == 1:
            self._tell_all(self._store, f"bell/{turn}", RING)

    def check(self) -> None:
        """Raise an error if the ranks have diverged.

        Raises:
            CollectiveMismatch: the ranks make different calls.
            UserError: the same, at the end of a stream.
        """
        if self._lost:
            raise different_calls(self._lost)

    def settle(self) -> None:
        """Wait up to `CLOSE_SECONDS` for the answer to a round in progress."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held, CLOSE_SECONDS)

    def close(self) -> None:
        """End the thread; if it still waited in C++ at interpreter shutdown, it would abort the process."""
        self._closed.set()
        with suppress(RuntimeError):  # the store may have gone
            for what in ("bell", "answer"):
                self._store.set(f"{what}/{self._round}/{self._rank}", CLOSE)
        self._thread.join(CLOSE_SECONDS)

    # -- the background thread

    def _listen(self) -> None:
        try:
            while self._heard("bell") == RING:
                self._answer()
        except RuntimeError:
            # the attempt ends if the store is gone; but a rank that has lost only its connection would continue to
            # train and miss every save and stop
            if not self._closed.wait(CLOSE_SECONDS) and rendezvous.is_served():
                raise
        finally:
            with self._changed:
                self._is_held, self._is_deaf = False, True
                self._changed.notify_all()
            with suppress(RuntimeError):
                # a rank that rings now would wait forever
                self._store.set(GONE, str(self._rank))

    def _answer(self) -> None:
        turn = self._round
        with self._changed:
            self._is_held = True
            own = [self._request.stop, self._request.save, *self._place]
        self._waiting_store.set(f"place/{turn}/{self._rank}", json.dumps(own))
        if self._waiting_store.add(f"places/{turn}", 1) == self._world_size:
            keys = [f"place/{turn}/{rank}" for rank in range(self._world_size)]
            places = [json.loads(self._waiting_store.get(key)) for key in keys]
            self._tell_all(self._waiting_store, f"answer/{turn}", _answer_to(places).to_text())
        text = self._heard("answer")
        if text == CLOSE:
            return
        for what in ("bell", "place", "answer"):
            self._waiting_store.delete_key(f"{what}/{turn}/{self._rank}")
        answer = Answer.from_text(text)
        with self._changed:
            self._round = turn + 1
            self._is_held = False
            agreed = Agreed(answer.stop, answer.save)
            if agreed != Agreed():
                self._due.append((answer.boundary, agreed))
            self._stop = max(self._stop, agreed.stop)
            self._lost = answer.lost
            self._changed.notify_all()

    def _heard(self, what: str) -> str:
        """Wait for this rank's message of the current round, and return it."""
        from torch.distributed import DistStoreError

        key = f"{what}/{self._round}/{self._rank}"
        while not self._closed.is_set():
            with suppress(DistStoreError):
                self._waiting_store.wait([key], FOREVER)
                return str(self._waiting_store.get(key), "ascii")
        return CLOSE

    def _tell_all(self, store: Store, what: str, text: str) -> None:
        for rank in range(self._world_size):
            store.set(f"{what}/{rank}", text)


def _answer_to(said: Sequence[Sequence[Any]]) -> Answer:
    """Return the answer to the reports of all ranks.

    Args:
        said: the report of each rank: the requested stop and save, and its place.
    """
    places = [Place(*each[2:]) for each in said]
    return Answer(
        boundary=max(place.passed for place in places) + 1,
        stop=Stop(max(each[0] for each in said)),
        save=any(each[1] for each in said),
        lost=[(rank, place.at) for rank, place in enumerate(places)] if have_diverged(places) else [],
    )


def have_diverged(places: Sequence[Place]) -> bool:
    """Return whether a rank has made a call at a boundary that another rank has passed without making it."""
    reached = (-1, False)
    for place in sorted(places, key=lambda place: (place.calls, place.reached)):
        if place.reached < reached:
            return True
        reached = place.reached
    return False
