"""The last words on a run: how it ended, what came out, and where to look next."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from mgpu_slurm.core import failures
from mgpu_slurm.core.files import read_json
from mgpu_slurm.core.formatting import duration, program, short_path
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.core.states import FAILED, OUT_OF_MEMORY
from mgpu_slurm.reports.rank_warnings import told, warnings

SHOWN_LINES = 20


def ending_lines(path: Path, state: dict[str, Any], shown_rank: int | None = None) -> list[str]:
    """What a person wants to read when a run is over; a failed one shows the traceback of its first cause first.

    Args:
        shown_rank: the rank whose log, with its traceback, is already on the screen.
    """
    folder = RunFolder(path)
    failure = read_json(folder.failure) if state["state"] in (FAILED, OUT_OF_MEMORY) else None
    lines = _first_failure(folder, failure, shown_rank) if failure else []
    lines.append(_headline(state))
    # an attempt with other resources may have none
    lines += [f"warning   {line}" for line in told(w for w in warnings(folder) if w.attempt == state["attempts"])]
    result = read_json(folder.result) if state["state"] == "COMPLETED" else None
    if result is not None:
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in result["result"].items())
        if numbers:
            lines.append(f"result    {numbers}  ({short_path(folder.result)})")
    if folder.tensorboard.is_dir():
        lines.append(_curves_line(folder))
    if failure is not None:
        lines.append(f"why       {program()} why {state['run']}")
    if state["state"] != "COMPLETED" and any(folder.logs.glob("*")):
        lines.append(f"logs      {short_path(folder.logs)}/")
        if any(folder.checkpoints.glob("step-*")):
            lines.append(f"go on     {program()} resume {state['run']}{_whose_code(failure)}")
    return lines


def _whose_code(failure: dict[str, Any] | None) -> str:
    # what the program did it would do again
    if failure is not None and failures.cause_of(failure) in (failures.PROGRAM, failures.IMPORT):
        return " --code new   (once it is mended; from its newest checkpoint)"
    return "   (its own code, from its newest checkpoint)"


def curves_lines(group: RunFolder) -> list[str]:
    """How to see the curves of a group, where it has any."""
    return [_curves_line(group)] if any(group.path.glob("tasks/*/tensorboard")) else []


def _curves_line(folder: RunFolder) -> str:
    return f"curves    {program()} tensorboard {folder.run}"


def _first_failure(folder: RunFolder, failure: dict[str, Any], shown_rank: int | None) -> list[str]:
    """Return the traceback of what failed first, or the end of its log if it left none; nothing if that is on the
    screen."""
    # who left a record, if any did, and not whose process ended first
    who = f"rank {failure['rank']}" if "rank" in failure else failure["who"]
    if who == f"rank {shown_rank}":
        return []
    if "traceback" in failure:
        place = f" on {failure['node']}" if "node" in failure else ""
        return [f"-- {who}{place} failed first:", failure["traceback"].rstrip()]
    return _end_of_log(folder, failure["attempt"], who) if who.startswith("rank ") else []


def _end_of_log(folder: RunFolder, attempt: int, who: str) -> list[str]:
    log = folder.rank_log(attempt, int(who.removeprefix("rank ")))
    text = log.read_text(errors="replace").rstrip() if log.exists() else ""
    return [f"-- {who} failed first; the end of its log:", *text.split("\n")[-SHOWN_LINES:]] if text else []


def _headline(state: dict[str, Any]) -> str:
    words = f"{state['state']}  {state['run']}"
    if state.get("started") and state.get("ended"):
        seconds = (datetime.fromisoformat(state["ended"]) - datetime.fromisoformat(state["started"])).total_seconds()
        words += f"  in {duration(seconds)}"
    if state["attempts"] > 1:
        words += f", {state['attempts']} attempts"
    return words + (f": {state['reason']}" if state["reason"] else "")
