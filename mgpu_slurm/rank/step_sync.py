"""The boundary at which all ranks act: found when one of them wants something, so that a step costs no message before.

A rank that wants something rings, and waits for the answer. On every rank a thread says what that rank wishes and how
many boundaries it has passed, and lets it pass no further one until all have said so. They act at the first boundary
that nobody has passed: this one, where all want the same. Who is behind goes on to it, so that nobody waits in a
collective for a rank that is held.

The same answers show where ranks have lost each other: one that has made a call which another has gone past.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from mgpu_slurm.rank import crash, rendezvous
from mgpu_slurm.rank.calls import Agreed, Call, different_calls
from mgpu_slurm.rank.signals import Stop

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from mgpu_slurm.rank.rank_info import RankInfo

FOREVER = timedelta(days=7)
"""That one waits for a bell; torch's store warns when it is over, and it begins anew."""

CLOSE_SECONDS = 1.0
"""For the thread's end, and for the last answer where ranks end."""

LOOK_SECONDS = 2.0
"""For which one waits for an answer, between looks whether all are there to give one."""

RING, CLOSE, GONE = "ring", "close", "gone"


class Place(NamedTuple):
    """Where a rank is."""

    calls: int
    """That all ranks make together, and this one has begun."""
    passed: int
    """StepSync."""
    at: Call
    """What it does now; a step where it is in no other call."""
    has_batch: bool = False
    """Whether it has taken a batch of a stream since the last boundary: the stream may end there instead."""

    @property
    def reached(self) -> tuple[int, bool]:
        return self.passed, self.has_batch


