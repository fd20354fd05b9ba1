"""`status`: what is shown of runs, groups and sweeps, once or again and again."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence

from mgpu_slurm.core import states
from mgpu_slurm.core.formatting import counted, program
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.registry import lookup, sweep_state
from mgpu_slurm.registry.current_state import State
from mgpu_slurm.registry.watch import Watch
from mgpu_slurm.reports import status
from mgpu_slurm.reports import sweep_status as studies

Found = Sequence[tuple[RunFolder, State]]

WATCH_PAUSE = 2.0
"""Seconds between two looks."""

# each line is written over the old one, so that nothing flickers
_HOME, _NEXT_LINE, _NOTHING_BELOW = "\x1b[H", "\x1b[K\n", "\x1b[J"


def as_one(found: Found, asked: Sequence[RunFolder] = ()) -> list[State]:
    """States of runs, each once, with the workers of a sweep as one, unless it was a worker that was asked for."""
    single = [folder.group for folder in asked if folder.task is not None]
    return sweep_state.as_one(list(dict(found).items()), without=single)


def lines(found: Found, asked: Sequence[RunFolder], room: os.terminal_size | None) -> list[str]:
    """For people.

    Args:
        asked: what was named; nothing for an overview of all.
        room: of a terminal.
    """
    if not asked:
        shown = as_one(found)
        return [status.overview(shown, room)] if shown else [f"no runs yet: start one with `{program()} submit`"]
    told: list[str] = []
    named = [folder for folder in dict.fromkeys(asked) if sweep_state.is_sweep(folder)]
    for folder in named:
        workers = [state for member, state in dict(found).items() if member.group == folder]
        told += [*studies.lines(folder, workers, room.columns if room else None), ""]
    others = [state for folder, state in dict(found).items() if folder.group not in named]
    if others:
        told += status.table(others, {folder.run for folder in asked}, room).splitlines()
    return told if others else told[:-1]


def fitting(told: list[str], room: os.terminal_size) -> list[str]:
    """What of it there is room for: what comes first, and how much is left out."""
    # the last line is the cursor's
    height = max(2, room.lines - 1)
    if len(told) <= height:
        return told
    kept = told[: height - 1]
    return [*kept, f"... {counted(len(told) - len(kept), 'more line')}, for a taller window"[: room.columns]]


def show(asked: Sequence[RunFolder], note: Note = quiet) -> None:
    """Shows runs, all of them where none is named, until they have ended.

    Args:
        note: hears that a cluster does not answer; on a terminal that is a line of the screen.
    """
    is_terminal = sys.stdout.isatty()
    hears = quiet if is_terminal else note
    watches = {folder: Watch(folder, hears) for folder in asked or lookup.all_groups(note)}
    while True:
        found = [pair for watch in watches.values() for pair in watch.pairs()]
        if is_terminal:
            problems = list(dict.fromkeys(watch.problem for watch in watches.values() if watch.problem is not None))
            room = shutil.get_terminal_size()
            # first: the end may not fit
            shown = [f"({problem})"[: room.columns] for problem in problems] + lines(found, asked, room)
            screen = "".join(f"{line}{_NEXT_LINE}" for line in fitting(shown, room))
            print(f"{_HOME}{screen}{_NOTHING_BELOW}", end="", flush=True)
        else:
            print("\n".join(lines(found, asked, None)), flush=True)
        if not any(states.is_alive(state["state"]) for _, state in found):
            return
        time.sleep(WATCH_PAUSE)
