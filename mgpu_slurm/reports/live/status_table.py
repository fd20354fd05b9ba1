"""The table of runs that `status` prints, with as many columns as fit a terminal."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from mgpu_slurm.core.formatting import (
    counted,
    cut,
    cut_middle,
    duration,
    earliest,
    latest,
    program,
    short_value,
    time_of,
    without_empty_columns,
)
from mgpu_slurm.reports.live.status_choice import Choice
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.run_folder.states import is_alive, overall

HEADER = ["RUN", "STATE", "ATTEMPT", "RANKS", "STEP", "PROGRESS", "LEFT", "AGE", "TIME", "REASON, METRICS"]

_LEFT_OUT_FIRST = ("AGE", "RANKS", "ATTEMPT", "STEP", "TIME", "PROGRESS", "LEFT")
"""Columns that are left out on a narrow terminal, in this order."""
_LEAST_ROOM_FOR_METRICS = 16
_LONGEST_NAME, _LONGEST_VERY_NARROW = 28, 20
"""Maximum length of a run's name on a narrow terminal, and on one of less than 72 columns; its middle is left out. On a
wide one, it may take a third."""


EVERYTHING = Choice()


def overview(states: list[RunState], room: os.terminal_size | None = None, choice: Choice = EVERYTHING) -> str:
    """Return one line per run or group; an empty string if none is chosen.

    Args:
        states: newest first, the runs of a group together.
        room: the size of a terminal; lines fit its width, and only older runs that have ended are left out.
    """
    entries: list[RunState] = []
    for group, runs in _by_group(states):
        entries += runs if group is None else [summary(group, runs)]
    entries = choice.of(entries)
    if not entries:
        return ""
    # the header, the line on omitted runs, and the next prompt
    shown = entries if room is None else _with_room(entries, room.lines - 3)
    lines = _lines(shown)
    if room is not None and max(map(len, lines), default=0) > room.columns:
        lines = [cut(line, room.columns) for line in _narrow_lines(shown, room.columns, _LEAST_ROOM_FOR_METRICS)]
    if left := len(entries) - len(shown):
        lines.append(f"and {left} others that have ended; show all: {program()} status{choice.flags} | less")
    return "\n".join(lines)


def _with_room(entries: list[RunState], count: int) -> list[RunState]:
    alive = sum(is_alive(state.state) for state in entries)
    others = max(0, count - alive)
    shown = []
    for state in entries:
        if is_alive(state.state):
            shown.append(state)
        elif others:
            shown.append(state)
            others -= 1
    return shown


def table(
    states: list[RunState],
    groups: Collection[str] = (),
    room: os.terminal_size | None = None,
    choice: Choice = EVERYTHING,
) -> str:
    """Return all details of each run, and a line for each of these groups after its runs; an empty string without any.

    Args:
        room: the size of a terminal; if a line does not fit its width, the reason and metrics are below it.
    """
    entries: list[RunState] = []
    for group, runs in _by_group(states):
        chosen = choice.of(runs)
        entries += chosen if group is None or group not in groups else [*chosen, summary(group, runs)]
    if not entries:
        return ""
    lines = _lines(entries)
    if room is None or max(map(len, lines)) <= room.columns:
        return "\n".join(lines)
    head, *lines = _narrow_lines([replace(entry, reason="", metrics={}) for entry in entries], room.columns)
    told = [head]
    for line, entry in zip(lines, entries, strict=True):
        told.append(line)
        below = [] if line.startswith(entry.run) else [entry.run]
        for text in filter(None, [*below, _details(entry)]):
            told += textwrap.wrap(text, room.columns, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(told)


def _lines(entries: list[RunState]) -> list[str]:
    return _aligned(cells(entries))


def _narrow_lines(entries: list[RunState], columns: int, least_for_last: int = 0) -> list[str]:
    """Return lines with as many table columns as fit.

    Args:
        least_for_last: minimum width of the last column (reasons and metrics).
    """
    rows = cells(entries)
    if least_for_last or _width(rows, least_for_last) > columns:
        rows = [[_shortened(row[0], columns), *row[1:]] for row in rows]
    for name in _LEFT_OUT_FIRST:
        if _width(rows, least_for_last) <= columns:
            break
        kept = [title != name for title in rows[0]]
        rows = [list(itertools.compress(row, kept)) for row in rows]
    return _aligned(rows)


def _width(rows: list[list[str]], least_for_last: int) -> int:
    """Return the least columns for a table, of which reasons and metrics may be cut."""
    wide = {title: max(map(len, (title, *cells))) for title, *cells in zip(*rows, strict=True)}
    if HEADER[-1] in wide:
        wide[HEADER[-1]] = least_for_last
    return sum(wide.values()) + 2 * (len(wide) - 1)


def cells(entries: list[RunState]) -> list[list[str]]:
    """Return the header and a row for each entry, without empty columns."""
    now = datetime.now(timezone.utc)
    rows = [_row(state, now) for state in entries]
    # plain commands have neither steps nor progress, and room is scarce on a narrow terminal
    return without_empty_columns([HEADER, *rows])


def _aligned(rows: list[list[str]]) -> list[str]:
    from tabulate import tabulate

    # the header is passed as a normal row, because tabulate pads headers
    return [line.rstrip() for line in tabulate(rows, tablefmt="plain", disable_numparse=True).splitlines()]


def _shortened(name: str, columns: int) -> str:
    """Return a name such as `train-imagene...-115015-eb8f`: beginning and end suffice to recognize a run."""
    longest = max(_LONGEST_NAME, columns // 3) if columns >= 72 else _LONGEST_VERY_NARROW
    return cut_middle(name, longest, end=len("-hhmmss-xxxx"))


def _by_group(states: list[RunState]) -> Iterator[tuple[str | None, list[RunState]]]:
    for group, members in itertools.groupby(states, key=lambda state: group_of(state.run)):
        yield group, list(members)


def group_of(run: str) -> str | None:
    return run.rpartition("/")[0] or None


@dataclass(frozen=True, kw_only=True)
class GroupState(RunState):
    """The state of a group: what its runs have in common, and the mean and spread of their metrics."""

    runs: Sequence[RunState] = ()

    def seconds_left(self, now: datetime) -> float | None:
        """Return for about how long the slowest run continues; None if that of a run is unknown."""
        left = [run.seconds_left(now) for run in self.runs if is_alive(run.state)]
        known = [each for each in left if each is not None]
        return max(known) if known and len(known) == len(left) else None


def summary(group: str, runs: list[RunState]) -> GroupState:
    """Return the state of a group."""
    counts = Counter(state.state for state in runs)
    alive = any(is_alive(state) for state in counts)
    totals = {state.total for state in runs}
    return GroupState(
        runs=runs,
        run=group,
        state=overall([state.state for state in runs]),
        attempts=max(state.attempts for state in runs),
        nodes=runs[0].nodes,
        ranks=runs[0].ranks,
        step=min(state.step for state in runs),
        progress=min(state.progress for state in runs),
        total=totals.pop() if len(totals) == 1 else None,
        metrics=spread(runs),
        submitted=runs[0].submitted,
        started=earliest(state.started for state in runs),
        ended=None if alive else latest(state.ended for state in runs),
        reason=f"{counted(len(runs), 'run')}: " + ", ".join(f"{count} {state}" for state, count in counts.items()),
    )


def spread(runs: list[RunState]) -> dict[str, str]:
    """Return the mean and standard deviation of each metric, over the runs that have it."""
    values: dict[str, list[float]] = {}
    for state in runs:
        for name, value in state.metrics.items():
            values.setdefault(name, []).append(float(value))
    return {name: _mean_and_deviation(found) for name, found in values.items()}


def _mean_and_deviation(values: list[float]) -> str:
    if not all(map(math.isfinite, values)):
        # the spread is undefined if a run has diverged
        return short_value(sum(values))
    mean = short_value(statistics.fmean(values))
    return mean if len(values) == 1 else f"{mean}±{statistics.stdev(values):.2g}"


def _row(state: RunState, now: datetime) -> list[str]:
    submitted = time_of(state.submitted)
    started, ended = time_of(state.started), time_of(state.ended)
    left = state.seconds_left(now)
    return [
        state.run,
        state.state,
        str(state.attempts),
        f"{state.nodes}x{state.ranks // state.nodes}",
        _least_and_most(state, "step"),
        _progress(state),
        "" if left is None else duration(left),
        duration((now - submitted).total_seconds()) if submitted else "",
        duration(((ended or now) - started).total_seconds()) if started else "",
        _details(state),
    ]


def _progress(state: RunState) -> str:
    told = _least_and_most(state, "progress")
    return told if state.total is None else f"{told or 0}/{state.total}"


def _least_and_most(state: RunState, name: str) -> str:
    """Return a number of a run, empty for 0; of the runs of a group the least, and the largest one if that differs."""
    found = [getattr(run, name) for run in state.runs] if isinstance(state, GroupState) else [getattr(state, name)]
    least, most = min(found), max(found)
    return (str(least) if least == most else f"{least}-{most}") if most else ""


def _details(state: RunState) -> str:
    metrics = " ".join(f"{name}={short_value(value)}" for name, value in state.metrics.items())
    return "  ".join(filter(None, [state.reason, metrics]))