class StepSync:
    """One rank's part in finding the boundary at which all ranks act."""

    def __init__(self, facts: RankInfo, store: Store) -> None:
        self._rank = facts.rank
        self._world_size = facts.world_size
        self._store = store
        # a client that waits lets nobody else ask
        self._waiting_store: Store = store.clone()  # type: ignore[attr-defined]
        self._changed = threading.Condition()
        self._round = 0
        self._rung = -1
        self._is_held = False
        self._is_deaf = False
        """Nobody can be asked any more."""
        self._closed = threading.Event()
        self._wish = Agreed()
        self._place = Place(0, 0, Call.STEP)
        self._due: list[tuple[int, Agreed]] = []
        """What was agreed, and at which boundary it is done."""
        self._stop = Stop.NO
        """What was agreed already."""
        self._lost: list[tuple[int, Call]] = []
        """Ranks and where they are, once they have lost each other."""
        self._thread = crash.guarded_thread(self._listen, "boundaries")

    # -- the training's own thread

    def pass_one(self, wish: Agreed) -> Agreed:
        """Passes a boundary; what all ranks do there.

        Raises:
            CollectiveMismatch: the ranks have lost each other.
        """
        while True:
            with self._changed:
                self._await(lambda: not self._is_held)
                self.check()
                self._wish = self._not_agreed_yet(wish)
                if self._wish == Agreed() or self._is_deaf:
                    return self._pass()
                turn = self._round
            # before it passes, so that they act here if nobody else has
            self.ring()
            self._wait_for_answer(turn)

    def _wait_for_answer(self, turn: int) -> None:
        with self._changed:
            self._await(lambda: self._round > turn)

    def _await(self, condition: Callable[[], bool]) -> None:
        """As long as there is anybody to wait for."""
        while not (condition() or self._is_deaf):
            if not self._changed.wait(LOOK_SECONDS) and self._store.check([GONE]):
                self._is_deaf = True

    def _not_agreed_yet(self, wish: Agreed) -> Agreed:
        stop = wish.stop if wish.stop > self._stop else Stop.NO
        return Agreed(stop, wish.save and not any(due.save for _, due in self._due))

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
        """This rank makes a call that all make together."""
        with self._changed:
            self._wish = Agreed(stop)
            self._place = self._place._replace(calls=self._place.calls + 1, at=call)

    def take_batch(self) -> None:
        """Note that the stream has not ended at the last boundary."""
        with self._changed:
            self._place = self._place._replace(has_batch=True)

    def end(self, stop: Stop) -> None:
        """It has come back from it.

        Args:
            stop: on which all have agreed there.
        """
        with self._changed:
            self._stop = max(self._stop, stop)
            self._place = self._place._replace(at=Call.STEP)

    def ring(self) -> None:
        """Has all ranks say where they are and what they wish; returns at once."""
        turn = self._round
        if self._rung == turn:
            return
        self._rung = turn
        if self._store.add(f"rung/{turn}", 1) == 1:
            self._tell_all(self._store, f"bell/{turn}", RING)

    def check(self) -> None:
        """
        Raises:
            CollectiveMismatch: the ranks have lost each other.
            UserError: they have, at the end of a stream.
        """
        if self._lost:
            raise different_calls(self._lost)

    def settle(self) -> None:
        """Waits for the answer to a round that goes on, if there is one soon."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held, CLOSE_SECONDS)

    def close(self) -> None:
        """Ends the thread: one that waits in C++ at the interpreter's end would abort the process."""
        self._closed.set()
        with suppress(RuntimeError):  # the store may have gone
            for what in ("bell", "answer"):
                self._store.set(f"{what}/{self._round}/{self._rank}", CLOSE)
        self._thread.join(CLOSE_SECONDS)

    # -- the thread beside it

    def _listen(self) -> None:
        try:
            while self._heard("bell") == RING:
                self._answer()
        except RuntimeError:
            # a store that is gone takes the attempt with it; a rank that has lost only its connection would train on
            # without hearing of any save or stop
            if not self._closed.wait(CLOSE_SECONDS) and rendezvous.is_served():
                raise
        finally:
            with self._changed:
                self._is_held, self._is_deaf = False, True
                self._changed.notify_all()
            with suppress(RuntimeError):
                # who asks now would wait for ever
                self._store.set(GONE, str(self._rank))

    def _answer(self) -> None:
        turn = self._round
        with self._changed:
            self._is_held = True
            own = [self._wish.stop, self._wish.save, *self._place]
        self._waiting_store.set(f"place/{turn}/{self._rank}", json.dumps(own))
        if self._waiting_store.add(f"places/{turn}", 1) == self._world_size:
            keys = [f"place/{turn}/{rank}" for rank in range(self._world_size)]
            places = [json.loads(self._waiting_store.get(key)) for key in keys]
            self._tell_all(self._waiting_store, f"answer/{turn}", json.dumps(_answer_to(places)))
        text = self._heard("answer")
        if text == CLOSE:
            return
        for what in ("bell", "place", "answer"):
            self._waiting_store.delete_key(f"{what}/{turn}/{self._rank}")
        answer = json.loads(text)
        with self._changed:
            self._round = turn + 1
            self._is_held = False
            agreed = Agreed(Stop(answer["stop"]), answer["save"])
            if agreed != Agreed():
                self._due.append((answer["boundary"], agreed))
            self._stop = max(self._stop, agreed.stop)
            self._lost = [(rank, Call(call)) for rank, call in answer["lost"]]
            self._changed.notify_all()

    def _heard(self, what: str) -> str:
        """Waits for it."""
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


def _answer_to(said: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """What all ranks do, and at which boundary.

    Args:
        said: by each rank: the stop and the save that it wishes, and its place.
    """
    places = [Place(*each[2:]) for each in said]
    return {
        "boundary": max(place.passed for place in places) + 1,
        "stop": max(each[0] for each in said),
        "save": any(each[1] for each in said),
        "lost": [(rank, place.at) for rank, place in enumerate(places)] if have_lost_each_other(places) else [],
    }


def have_lost_each_other(places: Sequence[Place]) -> bool:
    """Whether one has made a call at a boundary that another has gone past without it."""
    reached = (-1, False)
    for place in sorted(places, key=lambda place: (place.calls, place.reached)):
        if place.reached < reached:
            return True
        reached = place.reached
    return False
