"""Diagnose why a run ended or restarted: the first cause in plain words, and how to fix it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mgpu_slurm.core import log_lines
from mgpu_slurm.core.errors import CollectiveMismatch, MgpuError
from mgpu_slurm.core.files import end_of, read_json
from mgpu_slurm.core.formatting import counted, first_line, program, short_path, time_of
from mgpu_slurm.core.hostlist import ranges
from mgpu_slurm.registry import dependencies, sweep_state
from mgpu_slurm.reports import attempts, flight_records, sweep_status, waiting
from mgpu_slurm.request.spec import Spec, read_spec
from mgpu_slurm.run_folder import failures, rank_warnings, records, states
from mgpu_slurm.run_folder.failures import Cause
from mgpu_slurm.run_folder.layout import DAMAGED, RunFolder
from mgpu_slurm.run_folder.record_types import Failure, RunState
from mgpu_slurm.submission import missing

SHOWN_LINES = 5
"""Number of a rank's last lines that are shown."""

SHOWN_WARNINGS = 2

_NOT_FOUND = re.compile(r"FileNotFoundError|No such file or directory|not found|does not exist")
_TYPED = re.compile(r"<(?:stdin|string|i?python-input.*)>|.*/ipykernel_\d+/")
"""Files of functions typed into Python or a notebook; other code without a file is a library's."""
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)')
_STACK_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
"""A frame as faulthandler writes it."""

_COMMAND = re.compile(r"`(?:mgpu-slurm )?(resume|clean|doctor|submit|sweep)(?P<run> RUN)?(?P<new> --code new)?\b")
"""A command in the fix of a cause."""
_CONTINUES = re.compile(r"`resume` continues(?: from the newest checkpoint)?")


@dataclass(frozen=True)
class Why:
    """The first cause of an end."""

    cause: Cause
    fix: str
    """How to fix it."""
    attempt: int | None
    who: str
    """`rank 1`, or whatever else failed first; empty if unknown."""
    node: str | None
    time: str | None
    """ISO 8601 with the time zone."""
    error: str
    """The error message, in one line."""
    line: str | None
    """The line of the program's own code: `train.py:12 in train`."""
    lagged: str | None
    """Which rank did not reach a collective, according to torch's flight recorders."""
    log: str | None
    """The log with more details."""


def why(folder: RunFolder, state: RunState) -> Why | None:
    """Return why a run is not complete; None if it is, or has had no failure so far.

    Args:
        state: its current state.
    """
    if state.state == states.COMPLETED:
        return None
    failure = records.read_failure(folder)
    of_state = failures.cause_of_reason(state.reason) or failures.cause_of_state(state.state)
    # SLURM's reason for the end takes precedence over the ranks' errors, except for a rank that took too much memory
    if failure is None or (of_state is not None and of_state is not failures.HOST_MEMORY):
        return _of_state(folder, state, of_state)
    cause = failures.cause_of(failure, records.said_last(folder, failure))
    if cause is failures.KILLED and failure.oom_kills:
        # likely, not certain: other processes count too, so this does not prevent a retry
        cause = failures.HOST_MEMORY
    if cause is failures.TERMINATED and states.is_alive(state.state):
        # SLURM ended the ranks, and restarts them
        return None
    if of_state is not None:
        cause = of_state
    elif _had_returned(folder, failure.attempt):
        cause = failures.AFTER_THE_END
    return _of_failure(folder, failure, cause, state)


def _of_state(folder: RunFolder, state: RunState, cause: Cause | None) -> Why | None:
    if states.is_alive(state.state):
        return None
    preemptors = attempts.last_preemptors(folder, state) if cause is failures.PREEMPTED else ""
    if cause is None:
        # a batch step that exists records how its attempt ended
        is_unseen = state.attempts and _end_of_attempt(folder, state.attempts) is None
        cause = failures.SUPERVISOR if is_unseen else failures.UNKNOWN
    said = attempts.said_of(folder) if cause in (failures.TIME_LIMIT, failures.NO_CHECKPOINT_IN_TIME) else ""
    if cause is failures.DEPENDENCY:
        said = _waited_for(folder)
    return Why(
        cause,
        _fix(cause, folder),
        attempt=state.attempts or None,
        who="",
        node=None,
        time=state.ended,
        error="; ".join(
            dict.fromkeys(filter(None, [state.reason, said, preemptors and f"then {preemptors} started there"]))
        ),
        line=None,
        lagged=None,
        log=_launch_log(folder, state),
    )


