"""Follow a run: the logs of ranks as they grow, over attempts, and the run's events, until it ends."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from mgpu_slurm.core.formatting import short_value
from mgpu_slurm.core.hostlist import compress
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.registry import lookup
from mgpu_slurm.registry.sweep_state import summary_of
from mgpu_slurm.registry.watch import Watch
from mgpu_slurm.reports.live import progress_line
from mgpu_slurm.reports.live.log_view import LogView, end_of_lines, last_lines
from mgpu_slurm.reports.sweep_status import ended_here, new_lines
from mgpu_slurm.run_folder import rank_warnings, records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.rank_warnings import RankWarning
from mgpu_slurm.run_folder.record_types import Event, RunState

PAUSE = 0.1
"""Seconds between two looks at the files."""

LISTING_PAUSE = 1.0
"""Seconds between two listings of the logs, which may be those of thousands of ranks."""

GROUP_PAUSE = 1.0
"""Seconds between two looks at a group, which may have thousands of runs."""


ONE_RANK = LogView()


def follow(folder: RunFolder, view: LogView = ONE_RANK, after_attempt: int = 0, draw: Note = quiet) -> Iterator[str]:
    """Yield pieces of text as they appear, until the run ends.

    Args:
        after_attempt: attempts up to this one are not shown.
        draw: called with a line that shows how far the run is.
    """
    known_events = len(records.events(folder)) if after_attempt or view.tail is not None else 0
    shown = _Shown(folder, view, after_attempt)
    pause = PAUSE if len(view.ranks) == 1 else LISTING_PAUSE
    waits_for = ""
    notes: list[str] = []
    watch = Watch(folder, note=notes.append)
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
        if ended:
            yield from shown.end()
        else:
            draw(progress_line.of_run(state))
            time.sleep(pause)


class _Shown:
    """The part of a run's logs and warnings that was shown already."""

    def __init__(self, folder: RunFolder, view: LogView, after_attempt: int) -> None:
        self._folder = folder
        self._view = view
        self._after_attempt = after_attempt
        self._tails: dict[Path, _Tail] = {}
        self._lines = {rank: view.lines(rank) for rank in view.ranks}
        self._is_first = True
        """Whether nothing was shown yet: all but the newest lines may then be left out."""
        self._warnings: set[RankWarning] = set()
        self._next_look = 0.0

    def new(self, up_to: int, look_at_warnings: bool) -> Iterator[str]:
        """Yield what was added.

        Args:
            up_to: the last attempt to show.
            look_at_warnings: whether to read the warnings now, not only every `LISTING_PAUSE` seconds.
        """
        attempts = range(self._after_attempt + 1, up_to + 1)
        for rank in self._view.ranks:
            if self._is_first and self._view.tail is not None:
                yield from self._last_lines(rank, attempts)
            yield from self._added(rank, attempts)
        self._is_first = False
        if look_at_warnings or time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LISTING_PAUSE
            # the log of a followed rank contains its own warnings
            of_others = {warned for warned in rank_warnings.of_run(self._folder) if warned.rank not in self._lines}
            new = {warned for warned in of_others - self._warnings if self._after_attempt < warned.attempt <= up_to}
            yield from (f"-- warning: {line}\n" for line in rank_warnings.lines(new))
            self._warnings |= new

    def end(self) -> Iterator[str]:
        """Yield what a rank has printed without the end of its line."""
        for lines in self._lines.values():
            yield from lines.end()

    def _added(self, rank: int, attempts: range) -> Iterator[str]:
        lines = self._lines[rank]
        for path in lookup.logs_of_rank(self._folder, rank, attempts):
            if path not in self._tails:
                # those of the attempt before have ended
                yield from lines.end()
            text = self._tails.setdefault(path, _Tail(path)).read()
            if self._view.is_whole:
                yield text
            else:
                yield from lines.add(text)

    def _last_lines(self, rank: int, attempts: range) -> Iterator[str]:
        """Yield the last whole lines that are there already; what follows them is new."""
        parts = [(path, end_of_lines(path)) for path in lookup.logs_of_rank(self._folder, rank, attempts)]
        self._tails |= {path: _Tail(path, end) for path, end in parts}
        yield from last_lines(parts, self._view, rank)


def follow_group(folder: RunFolder, without: Iterable[int] = (), draw: Note = quiet) -> Iterator[str]:
    """Yield a line when a run of the group starts or ends, or a trial of the sweep ends, until all runs have ended.

    Args:
        without: trials to leave out.
        draw: called with a line that shows how many have ended.
    """
    notes: list[str] = []
    watch = Watch(folder, note=notes.append)
    shown: dict[str, str] = {}
    failed: dict[str, str] = {}
    shown_trials = set(without)
    while True:
        found = watch.states()
        yield from _said(notes)
        yield from (f"{line}\n" for line in new_lines(summary_of(folder), shown_trials))
        for state in found:
            if state.state not in (shown.get(state.run), states.PENDING):
                shown[state.run] = state.state
                yield f"-- {state.run}  {state.state}{_words(state, failed)}\n"
        if not any(states.is_alive(state.state) for state in found):
            return
        draw(progress_line.of_group(folder, found))
        time.sleep(GROUP_PAUSE)


def _said(notes: list[str]) -> Iterator[str]:
    """Yield each note once."""
    while notes:
        yield f"-- {notes.pop(0)}\n"


def _words(state: RunState, failed: dict[str, str]) -> str:
    """Return the details on a run whose state has changed.

    Args:
        failed: the first run that has failed for each reason; this one is added. An error may be long.
    """
    if state.state == states.COMPLETED:
        metrics = (f"{name} {short_value(value)}" for name, value in state.metrics.items())
        return "".join(f"  {words}" for words in ([ended_here(state)] if state.kind == "worker" else metrics) if words)
    if state.reason and not states.is_alive(state.state):
        first = failed.setdefault(state.reason, state.run)
        return f": as {first}" if first != state.run else f": {state.reason}"
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

    def __init__(self, path: Path, position: int = 0) -> None:
        self._path = path
        self._position = position
        # a read may end in the middle of a character
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> str:
        """Return what was added since the last call."""
        with open(self._path, "rb") as file:
            file.seek(self._position)
            added = file.read()
        self._position += len(added)
        return self._decoder.decode(added)
