"""What processes and everything below them use: processor, memory and disk, as proc(5) counts them.

Reading it is cheap, takes no lock of the processes, and needs no right beyond that of their user.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_BLOCK = 1 << 16
"""More than any of these files has, except the list of children of a process that has thousands."""


@dataclass
class TreeUsage:
    """The use of a process, the root, and of everything below it."""

    cpu: float = 0.0
    """CPU seconds since its start, with those of processes below it that have ended."""
    wait: float | None = None
    """Seconds that threads, ready to run, have waited for a core since the last reading; None if unknown."""
    read: int = 0
    wrote: int = 0
    """Bytes from and to disks and network file systems since its start; 0 if unknown."""
    rss: int = 0
    """Bytes of memory now; pages that processes share count once for each of them."""
    peak: int = 0
    """Sum of the peaks that the living processes have had in their lives: they never had more together."""
    below: dict[int, int] = field(default_factory=dict)
    """By process that has any below it: the largest peak of a living one of those."""
    pids: list[int] = field(default_factory=list)
    """The living processes, first the root; empty if that has ended."""


class TreeReader:
    """Reads trees of processes again and again."""

    def __init__(self) -> None:
        self._waits: dict[int, int] = {}
        """Nanoseconds for which each thread had waited for a core at the last reading."""
        self._now: dict[int, int] = {}

    def read(self, roots: Iterable[int]) -> dict[int, TreeUsage]:
        """Return the use of each of these processes and of everything below it, by the root's id."""
        self._now = {}
        found = {root: self._tree(root) for root in roots}
        # threads that have ended are forgotten
        self._waits = self._now
        return found

    def _tree(self, root: int) -> TreeUsage:
        usage = TreeUsage()
        frontier: list[tuple[int, tuple[int, ...]]] = [(root, ())]
        while frontier:
            pid, above = frontier.pop()
            with suppress(OSError, ValueError, IndexError):
                # one that has ended meanwhile is left out
                self._add(usage, pid, above)
                frontier += [(child, (*above, pid)) for child in self._add_threads(usage, pid)]
        return usage

    def _add(self, usage: TreeUsage, pid: int, above: tuple[int, ...]) -> None:
        # state, parent, ...: what follows the name, which may contain anything
        stat = _contents(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        usage.cpu += sum(map(int, stat[11:15])) / _TICKS
        if stat[0] == b"Z":
            return
        usage.pids.append(pid)
        rss = int(stat[21]) * _PAGE
        peak = max(rss, _number_after(b"VmHWM:", _contents(f"/proc/{pid}/status")) << 10)
        usage.rss += rss
        usage.peak += peak
        for each in above:
            usage.below[each] = max(usage.below.get(each, 0), peak)
        with suppress(OSError):
            io = _contents(f"/proc/{pid}/io")
            usage.read += _number_after(b"\nread_bytes:", io)
            usage.wrote += _number_after(b"\nwrite_bytes:", io)

    def _add_threads(self, usage: TreeUsage, pid: int) -> Iterator[int]:
        """Add what the threads of a process have waited; yield the processes that they have started."""
        for name in os.listdir(f"/proc/{pid}/task"):
            # a thread may end, and a kernel may lack either file
            with suppress(OSError, IndexError):
                waited = int(_contents(f"/proc/{pid}/task/{name}/schedstat").split()[1])
                before = self._waits.get(int(name), 0)
                self._now[int(name)] = waited
                # a smaller number is of another thread, which has got the id of an ended one
                usage.wait = (usage.wait or 0.0) + (waited - before if waited >= before else waited) / 1e9
            with suppress(OSError):
                yield from map(int, _contents(f"/proc/{pid}/task/{name}/children").split())


def shared_once(pids: Iterable[int], most: int) -> int | None:
    """Return the bytes of memory of these processes, of which a page that several share counts once.

    It takes 10 ms for 400 MB, in which a process that maps memory may have to wait: call it rarely.

    Args:
        most: bytes of memory of a process from which measuring would take too long; None is returned then.

    Raises:
        OSError: a process has ended, or belongs to another user.
    """
    found = 0
    for pid in pids:
        if int(_contents(f"/proc/{pid}/statm").split()[1]) * _PAGE > most:
            return None
        found += _number_after(b"\nPss:", _contents(f"/proc/{pid}/smaps_rollup")) << 10
    return found


def with_entries(entries: Iterable[str]) -> list[int]:
    """Return this user's processes that were started with all of these `NAME=value` in their environment, without those
    below another one of them."""
    needles = {entry.encode() for entry in entries}
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, IndexError):
            if needles <= set(_contents(f"/proc/{name}/environ", 1 << 20).split(b"\0")):
                parents[int(name)] = int(_contents(f"/proc/{name}/stat").rpartition(b")")[2].split()[1])
    return [pid for pid, parent in parents.items() if parent not in parents]


def _contents(path: str, size: int = _BLOCK) -> bytes:
    # half the time of `open` and `read`
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, size)
    finally:
        os.close(descriptor)


def _number_after(name: bytes, text: bytes) -> int:
    """Return the number after a name; 0 if the name is missing, as for a process without memory."""
    _, found, rest = text.partition(name)
    return int(rest.split(None, 1)[0]) if found else 0
