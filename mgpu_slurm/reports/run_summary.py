"""Summarize a run at its end: how it ended, the warnings of its ranks, its results, and where to look next."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from pathlib import Path

from mgpu_slurm.core.files import read_json
from mgpu_slurm.core.formatting import duration, program, short_path, short_value
from mgpu_slurm.reports.diagnosis import problem_of_result, resumed_name
from mgpu_slurm.reports.sink_lines import sink_lines
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder import failures, rank_warnings, records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Failure, RunState
from mgpu_slurm.run_folder.states import CANCELLED, COMPLETED, FAILED, OUT_OF_MEMORY

SHOWN_LINES = 20


def ending_lines(path: Path, state: RunState, shown_ranks: Collection[int] = ()) -> list[str]:
    """Return the summary of a run that has ended; for a failed one, the traceback of the first cause comes first.

    Args:
        shown_ranks: ranks whose logs, with their tracebacks, were already printed.
    """
    folder = RunFolder(path)
    failure = records.read_failure(folder) if state.state in (FAILED, OUT_OF_MEMORY) else None
    lines = _first_failure(folder, failure, shown_ranks) if failure else []
    lines.append(_headline(state))
    warned = rank_warnings.of_attempt(folder, state.attempts)
    lines += [f"warning   {line}" for line in rank_warnings.lines(warned)]
    result = read_json(folder.result) if state.state == COMPLETED else None
    if result is not None:
        numbers = "  ".join(f"{name} {short_value(value)}" for name, value in result["result"].items())
        if numbers:
            lines.append(f"result    {numbers}  ({short_path(folder.result)})")
        problem = problem_of_result(folder, state)
        if problem is not None:
            lines.append(f"warning   {problem}: {program()} why {state.run}")
    if folder.tensorboard.is_dir():
        lines.append(_curves_line(folder))
    lines += sink_lines(folder)
    if folder.profile.is_dir():
        lines.append(f"profile   {program()} profile {state.run}")
    if state.state not in (COMPLETED, CANCELLED) or failures.cause_of_reason(state.reason) is not None:
        lines.append(f"why       {program()} why {state.run}")
    if state.state != COMPLETED and any(folder.logs.glob("*")):
        lines.append(f"logs      {short_path(folder.logs)}/")
        if any(folder.checkpoints.glob("step-*")):
            lines.append(_resume_line(folder, failure))
    return lines


def curves_lines(group: RunFolder) -> list[str]:
    """Return how to see the curves of a group, if it has any."""
    return [_curves_line(group)] if any(group.path.glob("tasks/*/tensorboard")) else []


def _resume_line(folder: RunFolder, failure: Failure | None) -> str:
    spec = read_spec(folder)
    # an error of the program would occur again
    own = (failures.PROGRAM, failures.IMPORT, failures.GPU_MEMORY)
    is_new_code = failure is not None and failures.cause_of(failure) in own
    # a function that was given as an object has no other code
    is_new_code = is_new_code and spec.target.pickled is None
    words = " --code new   (after fixing the code; continues" if is_new_code else "   (same code,"
    return f"resume    {program()} resume {resumed_name(folder, spec, is_new_code)}{words} from the newest checkpoint)"


def _curves_line(folder: RunFolder) -> str:
    return f"curves    {program()} tensorboard {folder.run}"


def _first_failure(folder: RunFolder, failure: Failure, shown_ranks: Collection[int]) -> list[str]:
    """Return the traceback of the first failure, or else the end of its log; empty if it was already printed."""
    # prefer a rank with a failure record over the one whose process ended first
    who = failure.who if failure.rank is None else f"rank {failure.rank}"
    if who in [f"rank {rank}" for rank in shown_ranks]:
        return []
    if failure.traceback is not None:
        place = "" if failure.node is None else f" on {failure.node}"
        if any(_traceback(folder, failure.attempt, rank) == failure.traceback for rank in shown_ranks):
            return [f"-- {who}{place} failed first, in the same way"]
        return [f"-- {who}{place} failed first:", failure.traceback.rstrip()]
    return _end_of_log(folder, failure.attempt, who) if who.startswith("rank ") else []


def _traceback(folder: RunFolder, attempt: int, rank: int) -> str | None:
    record = read_json(folder.rank_failure(attempt, rank))
    return Failure.from_json(record).traceback if record else None


def _end_of_log(folder: RunFolder, attempt: int, who: str) -> list[str]:
    log = folder.rank_log(attempt, int(who.removeprefix("rank ")))
    text = log.read_text(errors="replace").rstrip() if log.exists() else ""
    return [f"-- {who} failed first; the end of its log:", *text.split("\n")[-SHOWN_LINES:]] if text else []


def _headline(state: RunState) -> str:
    words = f"{state.state}  {state.run}"
    if state.started and state.ended:
        seconds = (datetime.fromisoformat(state.ended) - datetime.fromisoformat(state.started)).total_seconds()
        words += f"  in {duration(seconds)}"
    if state.attempts > 1:
        words += f", {state.attempts} attempts"
    return words + (f": {state.reason}" if state.reason else "")
