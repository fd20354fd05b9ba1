"""The screen of `status --watch`: the state of runs, drawn again until they have ended."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence

from mgpu_slurm.core.formatting import counted, printable
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.registry import lookup
from mgpu_slurm.registry.watch import Watch
from mgpu_slurm.reports.live.status import lines
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.states import is_alive

WATCH_PAUSE = 2.0
"""Seconds between two looks."""

# each line overwrites the old one, so that nothing flickers
_HOME, _NEXT_LINE, _NOTHING_BELOW = "\x1b[H", "\x1b[K\n", "\x1b[J"


def fitting(told: list[str], room: os.terminal_size) -> list[str]:
    """Return the lines that fit, and a line with the number of those left out."""
    # the last line is for the cursor
    height = max(2, room.lines - 1)
    if len(told) <= height:
        return told
    kept = told[: height - 1]
    return [*kept, f"... {counted(len(told) - len(kept), 'more line')} (enlarge the window)"[: room.columns]]


def show(asked: Sequence[RunFolder], note: Note = quiet, filters: Sequence[str] = (), sort: str | None = None) -> None:
    """Show runs, all of them if none is named, until they have ended.

    Args:
        note: called if a cluster does not answer; on a terminal, the message is a line of the screen.
        filters: see `Choice`, as for `sort`.
    """
    is_terminal = sys.stdout.isatty()
    hears = quiet if is_terminal else note
    # one watch, so that one request to SLURM serves all runs
    watch = Watch(*(asked or lookup.all_groups(note)), note=hears, may_vanish=not asked)
    while True:
        found = watch.pairs()
        if is_terminal:
            problems = [] if watch.problem is None else [watch.problem]
            room = shutil.get_terminal_size()
            # problems come first, because the end may not fit
            shown = [f"({problem})"[: room.columns] for problem in problems] + lines(found, asked, room, filters, sort)
            screen = "".join(f"{printable(line)}{_NEXT_LINE}" for line in fitting(shown, room))
            print(f"{_HOME}{screen}{_NOTHING_BELOW}", end="", flush=True)
        else:
            print(printable("\n".join(lines(found, asked, None, filters, sort))), flush=True)
        if not any(is_alive(state.state) for _, state in found):
            return
        time.sleep(WATCH_PAUSE)
