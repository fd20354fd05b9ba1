"""The line at the bottom of a terminal that shows how far a run is while its log is followed."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TextIO

from mgpu_slurm.core.formatting import duration, short_value
from mgpu_slurm.registry import sweep_state
from mgpu_slurm.reports.live.status_table import summary
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.run_folder.states import RUNNING, is_alive

WIDTH = 20
"""Characters of a bar."""

# cursor to the start of the line, and the rest of the line erased
_START, _ERASE = "\r", "\x1b[K"


class ProgressLine:
    """Output above a line that is drawn again and again; only output where nothing can be drawn."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        has_terminal = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._is_wanted = has_terminal and not os.environ.get("CI")
        self._drawn = ""
        self._is_at_start = True
        """Whether the output so far ends with a whole line."""

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def write(self, text: str) -> None:
        """Print a part of the output in place of the line."""
        if text:
            self.clear()
            self._is_at_start = text.endswith("\n")
            self._stream.write(text)
            self._stream.flush()

    def draw(self, text: str) -> None:
        """Show the line, unless the cursor is in the middle of one of the output, such as a bar of the job's own."""
        text = text[: shutil.get_terminal_size().columns - 1]
        if self._is_wanted and self._is_at_start and text != self._drawn:
            self._stream.write(f"{_START}{text}{_ERASE}")
            self._stream.flush()
            self._drawn = text

    def clear(self) -> None:
        if self._drawn:
            self._stream.write(f"{_START}{_ERASE}")
            self._stream.flush()
            self._drawn = ""


def of_run(state: RunState) -> str:
    """Return such a line on a run, `[=====>    ] 4/10  step 180  loss 0.08  1.2 s each  left 7s`; empty if it does not
    run, or has reported nothing."""
    if state.state != RUNNING or not (state.step or state.total):
        return ""
    parts = [f"{bar(state.progress, state.total)} {state.progress}/{state.total}"] if state.total else []
    parts += [f"step {state.step}"] if state.step else []
    parts += [f"{name} {short_value(value)}" for name, value in state.metrics.items()]
    parts += [f"{_pace(state.pace[0])} each"] if state.pace else []
    return "  ".join(parts + _left(state))


def of_group(folder: RunFolder, found: Sequence[RunState]) -> str:
    """Return such a line on a group or sweep; empty if it has ended."""
    if not any(is_alive(state.state) for state in found):
        return ""
    if sweep_state.is_sweep(folder):
        sweep = sweep_state.state_of(folder, found)
        ended, total, of = sweep.progress, sum(sweep.trials.values()), "trials"
        parts, left = [f"best {name} {short_value(value)}" for name, value in sweep.metrics.items()], _left(sweep)
    else:
        ended, total, of = sum(not is_alive(state.state) for state in found), len(found), "runs"
        parts, left = [], _left(summary(folder.run, list(found)))
    running = sum(state.state == RUNNING for state in found)
    begin = f"{bar(ended, total)} {ended}/{total} {of}" if total else f"0 {of}"
    return "  ".join([begin, f"{running} running", *parts, *left])


def _pace(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else duration(seconds)


def bar(done: int, total: int) -> str:
    filled = min(WIDTH, WIDTH * max(0, done) // max(1, total))
    head = ">" if filled < WIDTH else ""
    return f"[{'=' * filled + head:<{WIDTH}}]"


def _left(state: RunState) -> list[str]:
    left = state.seconds_left(datetime.now(timezone.utc))
    return [] if left is None else [f"left {duration(math.ceil(left))}"]
