"""Print what commands find, as text or JSON, and follow runs until they end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from mgpu_slurm.core.formatting import printable, program

if TYPE_CHECKING:
    from mgpu_slurm.api import Group, Handle
    from mgpu_slurm.reports.live.log_view import LogView

PROGRAM = "mgpu-slurm"
INTERRUPTED = 130
STILL_ALIVE = 124
"""That of timeout(1)."""


def fail(message: str, code: int) -> NoReturn:
    """Print an error in one line and exit."""
    print(f"{PROGRAM}: {printable(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(code)


def print_note(text: str) -> None:
    """Print what the program is waiting for on standard error, apart from its answer."""
    print(f"{PROGRAM}: {printable(text)}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    from mgpu_slurm.core.files import without_nan

    print(json.dumps(without_nan(value), indent=2), flush=True)


def print_lines(lines: list[str]) -> None:
    """Print lines, of which parts may be names and errors of others."""
    print(printable("\n".join(lines)), flush=True)


def terminal_size() -> os.terminal_size | None:
    """Return the size of the terminal that shows the output, or None if it goes elsewhere."""
    import shutil

    return shutil.get_terminal_size() if sys.stdout.isatty() else None


def how_to_follow(name: str) -> str:
    return f"follow its log: {program()} logs {name} --follow"


def follow_to_the_end(name: str, quiet: bool = False, after_attempt: int = 0, without: Iterable[int] = ()) -> None:
    """Show a run until it ends, then how it ended; exit with 1 if it did not complete."""
    from mgpu_slurm import api

    found = api.find(name)
    follow_run(found, quiet=quiet, after_attempt=after_attempt, without=without)
    if found.state != "COMPLETED":
        sys.exit(1)


def follow_run(
    found: Handle | Group,
    view: LogView | None = None,
    quiet: bool = False,
    after_attempt: int = 0,
    without: Iterable[int] = (),
) -> None:
    """Print the log of a run, or how the runs of a group begin and end, until the end or Ctrl-C.

    Args:
        view: the ranks and lines to show; None for all of rank 0.
    """
    from mgpu_slurm import api
    from mgpu_slurm.core import retry
    from mgpu_slurm.reports.live.follow import ONE_RANK, follow, follow_group
    from mgpu_slurm.reports.live.progress_line import ProgressLine

    view = view or ONE_RANK
    is_group = isinstance(found, api.Group)
    try:
        with ProgressLine(sys.stdout) as screen:
            draw = retry.quiet if quiet else screen.draw
            for text in (
                follow_group(found.files, without, draw) if is_group else follow(found.files, view, after_attempt, draw)
            ):
                if not quiet:
                    screen.write(text)
    except KeyboardInterrupt:
        what = "sweep" if isinstance(found, api.Study) else "run"
        advice = f"cancel it with: {program()} cancel {found.name}"
        print(f"\nstopped following; the {what} continues; {advice}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    if not quiet:
        print_ending(found, shown_ranks=view.ranks if view.is_complete else ())


def print_ending(found: Handle | Group, shown_ranks: Collection[int] = ()) -> None:
    """Print how a run, a group or a sweep has ended.

    Args:
        shown_ranks: ranks whose logs, with their tracebacks, were already printed.
    """
    from mgpu_slurm import api
    from mgpu_slurm.reports import sweep_status
    from mgpu_slurm.reports.live.status_table import table
    from mgpu_slurm.reports.run_summary import curves_lines, ending_lines
    from mgpu_slurm.reports.sink_lines import await_trackers, sink_lines

    await_trackers(found.files, found.all_current)
    if isinstance(found, api.Study):
        print_lines(sweep_status.ending_lines(found.files, found.all_current))
    elif isinstance(found, api.Group):
        lines = [*curves_lines(found.files), *sink_lines(found.files)]
        print_lines([table(found.all_current, {found.name}, terminal_size()), *lines])
    else:
        print_lines(ending_lines(found.folder, found.current, shown_ranks))
