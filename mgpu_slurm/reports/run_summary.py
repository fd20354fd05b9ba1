"""Summarize a run at its end: how it ended, the warnings of its ranks, its results, and where to look next."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from mgpu_slurm.core.files import read_json, read_jsonl
from mgpu_slurm.core.formatting import duration, program, short_path, short_value
from mgpu_slurm.core.hostlist import compress, ranges
from mgpu_slurm.reports.diagnosis import problem_of_result, resumed_name
from mgpu_slurm.reports.sink_lines import sink_lines
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder import failures, records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Failure, RunState
from mgpu_slurm.run_folder.states import CANCELLED, COMPLETED, FAILED, OUT_OF_MEMORY

SHOWN_LINES = 20


@dataclass(frozen=True)
class RankWarning:
    """A problem that one rank found in its environment at its start, for users who follow another rank."""

    attempt: int
    rank: int
    node: str
    text: str


def ending_lines(path: Path, state: RunState, shown_ranks: Collection[int] = ()) -> list[str]:
    """Return the summary of a run that has ended; for a failed one, the traceback of the first cause comes first.

    Args:
        shown_ranks: ranks whose logs, with their tracebacks, were already printed.
    """
    folder = RunFolder(path)
    failure = records.read_failure(folder) if state.state in (FAILED, OUT_OF_MEMORY) else None
    lines = _first_failure(folder, failure, shown_ranks) if failure else []
    lines.append(_headline(state))
    # a later attempt with other resources may have no warnings
    found = [warning for warning in rank_warnings(folder) if warning.attempt == state.attempts]
    lines += [f"warning   {line}" for line in warning_lines(found)]
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


def rank_warnings(folder: RunFolder) -> list[RankWarning]:
    """Return the warnings of all ranks and attempts of a run, in no particular order."""
    found = []
    for path in folder.logs.glob("*.warnings.jsonl"):
        attempt = int(path.name.partition("-")[0])
        found += [RankWarning(attempt, line["rank"], line["node"], line["text"]) for line in read_jsonl(path)]
    return found


def warning_lines(found: Iterable[RankWarning]) -> list[str]:
    """Return lines such as `rank 3 on n2: ...`, one line for all ranks with the same warning."""
    by_text: dict[str, list[RankWarning]] = {}
    for warned in sorted(found, key=lambda warned: (warned.attempt, warned.rank)):
        by_text.setdefault(warned.text, []).append(warned)
    return [f"{_who(same)}: {text}" for text, same in by_text.items()]


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


def _who(same: list[RankWarning]) -> str:
    ranks = sorted({warned.rank for warned in same})
    nodes = list(dict.fromkeys(warned.node for warned in same))
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)} on {compress(nodes)}"
