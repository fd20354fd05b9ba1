"""Follow a run: the log of one rank as it grows, over attempts, and the run's events, until it ends."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from mgpu_slurm.core.hostlist import compress
from mgpu_slurm.registry import lookup
from mgpu_slurm.registry.sweep_state import summary_of
from mgpu_slurm.registry.watch import Watch
from mgpu_slurm.reports.run_summary import RankWarning, rank_warnings, warning_lines
from mgpu_slurm.reports.sweep_status import new_lines
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Event, RunState

PAUSE = 0.1
"""Seconds between two looks at the files."""

LISTING_PAUSE = 1.0
"""Seconds between two listings of the logs, which may be those of thousands of ranks."""

GROUP_PAUSE = 1.0
"""Seconds between two looks at a group, which may have thousands of runs."""


def follow(folder: RunFolder, rank: int = 0, after_attempt: int = 0) -> Iterator[str]:
    """Yield pieces of text as they appear, until the run ends.

    Args:
        after_attempt: attempts up to this one are not shown.
    """
    known_events = len(records.events(folder)) if after_attempt else 0
    shown = _Shown(folder, rank, after_attempt)
    waits_for = ""
    notes: list[str] = []
    watch = Watch(folder, notes.append)
    ended = False
    while not ended:
        # the state is read before the logs: what was written before the end is shown before the end
        state = watch.state()
        ended = not states.is_alive(state.state)
        yield from _said(notes)
        # the expected start changes all the time
        reason = state.reason.partition(", ")[0] if state.state == states.PENDING else ""
        if reason not in ("", waits_for):
            waits_for = reason
            yield f"-- {state.state}: {state.reason}\n"
        events = records.events(folder)
        for event in events[known_events:]:
            if event.event == "started":
                # after all earlier output
                yield from shown.new(event.attempt - 1, look_at_warnings=True)
            yield from _told(event)
        known_events = len(events)
        attempts = [event.attempt for event in events if event.event == "started"]
        yield from shown.new(max(attempts, default=0), look_at_warnings=ended)
        if not ended:
            time.sleep(PAUSE)


class _Shown:
    """The part of a run's logs and warnings that was shown already."""

    def __init__(self, folder: RunFolder, rank: int, after_attempt: int) -> None:
        self._folder = folder
        self._rank = rank
        self._after_attempt = after_attempt
        self._tails: dict[Path, _Tail] = {}
        self._warnings: set[RankWarning] = set()
        self._next_look = 0.0

    def new(self, up_to: int, look_at_warnings: bool) -> Iterator[str]:
        """Yield what was added.

        Args:
            up_to: the last attempt to show.
            look_at_warnings: whether to read the warnings now, not only every `LISTING_PAUSE` seconds.
        """
        for path in lookup.logs_of_rank(self._folder, self._rank, range(self._after_attempt + 1, up_to + 1)):
            yield from self._tails.setdefault(path, _Tail(path)).read()
        if look_at_warnings or time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LISTING_PAUSE
            # the log of the followed rank contains its own warnings
            of_others = {warned for warned in rank_warnings(self._folder) if warned.rank != self._rank}
            new = {warned for warned in of_others - self._warnings if self._after_attempt < warned.attempt <= up_to}
            yield from (f"-- warning: {line}\n" for line in warning_lines(new))
            self._warnings |= new


def follow_group(folder: RunFolder, without: Iterable[int] = ()) -> Iterator[str]:
    """Yield a line when a run of the group starts or ends, or a trial of the sweep ends, until all runs have ended.

    Args:
        without: trials to leave out.
    """
    notes: list[str] = []
    watch = Watch(folder, notes.append)
    shown: dict[str, str] = {}
    shown_trials = set(without)
    while True:
        found = watch.states()
        yield from _said(notes)
        yield from (f"{line}\n" for line in new_lines(summary_of(folder), shown_trials))
        for state in found:
            if state.state not in (shown.get(state.run), states.PENDING):
                shown[state.run] = state.state
                yield f"-- {state.run}  {state.state}{_words(state)}\n"
        if not any(states.is_alive(state.state) for state in found):
            return
        time.sleep(GROUP_PAUSE)


def _said(notes: list[str]) -> Iterator[str]:
    """Yield each note once."""
    while notes:
        yield f"-- {notes.pop(0)}\n"


def _words(state: RunState) -> str:
    """Return the details on a run whose state has changed."""
    if state.state == states.COMPLETED:
        return "".join(f"  {name} {value:.4g}" for name, value in state.metrics.items())
    return f": {state.reason}" if state.reason else ""


def _told(event: Event) -> Iterator[str]:
    if event.event == "started":
        attempt = f", attempt {event.attempt}" if event.attempt > 1 else ""
        yield f"-- started on {compress(event.nodes)}{attempt}\n"
    elif event.event == "requeued":
        yield "-- requeued: it restarts from its newest checkpoint\n"
    elif event.event == "retried":
        # the next attempt also finds a complete checkpoint that has no name yet
        place = "" if event.checkpoint is None else f" from step {event.checkpoint}"
        soon = f" in {event.pause:.0f} s" if event.pause else ""
        yield f"-- failed: {event.why}\n-- restarting{soon}{place}\n"


class _Tail:
    """The text that was added to a file since the last read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        # a read may end in the middle of a character
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> Iterator[str]:
        with open(self._path, "rb") as file:
            file.seek(self._position)
            added = file.read()
        self._position += len(added)
        if added:
            yield self._decoder.decode(added)
