"""Checks when nodes see each other's files, and whether a lock held by one rank excludes the others."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mgpu_slurm.core import files
from mgpu_slurm.core.formatting import counted
from mgpu_slurm.doctor import check_results
from mgpu_slurm.doctor.check_results import Finding, span
from mgpu_slurm.doctor.in_job.team import Answer, GatherTimeout, Place, Team, names, within

VISIBLE_WITHIN = 60.0
"""Seconds; by default, NFS caches attributes for at most 60."""

SLOW_TO_SEE = 1.0

OTHERS = "a file of each"

INCREMENTS = 20
"""Increments by each rank."""

HOLDING = 0.0003
"""Seconds between reading and writing under the lock, so that a lock that does not work is noticed."""

LOCKED_WITHIN = 30.0

Lock = Callable[[int], None]
"""Takes an exclusive lock on an open file, or raises BlockingIOError if another process holds it."""


# -- visibility


def measure_visibility(team: Team, place: Place) -> Any:
    """Measure the seconds until this node sees each kind of write by rank 0's node; None if it does not in time.

    Rank 0 measures the opposite direction: the time until it sees the files of all other nodes.
    """
    if not team.me.is_leader:
        return None
    folder = place.folder.path / "checkup"
    if team.is_first:
        folder.mkdir(exist_ok=True)
    seen = _written_by_first(team, folder / "file")
    with suppress(FileNotFoundError):
        # if this node does not see the folder itself, rank 0 waits in vain and reports it
        (folder / f"from-{team.me.rank}").touch()
    team.tell(f"files/from/{team.me.rank}")
    if team.is_first:
        for leader in team.leaders:
            team.hear(f"files/from/{leader.rank}")
        wanted = [folder / f"from-{leader.rank}" for leader in team.leaders]
        seen = {OTHERS: within(VISIBLE_WITHIN, lambda: all(path.exists() for path in wanted))}
    return {"seen": seen, "folder": str(place.folder.path.parent)}


def _written_by_first(team: Team, file: Path) -> dict[str, float | None]:
    """Write in three ways, each after the other nodes have read the file, so that stale caches are noticed."""
    ways: dict[str, Callable[[], str]] = {
        "new": lambda: _write(file, "w", "one"),
        "appended": lambda: _write(file, "a", "two"),
        "replaced": lambda: _replace(file, "three"),
    }
    seen: dict[str, float | None] = {}
    for way, write in ways.items():
        if team.is_first:
            for leader in team.leaders[1:]:
                team.hear(f"files/{way}/looked/{leader.rank}")
            team.tell(f"files/{way}/written", write())
            continue
        _text(file)
        team.tell(f"files/{way}/looked/{team.me.rank}")
        expected = team.hear(f"files/{way}/written")
        seen[way] = within(VISIBLE_WITHIN, partial(_holds, file, expected))
    return seen


def _write(file: Path, mode: str, text: str) -> str:
    with open(file, mode) as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    return file.read_text()


def _replace(file: Path, text: str) -> str:
    files.write_whole(file, text)
    return text


def _holds(file: Path, expected: str) -> bool:
    return _text(file) == expected


def _text(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None


def judge_visibility(answers: list[Answer]) -> list[Finding]:
    if len(answers) < 2:
        return []
    folder = answers[0].value["folder"]
    first = answers[0].member.node_name
    found = []
    slowest: dict[str, float] = {}
    for answer in answers:
        unseen = [way for way, seconds in answer.value["seen"].items() if seconds is None]
        if unseen:
            name = answer.member.node_name
            writer = "the other nodes write" if name == first else f"{first} writes"
            text = f"{name} does not see what {writer} in {folder} within {VISIBLE_WITHIN:g} s: {', '.join(unseen)}"
            fix = "put the runs on a file system that all nodes share: set MGPU_RUNS to a folder there"
            found.append(check_results.failed("shared folder", text, fix))
        for way, seconds in answer.value["seen"].items():
            if seconds is not None:
                slowest[way] = max(slowest.get(way, 0.0), seconds)
    if found:
        return found
    listed = ", ".join(f"{way} {span(seconds)}" for way, seconds in slowest.items() if way != OTHERS)
    nodes = names([answer.member for answer in answers])
    text = f"shared folder {folder}: {nodes} see each other's files ({listed} at most)"
    if max(slowest.values()) > SLOW_TO_SEE:
        fix = "runs work, but following them lags: use a faster file system, or lower actimeo of its mount"
        return [check_results.warning("shared folder", text, fix)]
    return [check_results.ok("shared folder", text)]


# -- locks


@dataclass(frozen=True)
class Counted:
    """The increments of one rank, each under a lock."""

    done: int
    """Increments that worked."""
    problem: str
    seconds: float
    expected: int | None = None
    """On rank 0: the increments of all ranks that worked."""
    total: int = 0
    """On rank 0: the number in the file afterwards."""


def take_fcntl(descriptor: int) -> None:
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def take_flock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


LOCKS: dict[str, Lock] = {"fcntl": take_fcntl, "flock": take_flock}


def measure_locks(team: Team, place: Place) -> Any:
    """Let all ranks increment a number in one file, each time under a lock; rank 0 compares it with the sum."""
    folder = place.folder.path / "checkup"
    answer = {}
    for kind, take in LOCKS.items():
        file = folder / f"counted-by-{kind}"
        team.meet(f"locks/{kind}")
        own = count(file, take)
        team.tell(f"locks/{kind}/{team.me.rank}", own.done)
        if team.is_first:
            done = [team.hear(f"locks/{kind}/{member.rank}") for member in team.members]
            total = int(file.read_text() or 0) if file.exists() else 0
            own = replace(own, expected=sum(done), total=total)
        answer[kind] = asdict(own)
    return answer


def count(file: Path, take: Lock) -> Counted:
    """Increment the number in the file."""
    begun = time.perf_counter()
    done = 0
    problem = ""
    try:
        for _ in range(INCREMENTS):
            _increment(file, take, begun + LOCKED_WITHIN)
            done += 1
    except (OSError, GatherTimeout) as error:
        problem = str(error)
    return Counted(done, problem, time.perf_counter() - begun)


def _increment(file: Path, take: Lock, give_up: float) -> None:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _wait_for(take, descriptor, give_up)
        number = int(os.pread(descriptor, 32, 0) or b"0")
        time.sleep(HOLDING)
        os.pwrite(descriptor, b"%d" % (number + 1), 0)
    finally:
        # also releases the lock, after the file system has written the locked data
        os.close(descriptor)


def _wait_for(take: Lock, descriptor: int, give_up: float) -> None:
    while True:
        try:
            return take(descriptor)
        except BlockingIOError:
            if time.perf_counter() > give_up:
                raise GatherTimeout(f"no lock within {LOCKED_WITHIN:g} s") from None
            time.sleep(HOLDING)


def judge_locks(answers: list[Answer]) -> list[Finding]:
    nodes = names([answer.member for answer in answers])
    found = [_judge_lock(kind, [Counted(**answer.value[kind]) for answer in answers], nodes) for kind in LOCKS]
    return [finding for finding in found if finding is not None]


def _judge_lock(kind: str, counts: list[Counted], nodes: str) -> Finding | None:
    expected = counts[0].expected if counts else None
    if expected is None:
        # rank 0 has not answered
        return None
    problem = next((own.problem for own in counts if own.problem), "")
    lost = expected - counts[0].total
    fix = "two commands on one run at once may conflict: use another file system, or one command at a time"
    if lost:
        text = f"{kind} locks on {nodes} do not exclude each other: {lost} of {expected} counts were lost"
        return check_results.failed("file locks", text, fix)
    if problem:
        return check_results.warning("file locks", f"{kind} locks on {nodes} do not work: {problem}", fix)
    each = max(own.seconds for own in counts) / expected
    text = f"{kind} locks work on {nodes}: {expected} counts by {counted(len(counts), 'rank')}, {span(each)} each"
    return check_results.ok("file locks", text)
