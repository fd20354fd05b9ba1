"""Sees that a rank comes on, and ends it where it does not: stuck ranks would hold their nodes until the time limit.

A thread of each rank compares how often the rank has said that it is alive. Where that has not changed for long, it
writes down where the rank is, and whether it waits there for others: of a training that is stuck all ranks stand
still, and what tells the one that holds the others up is that it does not wait. Then it ends the rank, and with it the
attempt.

A rank whose thread cannot run, because C code holds the interpreter's lock, says nothing; its silence names it among
others, and a timer of the system shows its stack. Where nobody misses it, that is what tells of it (see
`job.gil_monitor`).
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from mgpu_slurm.core.failures import STUCK
from mgpu_slurm.core.files import write_json
from mgpu_slurm.core.formatting import in_words
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.core.records import now
from mgpu_slurm.job.stacks import place, stack
from mgpu_slurm.rank import crash
from mgpu_slurm.request.spec import FLIGHT_VARIABLE

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from mgpu_slurm.rank.rank_info import RankInfo

LOOK_EVERY = 1.0
"""Seconds, at most; a tenth of a short limit."""

LONGER_THAN_EVER = 2.0
"""Times the longest time between two signs of life so far, for which a rank may stand still in any case."""

SHORTEST_GRACE, LONGEST_GRACE = 3.0, 60.0
"""Seconds between a rank's record and its end, in which the others write theirs: a tenth of the limit."""

LAST_SECONDS = 30.0
"""After its grace a rank ends, whatever it hangs on while it says why."""

Record = dict[str, Any]


class Watchdog:
    """Of one rank. It begins with the first sign of life: what a training takes to get there is its own affair."""

    def __init__(self, seconds: float, facts: RankInfo, record: Path | None, stacks: Path | None = None) -> None:
        """
        Args:
            seconds: for which a rank may stand still.
            record: the file for what there is to say of this rank; None where somebody else says it.
            stacks: the file for what its threads are at where none of them can run; None for its log.
        """
        self._seconds = seconds
        self._pause = min(LOOK_EVERY, seconds / 10)
        self._grace = min(max(SHORTEST_GRACE, seconds / 10), LONGEST_GRACE)
        self._facts = facts
        self._file = record
        self._signs = 0
        self._step: Callable[[], int] = lambda: 0
        self._rests = threading.Event()
        self._thread: threading.Thread | None = None
        self._hook: RemovableHandle | None = None
        self._alarm = _Alarm(stacks)

    def watch(self, step: Callable[[], int]) -> None:
        """Watches the thread that calls it.

        Args:
            step: at which the rank is.
        """
        self._step, self._signs, self._rests = step, 0, threading.Event()
        # also in a loop of somebody else's
        self._hook = register_optimizer_step_post_hook(lambda *_: self.alive())
        watched, rests = threading.get_ident(), self._rests
        self._thread = crash.guarded_thread(lambda: self._look(watched, rests), "watchdog")

    def alive(self) -> None:
        """The rank has come on. Costs next to nothing."""
        if not self._signs:
            # what comes next may not let the thread look
            self._alarm.set(self._seconds + self._pause)
        self._signs += 1

    def rest(self) -> None:
        """Watches no more."""
        self._rests.set()
        if self._hook is not None:
            self._hook.remove()
        if self._thread is not None:
            # it may be about to end the process
            self._thread.join(timeout=1.0)
        self._alarm.clear()

    def _look(self, watched: int, rests: threading.Event) -> None:
        signs, longest = 0, 0.0
        since = looked = time.monotonic()
        computed = time.process_time()
        while not rests.wait(self._pause):
            at, since_then = time.monotonic(), time.process_time() - computed
            late = at - looked - self._pause
            if late > 1 and since_then < late / 10:
                # the whole process was suspended, as SLURM does with a job; a busy machine only makes it late
                since += late
                if signs:
                    self._alarm.set(self._limit(longest) + self._pause)
            # that this thread runs shows that nobody keeps the interpreter's lock
            self._alarm.forget()
            if signs != self._signs:
                longest = max(longest, at - since)
                signs, since = self._signs, at
                self._alarm.set(self._limit(longest) + self._pause)
            elif signs and at - since >= self._limit(longest):
                self._end(watched, at - since)
            looked, computed = at, time.process_time()

    def _limit(self, longest: float) -> float:
        return max(self._seconds, LONGER_THAN_EVER * longest)

    def _end(self, watched: int, seconds: float) -> None:
        # no exit code, which would be the program's own
        last = threading.Timer(self._grace + LAST_SECONDS, os.kill, (os.getpid(), signal.SIGKILL))
        last.daemon = True
        last.start()
        self._alarm.clear()
        try:
            record = self._record(sys._current_frames()[watched], seconds)
            # not by print, over which another thread may be blocked
            os.write(1, f"mgpu_slurm: stuck: {record['message']}; this rank ends. Its threads:\n".encode())
            faulthandler.dump_traceback(1)
            if self._file is not None:
                write_json(self._file, record)
            time.sleep(self._grace)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    def _record(self, innermost: FrameType, seconds: float) -> Record:
        frames = stack(innermost)
        collectives: list[Record] = []
        with suppress(Exception):
            # a private interface
            collectives = _collectives(self._facts.rank)
        unfinished = [entry for entry in collectives if not entry["retired"]]
        waits = bool(unfinished) or _is_where_ranks_wait(frames)
        what = f" in {unfinished[0]['profiling_name']}" if unfinished else ""
        doing = f"{f'waits for other ranks{what}' if waits else 'is'} at {place(frames)}"
        return {
            "rank": self._facts.rank,
            "node": self._facts.node_name,
            "time": now(),
            "error": STUCK,
            "message": f"no progress for {in_words(seconds)} since step {self._step()}: it {doing}",
            "doing": doing,
            "consequence": waits,
            "collectives": len(collectives) and max(entry["record_id"] for entry in collectives),
        }


