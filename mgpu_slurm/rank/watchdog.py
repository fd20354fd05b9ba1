"""Kill a rank that makes no progress, because stuck ranks would hold their nodes until the time limit.

A thread of each rank counts the rank's signs of life. If the count has not changed for too long, the thread records
where the rank is, and whether it waits there for other ranks. In a stuck training all ranks stop, and the one that
blocks the others is the one that does not wait. Then the thread kills the rank, which ends the attempt.

If C code holds the GIL, the thread cannot run, and the rank records nothing. The missing record identifies it among the
others, and a system timer dumps its stack. If no other rank waits for it, only that stack reveals it (see
`job.gil_monitor`). A model that is being compiled is not stuck (see `rank.compiling`).
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from mgpu_slurm.core.files import read_json, write_json
from mgpu_slurm.core.formatting import in_words
from mgpu_slurm.core.log_lines import PREFIX
from mgpu_slurm.job.stacks import place, stack
from mgpu_slurm.rank import crash, torch_adapter
from mgpu_slurm.rank.compiling import Compilation, OtherCompilations, compiling_frame
from mgpu_slurm.request.parallelism import LONGEST_COMPILATION
from mgpu_slurm.request.spec import FLIGHT_VARIABLE
from mgpu_slurm.run_folder.failures import STUCK
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Failure
from mgpu_slurm.run_folder.records import now

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from mgpu_slurm.rank.rank_info import RankInfo

LOOK_EVERY = 1.0
"""Maximum seconds between two checks; a tenth of the limit if that is shorter."""

LONGER_THAN_EVER = 2.0
"""A rank may always be silent for this many times the longest interval between two signs of life so far."""

SHORTEST_GRACE, LONGEST_GRACE = 5.0, 60.0
"""Bounds on the seconds between a rank's record and its end, in which the others write theirs: a tenth of the limit."""

LAST_SECONDS = 30.0
"""Seconds after its grace at which a rank is killed, even if writing its record hangs."""


@dataclass(frozen=True)
class Collective:
    """An entry of torch's flight recorders."""

    group: str
    number: int
    """Increases with each collective of the group."""
    name: str
    is_over: bool