def _waited_for(folder: RunFolder) -> str:
    """Return the run that a run waited for in vain; empty if unknown."""
    try:
        return dependencies.standing(read_spec(folder).after).broken
    except MgpuError:
        return ""


def _of_failure(folder: RunFolder, failure: Failure, cause: Cause, state: RunState) -> Why:
    rank = failure.who.removeprefix("rank ") if failure.rank is None else str(failure.rank)
    log = folder.rank_log(failure.attempt, int(rank)) if rank.isdigit() else None
    has_log = log is not None and log.exists()
    return Why(
        cause,
        _left_out(failure, folder) or _fix(cause, folder),
        attempt=failure.attempt,
        who=f"rank {rank}" if rank.isdigit() else failure.who,
        node=failures.node_of(failure, cause),
        time=failure.time or _end_of_attempt(folder, failure.attempt),
        error=failure.message if failure.error is None else f"{failure.error}: {first_line(failure.message)}",
        line=_lines_of_all(folder, failure) or _own_line(_traceback(folder, failure), folder),
        lagged=flight_records.lagging(folder, failure.attempt),
        log=short_path(log) if log is not None and has_log else _launch_log(folder, state),
    )


def _fix(cause: Cause, folder: RunFolder) -> str:
    """Return how to fix a cause, with commands that can be copied."""
    fix, spec = cause.fix, read_spec(folder)
    if spec.kind == "sweep" and "resume" in fix and _has_completed(folder.group):
        return "nothing is left to do: the sweep has completed"
    if not records.attempts_started(folder):
        fix = _CONTINUES.sub("`resume` submits it again", fix)
    elif spec.kind == "run" and not spec.target.is_command and not any(folder.checkpoints.glob("step-*")):
        # a command stores its checkpoints anywhere
        saved = "a run saves what you pass to `run.restore`"
        fix = _CONTINUES.sub(f"`resume` starts from the beginning, as no checkpoint was written ({saved})", fix)
    if spec.target.pickled is not None:
        # a function that was given as an object has no other code
        fix = fix.replace(" to continue from the newest checkpoint, or submit again to start over", "")
        fix = fix.replace("`resume --code new`", "submit it again")
    return _COMMAND.sub(lambda found: _command(found, folder, spec), fix)


def _has_completed(sweep: RunFolder) -> bool:
    workers = [state for _, state in records.read_states(sweep)]
    return sweep_state.overall(workers, sweep_state.summary_of(sweep, workers)) == states.COMPLETED


def _command(found: re.Match[str], folder: RunFolder, spec: Spec) -> str:
    words = f"`{program()} {found[1]}"
    if found[1] == "resume" or found["run"]:
        words += f" {resumed_name(folder, spec, is_new_code=found['new'] is not None)}"
    return words + (found["new"] or "")


def resumed_name(folder: RunFolder, spec: Spec, is_new_code: bool) -> str:
    """Return the name to resume a run by: a sweep's workers are resumed together, and runs of a group share code."""
    return folder.group.run if is_new_code or spec.kind != "run" else folder.run


def _left_out(failure: Failure, folder: RunFolder) -> str | None:
    """Return how to fix a missing file that exists in the project."""
    said = f"{failure.error or ''}: {failure.message}"
    if not _NOT_FOUND.search(said):
        return None
    spec = read_spec(folder)
    found = missing.left_out_in(said, spec.original, folder.group.code / spec.workdir)
    return None if found is None else missing.advice(found)


def _traceback(folder: RunFolder, failure: Failure) -> str:
    return failure.traceback or records.said_last(folder, failure)