def watchdog(minutes: float, facts: RankInfo, folder: RunFolder | None, attempt: int) -> Watchdog | None:
    """
    Args:
        minutes: for which a rank may stand still; 0 for as long as it likes, which nobody has to watch.
        folder: of the run whose attempt it is; None where somebody else says how this process ended.
    """
    if not minutes:
        return None
    if folder is None:
        return Watchdog(60 * minutes, facts, record=None)
    stacks = folder.stacks(attempt) if facts.rank == 0 else None
    if stacks is not None:
        with suppress(OSError):
            # of a process before this one, which a launcher of the user's has started again
            stacks.unlink()
    return Watchdog(60 * minutes, facts, folder.rank_failure(attempt, facts.rank), stacks)


def _collectives(rank: int) -> list[Record]:
    """What torch's flight recorders have of this process, the oldest first; nothing where they keep none. It is left
    beside the logs too, as torch itself does at an NCCL time-out."""
    if not dist.is_initialized():
        return []
    from torch._C import _distributed_c10d as recorder

    found: list[Record] = []
    for name, file in (("_dump_fr_trace", f"{rank}-cpu"), ("_dump_nccl_trace", f"{rank}")):
        if hasattr(recorder, name):
            dump = getattr(recorder, name)()
            found += pickle.loads(dump).get("entries", [])
            if prefix := os.environ.get(FLIGHT_VARIABLE):
                with suppress(OSError):
                    Path(prefix + file).write_bytes(dump)
    return found


_TORCH = Path(torch.__file__).parent
_PACKAGE = Path(__file__).parents[1]
_WHERE_RANKS_WAIT = (
    str(_TORCH / "distributed"),
    str(_TORCH / "autograd" / "graph.py"),
    str(_PACKAGE / "rank" / "collectives.py"),
    str(_PACKAGE / "rank" / "step_sync.py"),
    str(_PACKAGE / "checkpoints" / "saver.py"),
)
"""For what others do not send: in collectives, also those of a backward pass."""


def _is_where_ranks_wait(frames: Sequence[traceback.FrameSummary]) -> bool:
    # a condition of Python's own is what one waits with, and not for
    innermost = next((frame for frame in reversed(frames) if frame.filename != threading.__file__), frames[-1])
    return innermost.filename.startswith(_WHERE_RANKS_WAIT)


class _Alarm:
    """Shows the stacks of this process's threads when a time is over, also where none of them can run Python code.

    By a timer of the system (timer_create(2)), which a forked child does not have. The thread of C code that
    `faulthandler.dump_traceback_later` keeps is one that a child of `os.fork` waits for at its end, and has not.
    """

    def __init__(self, file: Path | None) -> None:
        """
        Args:
            file: that has what was shown since it began last; None for this process's log.
        """
        self._file = file
        self._pid = os.getpid()
        """A forked child does nothing with it."""
        self._descriptor: int | None = None
        self._timer: ctypes.c_void_p | None = None

    def set(self, seconds: float) -> None:
        """Begins anew."""
        if os.getpid() != self._pid:
            return
        with suppress(AttributeError, OSError, RuntimeError, ValueError):
            # another C library or interpreter may not have what it takes
            if self._timer is None:
                if self._file is not None and self._descriptor is None:
                    self._descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
                self._timer = _new_timer(2 if self._descriptor is None else self._descriptor)
                # after the interpreter's end the signal would be an end too
                atexit.register(self.clear)
            self._settime(seconds)

    def clear(self) -> None:
        if self._timer is not None and os.getpid() == self._pid:
            self._settime(0.0)
            self.forget()

    def forget(self) -> None:
        """What was shown so far counts no more."""
        # of its position this process knows by itself, and need not ask a file system
        if self._descriptor is not None and os.lseek(self._descriptor, 0, os.SEEK_CUR):
            with suppress(OSError):
                os.ftruncate(self._descriptor, 0)
                os.lseek(self._descriptor, 0, os.SEEK_SET)

    def _settime(self, seconds: float) -> None:
        assert self._timer is not None
        whole = int(seconds)
        period = (whole, int((seconds - whole) * 1e9))
        # again and again: the disk may be full the first time
        value = _TimerSpec(*period, *period)
        ctypes.CDLL(None).timer_settime(self._timer, 0, ctypes.byref(value), None)


class _TimerSpec(ctypes.Structure):
    """`struct itimerspec` of time.h: an interval, and the time until the first end."""

    _fields_ = [(name, ctypes.c_long) for name in ("every", "every_ns", "value", "value_ns")]


class _SignalEvent(ctypes.Structure):
    """`struct sigevent` of signal.h, of 64 bytes."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("_", ctypes.c_char * 48),
    ]


_SIGEV_SIGNAL = 0


def _new_timer(descriptor: int) -> ctypes.c_void_p:
    """
    Args:
        descriptor: of the file that it shows the stacks in.

    Raises:
        AttributeError: there are no such timers.
        OSError: the system has none left.
    """
    signum = signal.SIGRTMAX - 1
    faulthandler.register(signum, file=descriptor, all_threads=True)
    timer = ctypes.c_void_p()
    event = _SignalEvent(None, signum, _SIGEV_SIGNAL, b"")
    if ctypes.CDLL(None).timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
        raise OSError("timer_create")
    return timer