class Watchdog:
    """Watchdog of one rank. It starts at the first sign of life; the time until then is not limited."""

    def __init__(
        self,
        seconds: float,
        facts: RankInfo,
        record: Path | None,
        stacks: Path | None = None,
        compiling: Path | None = None,
    ) -> None:
        """
        Args:
            seconds: time that a rank may make no progress.
            record: file for this rank's failure record; None if another process reports the failure.
            stacks: file for the stacks of its threads when none of them can run; None for its log.
            compiling: file that shows the other ranks that this one compiles; None if they cannot see it.
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
        self._compilation = Compilation(compiling, mark_every=seconds / 10)
        self._others = OtherCompilations(compiling, facts.rank)

    def watch(self, step: Callable[[], int]) -> None:
        """Watch the calling thread.

        Args:
            step: returns the rank's current step.
        """
        self._step, self._signs, self._rests = step, 0, threading.Event()
        # counts optimizer steps of other training loops too
        self._hook = register_optimizer_step_post_hook(lambda *_: self.alive())
        watched, rests = threading.get_ident(), self._rests
        self._thread = crash.guarded_thread(lambda: self._look(watched, rests), "watchdog")

    def alive(self) -> None:
        """Note a sign of life of this rank. This costs almost nothing."""
        if not self._signs:
            # the code that follows may never let the watchdog thread run
            self._alarm.set(self._seconds + self._pause)
        self._signs += 1

    def rest(self) -> None:
        """Stop watching."""
        self._rests.set()
        if self._hook is not None:
            self._hook.remove()
        if self._thread is not None:
            # the thread may be about to kill the process
            self._thread.join(timeout=1.0)
        self._compilation.close()
        self._alarm.clear()

    def _look(self, watched: int, rests: threading.Event) -> None:
        signs, longest = 0, 0.0
        signed = since = looked = time.monotonic()
        computed = time.process_time()
        while not rests.wait(self._pause):
            at, since_then = time.monotonic(), time.process_time() - computed
            late = at - looked - self._pause
            if late > 1 and since_then < late / 10:
                # the whole process was suspended, as SLURM can do with a job; a busy machine would only delay it
                signed, since = signed + late, since + late
                if signs:
                    self._alarm.set(self._limit(longest) + self._pause)
            # this thread runs, so the GIL is not blocked
            self._alarm.forget()
            compiles = self._compiles(at - since) and at - signed < LONGEST_COMPILATION * self._limit(longest)
            if signs != self._signs:
                longest = max(longest, at - since)
                signs, signed, since = self._signs, at, at
                self._others.forget()
                self._alarm.set(self._limit(longest) + self._pause)
            elif signs and compiles:
                since = at
                self._alarm.set(self._limit(longest) + self._pause)
            elif signs and self.is_stuck(at - since, longest):
                self._end(watched, at - signed)
            looked, computed = at, time.process_time()

    def _compiles(self, silent: float) -> bool:
        """Return whether a compilation makes progress, here or in a rank that this one may be waiting for."""
        return self._compilation.makes_progress() or (silent >= self._seconds / 2 and self._others.make_progress())

    def is_stuck(self, silent: float, longest: float) -> bool:
        """Return whether the rank is stuck.

        The attempt ends with its first stuck rank, and a cause is found by what all ranks do. So a rank that has been
        silent for half the limit ends with that one, and records where it is.

        Args:
            silent: seconds since the last sign of life.
            longest: the longest interval between two of them, in seconds.
        """
        return silent >= self._limit(longest) or (silent >= self._seconds / 2 and self._another_is_stuck())

    def _another_is_stuck(self) -> bool:
        if self._file is None:
            return False
        with suppress(OSError, ValueError):
            others = self._file.parent.glob(self._file.name.replace(f"-{self._facts.rank}.", "-*."))
            return any((read_json(path) or {}).get("error") == STUCK for path in others)
        return False

    def _limit(self, longest: float) -> float:
        return max(self._seconds, LONGER_THAN_EVER * longest)

    def _end(self, watched: int, seconds: float) -> None:
        # a signal, because an exit code would look like the program's own
        last = threading.Timer(self._grace + LAST_SECONDS, os.kill, (os.getpid(), signal.SIGKILL))
        last.daemon = True
        last.start()
        self._alarm.clear()
        try:
            record = self._record(watched, seconds)
            # not print, in which another thread may be blocked
            os.write(1, f"{PREFIX}stuck: {record.message}; this rank ends. Its threads:\n".encode())
            faulthandler.dump_traceback(1)
            if self._file is not None:
                # without sync: the disk may be what hangs, and the attempt may end before a slow write finishes
                write_json(self._file, record.to_json(), sync=False)
            time.sleep(self._grace)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    def _record(self, watched: int, seconds: float) -> Failure:
        compiling = compiling_frame(watched)
        frames = stack(compiling or sys._current_frames()[watched])
        collectives: list[Collective] = []
        with suppress(Exception):
            # private interface of torch
            collectives = _collectives(self._facts.rank)
        unfinished = [each.name for each in collectives if not each.is_over]
        waits = compiling is None and (bool(unfinished) or _is_where_ranks_wait(frames))
        what = f" in {unfinished[0]}" if unfinished else ""
        is_doing = "is" if compiling is None else "is compiling"
        doing = f"{f'waits for other ranks{what}' if waits else is_doing} at {place(frames)}"
        return Failure(
            rank=self._facts.rank,
            node=self._facts.node_name,
            time=now(),
            error=STUCK,
            message=f"no progress for {in_words(seconds)} since step {self._step()}: it {doing}",
            doing=doing,
            consequence=waits,
            collectives=_count(collectives),
        )


def watchdog(
    minutes: float, facts: RankInfo, folder: RunFolder | None, attempt: int, process: int = 0
) -> Watchdog | None:
    """Create the watchdog of a rank.

    Args:
        minutes: time that a rank may make no progress; 0 for no limit and no watchdog.
        folder: folder of the attempt's run; None if another process reports how this one ended.
        process: as in `Rank`.
    """
    if not minutes:
        return None
    if folder is None:
        return Watchdog(60 * minutes, facts, record=None)
    compiling = folder.rank_compiling(attempt, facts.rank)
    stacks = folder.stacks(attempt, process) if facts.rank == 0 else None
    if stacks is not None:
        with suppress(OSError):
            # left by an earlier process that the user's launcher has restarted
            stacks.unlink()
    return Watchdog(60 * minutes, facts, folder.rank_failure(attempt, process or facts.rank), stacks, compiling)


def _collectives(rank: int) -> list[Collective]:
    """Return the entries of the flight recorders in this process, oldest first; none if they are disabled.

    The dump is also written next to the logs, as torch itself does at an NCCL time-out.
    """
    if not dist.is_initialized():
        return []
    found: list[Collective] = []
    for suffix, dump in torch_adapter.flight_recorder_dumps():
        if prefix := os.environ.get(FLIGHT_VARIABLE):
            with suppress(OSError):
                Path(f"{prefix}{rank}{suffix}").write_bytes(dump)
        entries = pickle.loads(dump).get("entries", [])
        for each in entries:
            group = f"{suffix} {each['process_group'][0]}"
            found.append(Collective(group, each["collective_seq_id"], each["profiling_name"], each["retired"]))
    return found


def _count(collectives: Sequence[Collective]) -> int:
    """Return how many collectives a rank has made, for a comparison with other ranks. The groups of a tree have the
    same name and as many collectives each, so a rank that is in several of them counts one."""
    newest: dict[str, int] = {}
    for each in collectives:
        newest[each.group] = max(newest.get(each.group, 0), each.number)
    return sum(newest.values())


_PACKAGE = Path(__file__).parents[1]
_WHERE_RANKS_WAIT = (
    *torch_adapter.WAITING_CODE,
    str(_PACKAGE / "rank" / "collectives.py"),
    str(_PACKAGE / "rank" / "control_group.py"),
    str(_PACKAGE / "rank" / "step_sync.py"),
    str(_PACKAGE / "checkpoints" / "saver.py"),
)
"""Code in which a rank waits for the others: in collectives, including those of a backward pass."""


def _is_where_ranks_wait(frames: Sequence[traceback.FrameSummary]) -> bool:
    # skip Python's own threading.Condition, which the wait is implemented with
    innermost = next((frame for frame in reversed(frames) if frame.filename != threading.__file__), frames[-1])
    return innermost.filename.startswith(_WHERE_RANKS_WAIT)


class _Alarm:
    """A timer that dumps the stacks of this process's threads, even if none of them can run Python code.

    It is a system timer (timer_create(2)), which a forked child does not inherit. `faulthandler.dump_traceback_later`
    would start a C thread that a child of `os.fork` does not have but waits for when it exits.
    """

    def __init__(self, file: Path | None) -> None:
        """
        Args:
            file: file for the stacks dumped since the timer was last set; None for this process's log.
        """
        self._file = file
        self._pid = os.getpid()
        """The process of the timer; a forked child does not touch it."""
        self._descriptor: int | None = None
        self._timer: ctypes.c_void_p | None = None

    def set(self, seconds: float) -> None:
        """Start or restart the timer."""
        if os.getpid() != self._pid:
            return
        with suppress(AttributeError, OSError, RuntimeError, ValueError):
            # other C libraries or interpreters may lack these functions
            if self._timer is None:
                if self._file is not None and self._descriptor is None:
                    self._descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
                self._timer = _new_timer(2 if self._descriptor is None else self._descriptor)
                # after interpreter shutdown, the signal would kill the process
                atexit.register(self.clear)
            self._settime(seconds)

    def clear(self) -> None:
        if self._timer is not None and os.getpid() == self._pid:
            self._settime(0.0)
            self.forget()

    def forget(self) -> None:
        """Delete the stacks dumped so far."""
        # the file position is known without a request to the file system
        if self._descriptor is not None and os.lseek(self._descriptor, 0, os.SEEK_CUR):
            with suppress(OSError):
                os.ftruncate(self._descriptor, 0)
                os.lseek(self._descriptor, 0, os.SEEK_SET)

    def _settime(self, seconds: float) -> None:
        assert self._timer is not None
        whole = int(seconds)
        period = (whole, int((seconds - whole) * 1e9))
        # repeat, because the disk may be full the first time
        value = _TimerSpec(*period, *period)
        ctypes.CDLL(None).timer_settime(self._timer, 0, ctypes.byref(value), None)


class _TimerSpec(ctypes.Structure):
    """`struct itimerspec` of time.h: an interval, and the time until the first expiration."""

    _fields_ = [(name, ctypes.c_long) for name in ("every", "every_ns", "value", "value_ns")]


class _SignalEvent(ctypes.Structure):
    """`struct sigevent` of signal.h, 64 bytes."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("_", ctypes.c_char * 48),
    ]


_SIGEV_SIGNAL = 0


def _new_timer(descriptor: int) -> ctypes.c_void_p:
    """Create a timer that dumps the stacks.

    Args:
        descriptor: file descriptor for the stacks.

    Raises:
        AttributeError: the C library has no such timers.
        OSError: the system has no timer left.
    """
    signum = signal.SIGRTMAX - 1
    faulthandler.register(signum, file=descriptor, all_threads=True)
    timer = ctypes.c_void_p()
    event = _SignalEvent(None, signum, _SIGEV_SIGNAL, b"")
    if ctypes.CDLL(None).timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
        raise OSError("timer_create")
    return timer
