"""The state of runs, groups and sweeps: human-readable, once or repeatedly, and as facts for programs."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import statistics
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import counted, cut, duration, program, short_value, time_of
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.registry import lookup, sweep_state
from mgpu_slurm.registry.watch import Watch
from mgpu_slurm.reports import sweep_status
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.run_folder.records import read_memory, read_state
from mgpu_slurm.run_folder.states import is_alive, overall

Found = Sequence[tuple[RunFolder, RunState]]

FACTS = (
    "run",
    "kind",
    "state",
    "job_id",
    "attempts",
    "nodes",
    "ranks",
    "step",
    "progress",
    "metrics",
    "curves",
    "submitted",
    "started",
    "ended",
    "reason",
)
"""The keys of each run in `status --json`, with `group`; programs rely on them."""

HEADER = ["RUN", "STATE", "ATTEMPT", "RANKS", "STEP", "PROGRESS", "AGE", "TIME", "REASON, METRICS"]

WATCH_PAUSE = 2.0
"""Seconds between two looks."""

_LEFT_OUT_FIRST = ("AGE", "RANKS", "ATTEMPT", "STEP", "TIME", "PROGRESS")
"""Columns that are left out on a narrow terminal, in this order."""
_LEAST_ROOM_FOR_METRICS = 16
_LONGEST_NAME = 28
"""Maximum length of a run's name on a narrow terminal; its middle is left out."""

# each line overwrites the old one, so that nothing flickers
_HOME, _NEXT_LINE, _NOTHING_BELOW = "\x1b[H", "\x1b[K\n", "\x1b[J"


def facts(state: RunState) -> dict[str, Any]:
    """Return the machine-readable state; for a sweep also its trials, its best trial and its workers."""
    found = {name: getattr(state, name) for name in FACTS}
    found |= {"curves": state.curves or {}, "group": _group(state.run)}
    if isinstance(state, sweep_state.SweepState):
        found |= {
            "trials": state.trials,
            "best": state.best and state.best.to_json(),
            "front": [trial.to_json() for trial in state.front],
            "workers": list(map(facts, state.workers)),
        }
    return found


def as_one(found: Found, asked: Sequence[RunFolder] = ()) -> list[RunState]:
    """Return the state of each run once, with a sweep's workers merged into one unless single ones were asked for."""
    single = [folder.group for folder in asked if folder.task is not None]
    return sweep_state.as_one(list(dict(found).items()), without=single)


def lines(found: Found, asked: Sequence[RunFolder], room: os.terminal_size | None) -> list[str]:
    """Return the human-readable lines.

    Args:
        asked: the named runs; empty for an overview of all.
        room: the size of a terminal.
    """
    if not asked:
        shown = as_one(found)
        return [overview(shown, room)] if shown else [f"no runs yet: start one with `{program()} submit`"]
    told: list[str] = []
    named = [folder for folder in dict.fromkeys(asked) if sweep_state.is_sweep(folder)]
    for folder in named:
        workers = [state for member, state in dict(found).items() if member.group == folder]
        told += [*sweep_status.lines(folder, workers, room.columns if room else None), ""]
    others = [state for folder, state in dict(found).items() if folder.group not in named]
    if others:
        told += table(others, {folder.run for folder in asked}, room).splitlines()
        told += [line for folder in asked if folder not in named for line in _model_lines(folder, len(asked) > 1)]
    return told if others else told[:-1]


def _model_lines(folder: RunFolder, is_named: bool) -> list[str]:
    """Return lines with the options for sharing the model, the speed of a run, and how many samples fit into memory, as
    far as it has them."""
    told = []
    with suppress(UserError):
        if (parallelism := read_spec(folder).parallelism).given:
            told.append(f"strategy  {parallelism.words}")
    if curves := read_state(folder).curves:
        told.append(f"speed     {_speed(curves)}")
    if (memory := read_memory(folder)) is not None:
        # the whole layout, of which most runs use little
        place = ", ".join(each for each in memory.of.split(", ") if not each.endswith(" 1"))
        told.append(f"memory    {counted(memory.samples, 'sample')} at once fit ({place})")
    return [f"{line}  ({folder.run})" for line in told] if is_named else told