def _lines_of_all(folder: RunFolder, failure: Failure) -> str | None:
    """Return the lines of ranks that made different calls: it is unknown which of them was wrong."""
    if failure.error != CollectiveMismatch.__name__:
        return None
    ranks_at: dict[str, list[int]] = {}
    for path in folder.logs.glob(f"{failure.attempt}-*.failure.json"):
        record = Failure.from_json(read_json(path) or {})
        line = _own_line(record.traceback or "", folder)
        if record.error == failure.error and record.rank is not None and line is not None:
            ranks_at.setdefault(line, []).append(record.rank)
    found = sorted(ranks_at.items(), key=lambda each: min(each[1]))
    return "; ".join(f"{line} (rank {ranges(sorted(at))})" for line, at in found) or None


def _had_returned(folder: RunFolder, attempt: int) -> bool:
    """Return whether this attempt has a result, which means that the job function had returned."""
    starts = [each for each in records.events(folder) if each.event == "started" and each.attempt == attempt]
    result = read_json(folder.result)
    began = time_of(starts[-1].time) if starts else None
    ended = time_of(result["ended"]) if result is not None else None
    return began is not None and ended is not None and ended >= began


def _end_of_attempt(folder: RunFolder, attempt: int) -> str | None:
    ends = [each for each in records.events(folder) if each.event == "ended" and each.attempt == attempt]
    return ends[-1].time if ends else None


def _own_line(traceback: str, folder: RunFolder) -> str | None:
    """Return the innermost line of the run's own code in the traceback, or of a function that was typed in."""
    # the path of a script's folder may contain a link
    codes = (f"{folder.group.code}/", f"{os.path.realpath(folder.group.code)}/")
    frames = _crashed_frames(traceback) or list(_FRAME.finditer(traceback))
    own = [match for match in frames if match["file"].startswith(codes) or match["file"][:1] not in "/<"]
    typed = [match for match in frames if _TYPED.match(match["file"])]
    if not (own or typed):
        return None
    frame = (own or typed)[-1]
    file = frame["file"].removeprefix(codes[0]).removeprefix(codes[1])
    return f"{file}:{frame['line']} in {frame['function'].strip()}"


def _crashed_frames(text: str) -> list[re.Match[str]]:
    """Return the frames of the thread that crashed in native code, innermost last; none if an error came after it."""
    _, crashed, after = text.rpartition(failures.CRASHED)
    if not crashed or "Traceback (most recent call last)" in after:
        return []
    stacks = {block.partition(" ")[0]: [*_STACK_FRAME.finditer(block)] for block in after.split("\n\n")}
    # faulthandler writes the main thread last; a thread of native code alone has no frames
    return (stacks.get("Current") or stacks.get("Thread") or [])[::-1]


def _launch_log(folder: RunFolder, state: RunState) -> str | None:
    log = folder.launch_log(state.job_id) if state.job_id else None
    return short_path(log) if log is not None and log.exists() else None


def facts(folder: RunFolder, state: RunState) -> dict[str, Any]:
    """Return the machine-readable diagnosis."""
    found = why(folder, state)
    before = [asdict(each) for each in attempts.before(folder, _waits(state, found))]
    wait = waiting.wait_of(folder, state)
    known = {"run": state.run, "state": state.state, "reason": state.reason, "before": before}
    return known | {"why": found and _facts(found), "waits": wait and asdict(wait)}


def _facts(found: Why) -> dict[str, Any]:
    cause = found.cause
    of_cause = {"cause": cause.name, "words": cause.words, "is_clusters": cause.is_cluster_fault}
    # `mend` is version 0.1's name for `fix`
    return of_cause | {"mend": found.fix} | {name: value for name, value in vars(found).items() if name != "cause"}


def lines(folder: RunFolder, state: RunState) -> Iterator[str]:
    """Yield the human-readable diagnosis."""
    found = why(folder, state)
    yield f"{state.state}  {state.run}" + (f": {state.reason}" if state.reason else "")
    waits = _waits(state, found)
    yield from _history(folder, waits)
    if found is None:
        at = time_of(state.submitted)
        # not those of an attempt that is over
        warned = [] if waits else [*_warned(folder, state)]
        if state.state == states.COMPLETED:
            yield _of_the_result(folder) or ("it completed, with warnings" if warned else "no problems: it completed")
        elif state.attempts:
            yield f"no failure so far ({counted(state.attempts - 1, 'restart')})"
        else:
            yield "it has not started yet" + (f" (queued since {at:%Y-%m-%d %H:%M:%S})" if at is not None else "")
        yield from warned
        if (wait := waiting.wait_of(folder, state)) is not None:
            yield f"waits     {wait.words}"
            yield f"fix       {wait.fix}"
        return
    if found.line is not None:
        yield f"line      {found.line}"
    yield f"why       {found.cause.words}"
    yield f"where     {' '.join(_where(found))}"
    if found.error:
        yield f"error     {found.error}"
    if found.lagged is not None:
        yield f"straggler {found.lagged}"
    yield f"fix       {found.fix}"
    if found.log is not None:
        yield f"log       {found.log}"


def lines_of_complete(folder: RunFolder, runs: Sequence[RunState]) -> Iterator[str]:
    """Yield lines on a group or sweep whose runs or workers have all completed."""
    if not sweep_state.is_sweep(folder):
        yield f"{folder.run}: all of its {len(runs)} runs completed"
        return
    state = sweep_state.state_of(folder, runs)
    failed = f"; {counted(state.trials['FAIL'], 'trial')} failed" if state.trials["FAIL"] else ""
    yield f"{state.state}  {folder.run}: {state.reason}{failed}"
    yield from sweep_status.last_failure(folder, sweep_state.summary_of(folder))


def _where(found: Why) -> Iterator[str]:
    if found.who:
        yield found.who
    if found.node is not None:
        yield f"on {found.node}"
    if found.attempt is not None:
        yield f"in attempt {found.attempt}"
    if (at := time_of(found.time)) is not None:
        yield f"at {at:%Y-%m-%d %H:%M:%S}"


def _warned(folder: RunFolder, state: RunState) -> Iterator[str]:
    """Yield warnings of the newest attempt about problems that do not end it, such as too few cores or a full disk."""
    for line in rank_warnings.lines(rank_warnings.of_attempt(folder, state.attempts)):
        yield f"warning   {line}"
    log = end_of(folder.rank_log(state.attempts, 0))
    said = [line for line in log.splitlines() if line.startswith(log_lines.WARNING)]
    for line in said[-SHOWN_WARNINGS:]:
        yield f"warning   {line.removeprefix(log_lines.WARNING)}"


def _of_the_result(folder: RunFolder) -> str | None:
    """Return what is wrong with the result of a complete run, and how to fix it."""
    wrong = problem_of_result(folder, records.read_state(folder))
    return None if wrong is None else f"it completed, but {wrong}: {failures.NOT_A_NUMBER.fix}"


def problem_of_result(folder: RunFolder, state: RunState) -> str | None:
    """Return what is wrong with the result and metrics of a complete run."""
    metrics = (read_json(folder.result) or {}).get("result", {}) | state.metrics
    wrong = [name for name, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)]
    are = "is" if len(wrong) == 1 else "are"
    return f"{' and '.join(wrong)} {are} NaN or infinite" if wrong else None


def _waits(state: RunState, found: Why | None) -> bool:
    """Return whether the run waits for its next attempt, so that its newest one belongs to the history."""
    return found is None and state.state in (states.PENDING, states.REQUEUED)


def _history(folder: RunFolder, waits: bool) -> Iterator[str]:
    """Yield the earlier attempts, each with its end, and what was lost of them."""
    for each in attempts.before(folder, waits):
        yield f"attempt {each.attempt}: {each.ended}; {each.then}"
    for path in sorted(folder.checkpoints.glob(f"{DAMAGED}*")):
        yield f"damaged   {short_path(path)} was damaged and was skipped"