def _speed(curves: Mapping[str, float]) -> str:
    """Return how fast steps were at the last report, and what they waited for."""
    parts = [f"{_step(curves['speed/step_seconds'])} a step"]
    if samples := curves.get("speed/samples_per_second"):
        parts.append(f"{_rate(samples)} samples/s")
    if tokens := curves.get("speed/tokens_per_second"):
        parts.append(f"{_rate(tokens)} tokens/s")
    if (wait := curves.get("speed/data_wait")) is not None:
        parts.append(f"waits for data {wait:.0%}")
    if (wait := curves.get("speed/communication_wait")) is not None:
        parts.append(f"for other ranks {wait:.0%}")
    if (utilization := curves.get("speed/mfu")) is not None:
        parts.append(f"MFU {utilization:.0%}")
    if power := curves.get("gpu/power_watts"):
        parts.append(f"GPUs busy {curves['gpu/utilization']:.0%} at {power:.0f} W")
    if reserved := curves.get("memory/peak_reserved_gib"):
        parts.append(f"peak {curves['memory/peak_allocated_gib']:.1f} GiB, {reserved:.1f} reserved")
    return "  ".join(parts)


def _step(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{1e3 * seconds:.3g} ms"


def _rate(count: float) -> str:
    return f"{count:,.0f}" if count >= 1000 else f"{count:.4g}"


def fitting(told: list[str], room: os.terminal_size) -> list[str]:
    """Return the lines that fit, and a line with the number of those left out."""
    # the last line is for the cursor
    height = max(2, room.lines - 1)
    if len(told) <= height:
        return told
    kept = told[: height - 1]
    return [*kept, f"... {counted(len(told) - len(kept), 'more line')} (enlarge the window)"[: room.columns]]


def show(asked: Sequence[RunFolder], note: Note = quiet) -> None:
    """Show runs, all of them if none is named, until they have ended.

    Args:
        note: called if a cluster does not answer; on a terminal, the message is a line of the screen.
    """
    is_terminal = sys.stdout.isatty()
    hears = quiet if is_terminal else note
    watches = {folder: Watch(folder, hears) for folder in asked or lookup.all_groups(note)}
    while True:
        found = [pair for watch in watches.values() for pair in watch.pairs()]
        if is_terminal:
            problems = list(dict.fromkeys(watch.problem for watch in watches.values() if watch.problem is not None))
            room = shutil.get_terminal_size()
            # problems come first, because the end may not fit
            shown = [f"({problem})"[: room.columns] for problem in problems] + lines(found, asked, room)
            screen = "".join(f"{line}{_NEXT_LINE}" for line in fitting(shown, room))
            print(f"{_HOME}{screen}{_NOTHING_BELOW}", end="", flush=True)
        else:
            print("\n".join(lines(found, asked, None)), flush=True)
        if not any(is_alive(state.state) for _, state in found):
            return
        time.sleep(WATCH_PAUSE)


def overview(states: list[RunState], room: os.terminal_size | None = None) -> str:
    """Return one line per run or group.

    Args:
        states: newest first, the runs of a group together.
        room: the size of a terminal; lines fit its width, and only older runs that have ended are left out.
    """
    entries = []
    for group, runs in _by_group(states):
        entries += runs if group is None else [summary(group, runs)]
    # the header, the line on omitted runs, and the next prompt
    shown = entries if room is None else _with_room(entries, room.lines - 3)
    lines = _lines(shown)
    if room is not None and max(map(len, lines)) > room.columns:
        lines = [cut(line, room.columns) for line in _narrow_lines(shown, room.columns, _LEAST_ROOM_FOR_METRICS)]
    if left := len(entries) - len(shown):
        lines.append(f"and {left} older ones that have ended; show all: {program()} status | less")
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


def table(states: list[RunState], groups: Collection[str] = (), room: os.terminal_size | None = None) -> str:
    """Return all details of each run, and a line for each of these groups after its runs.

    Args:
        room: the size of a terminal; if a line does not fit its width, the reason and metrics are below it.
    """
    entries = []
    for group, runs in _by_group(states):
        entries += runs if group is None or group not in groups else [*runs, summary(group, runs)]
    lines = _lines(entries)
    if room is None or max(map(len, lines)) <= room.columns:
        return "\n".join(lines)
    head, *lines = _narrow_lines([replace(entry, reason="", metrics={}) for entry in entries], room.columns)
    told = [head]
    for line, entry in zip(lines, entries, strict=True):
        told.append(line)
        below = [entry.run] if _shortened(entry.run) != entry.run else []
        for text in filter(None, [*below, _details(entry)]):
            told += textwrap.wrap(text, room.columns, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(told)


def _lines(entries: list[RunState]) -> list[str]:
    return _aligned(_rows(entries))


def _narrow_lines(entries: list[RunState], columns: int, least_for_last: int = 0) -> list[str]:
    """Return lines with as many table columns as fit.

    Args:
        least_for_last: minimum width of the last column (reasons and metrics).
    """
    rows = [[_shortened(row[0]), *row[1:]] for row in _rows(entries)]
    for name in _LEFT_OUT_FIRST:
        # reasons and metrics may be cut
        wide = {title: max(map(len, (title, *cells))) for title, *cells in zip(*rows, strict=True)}
        if HEADER[-1] in wide:
            wide[HEADER[-1]] = least_for_last
        if sum(wide.values()) + 2 * (len(wide) - 1) <= columns:
            break
        kept = [title != name for title in rows[0]]
        rows = [list(itertools.compress(row, kept)) for row in rows]
    return _aligned(rows)


def _rows(entries: list[RunState]) -> list[list[str]]:
    """Return the header and a row for each entry, without empty columns."""
    now = datetime.now(timezone.utc)
    rows = [_row(state, now) for state in entries]
    # plain commands have neither steps nor progress, and room is scarce on a narrow terminal
    filled = [any(row[place] for row in rows) for place in range(len(HEADER))]
    return [list(itertools.compress(row, filled)) for row in (HEADER, *rows)]


def _aligned(rows: list[list[str]]) -> list[str]:
    from tabulate import tabulate

    # the header is passed as a normal row, because tabulate pads headers
    return [line.rstrip() for line in tabulate(rows, tablefmt="plain", disable_numparse=True).splitlines()]


def _shortened(name: str) -> str:
    """Return a name such as `train-imagene...-115015-eb8f`: beginning and end suffice to recognize a run."""
    if len(name) <= _LONGEST_NAME:
        return name
    end = len("-hhmmss-xxxx")
    return f"{name[: _LONGEST_NAME - end - 3]}...{name[-end:]}"


def _by_group(states: list[RunState]) -> Iterator[tuple[str | None, list[RunState]]]:
    for group, members in itertools.groupby(states, key=lambda state: _group(state.run)):
        yield group, list(members)


def _group(run: str) -> str | None:
    return run.rpartition("/")[0] or None


def summary(group: str, runs: list[RunState]) -> RunState:
    """Return the state of a group: what its runs have in common, and the mean and spread of their metrics."""
    counts = Counter(state.state for state in runs)
    alive = any(is_alive(state) for state in counts)
    ends = [state.ended for state in runs if state.ended]
    return RunState(
        run=group,
        state=overall([state.state for state in runs]),
        attempts=max(state.attempts for state in runs),
        nodes=runs[0].nodes,
        ranks=runs[0].ranks,
        step=min(state.step for state in runs),
        progress=min(state.progress for state in runs),
        metrics=spread(runs),
        submitted=runs[0].submitted,
        started=min((state.started for state in runs if state.started), default=None),
        ended=None if alive else max(ends, default=None),
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
        return f"{sum(values):.4g}"
    mean = f"{statistics.fmean(values):.4g}"
    return mean if len(values) == 1 else f"{mean}±{statistics.stdev(values):.2g}"


def _row(state: RunState, now: datetime) -> list[str]:
    submitted = time_of(state.submitted)
    started, ended = time_of(state.started), time_of(state.ended)
    return [
        state.run,
        state.state,
        str(state.attempts),
        f"{state.nodes}x{state.ranks // state.nodes}",
        str(state.step or ""),
        str(state.progress or ""),
        duration((now - submitted).total_seconds()) if submitted else "",
        duration(((ended or now) - started).total_seconds()) if started else "",
        _details(state),
    ]


def _details(state: RunState) -> str:
    metrics = " ".join(f"{name}={short_value(value)}" for name, value in state.metrics.items())
    return "  ".join(filter(None, [state.reason, metrics]))
