"""Summarize the traces that the ranks of a run have recorded with `--profile`: where the time of their steps went."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import counted
from mgpu_slurm.run_folder.layout import RunFolder

Span: TypeAlias = tuple[float, float]
"""Begin and end, in microseconds."""

SHOWN = 15
"""Number of operators in the table."""
WAITS_MORE = 0.1
"""Part of a step by which ranks have to wait longer than another one for that to be named."""

_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_COMMUNICATES = re.compile(r"^(nccl|gloo:|c10d::|record_param_comms)", re.IGNORECASE)
_GRAPH = re.compile(r"## Call CompiledFxGraph (\w{1,8})\w* ##")
_FILE = re.compile(r"(\d+)-(\d+)\.json\.gz")


@dataclass(frozen=True)
class Operator:
    """An operator, or a kernel, in the steps of all ranks that were read."""

    name: str
    seconds: float
    """Per step and rank: of its kernels, or on a CPU without the operators that it calls."""
    calls: float
    """Per step and rank."""


@dataclass(frozen=True)
class RankTrace:
    """The recorded steps of a rank. The shares of its time add up to 1."""

    rank: int
    file: str
    steps: int
    seconds: float
    """Of a step."""
    on_gpu: bool
    computes: float
    """Part of the time in which kernels run, or operators on a CPU."""
    communicates: float
    """Part in which it exchanges something with other ranks, or waits for them, and computes nothing."""
    idle: float
    """The rest: nothing runs but Python."""


@dataclass(frozen=True)
class Profile:
    """What the ranks of an attempt recorded."""

    run: str
    attempt: int
    ranks: tuple[RankTrace, ...]
    operators: tuple[Operator, ...]
    """The most expensive first."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the tables, which rank the others wait for, and where the traces are."""
        return [
            *self._rank_lines(),
            *self._slowest_line(),
            "",
            *self._operator_lines(),
            "",
            f"trace     {self.ranks[0].file}{', with those of the other ranks' if len(self.ranks) > 1 else ''}",
            "          open it at https://ui.perfetto.dev",
        ]

    def _rank_lines(self) -> list[str]:
        lines = [f"profile   {self.run}, attempt {self.attempt}, {counted(self.ranks[0].steps, 'step')}", ""]
        lines.append(f"{'RANK':>4}  {'STEP':>10}  {'COMPUTES':>8}  {'COMMUNICATES':>12}  {'IDLE':>5}")
        for each in self.ranks:
            shares = f"{each.computes:>8.0%}  {each.communicates:>12.0%}  {each.idle:>5.0%}"
            lines.append(f"{each.rank:>4}  {_time(each.seconds):>10}  {shares}")
        return lines

    def _slowest_line(self) -> list[str]:
        if len(self.ranks) < 2:
            return []
        slowest = min(self.ranks, key=lambda each: each.communicates)
        others = [each.communicates for each in self.ranks if each is not slowest]
        waits = sum(others) / len(others)
        if waits - slowest.communicates < WAITS_MORE:
            return []
        return [
            "",
            f"The other ranks wait for rank {slowest.rank}: they communicate for {waits:.0%} of a step, it for"
            f" {slowest.communicates:.0%}.",
        ]

    def _operator_lines(self) -> list[str]:
        step = sum(each.seconds for each in self.ranks) / len(self.ranks)
        where = "kernels on the GPU" if self.ranks[0].on_gpu else "operators on the CPU, without those that they call"
        lines = [f"Most expensive {where}, per step and rank:", ""]
        lines.append(f"{'TIME':>10}  {'SHARE':>5}  {'CALLS':>7}  OPERATOR")
        for each in self.operators[:SHOWN]:
            share = each.seconds / step
            lines.append(f"{_time(each.seconds):>10}  {share:>5.0%}  {_count(each.calls):>7}  {each.name}")
        return lines


def profile_of(folder: RunFolder, attempt: int | None = None) -> Profile:
    """Return what the ranks of an attempt recorded, by default of the last one that did.

    Raises:
        UserError: there is nothing, or a trace cannot be read.
    """
    found = [(match, path) for path in folder.profile.glob("*.json.gz") if (match := _FILE.fullmatch(path.name))]
    by_rank = {(int(match[1]), int(match[2])): path for match, path in found}
    attempts = sorted({recorded for recorded, _ in by_rank})
    if attempt is None and attempts:
        attempt = attempts[-1]
    if attempt not in attempts:
        which = "" if attempt is None or not attempts else f" in attempt {attempt}, but in {_joined(attempts)}"
        fix = "submit it with --profile 10-13, or resume it before it completes"
        raise UserError(f"run {folder.run} has recorded no steps{which}: {fix}")
    assert attempt is not None
    read = [_read(rank, path) for (recorded, rank), path in sorted(by_rank.items()) if recorded == attempt]
    return Profile(folder.run, attempt, tuple(trace for trace, _ in read), _together([ops for _, ops in read]))


def _read(rank: int, path: Path) -> tuple[RankTrace, list[Operator]]:
    try:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise UserError(f"{str(path)!r} cannot be read ({error}): delete it") from None
    return summarize(rank, str(path), [each for each in events if each.get("ph") == "X"])


def summarize(rank: int, file: str, events: Sequence[dict[str, Any]]) -> tuple[RankTrace, list[Operator]]:
    """Return what a rank did in its steps, and its operators.

    Args:
        events: those with a duration, in the Trace Event Format of Chrome, as torch's profiler writes it.

    Raises:
        UserError: there are no steps.
    """
    marks = [each for each in events if each["name"].startswith("ProfilerStep#")]
    # a GPU has its own ones
    steps = [each for each in marks if each.get("cat") != "gpu_user_annotation"]
    if not steps:
        raise UserError(f"{file!r} has no steps: record it again with --profile")
    window = min(each["ts"] for each in steps), max(each["ts"] + each["dur"] for each in steps)
    inside = [each for each in events if window[0] <= each["ts"] < window[1]]
    kernels = [each for each in inside if each.get("cat") in _ON_GPU]
    own = _own_spans(inside)
    # on a CPU, a thread of gloo marks how long a collective takes
    exchanges = kernels or inside
    timed = [(each, _spans([each])) for each in kernels] or own
    computing = [(each, spans) for each, spans in timed if not _COMMUNICATES.match(each["name"])]
    exchanged = _union(_spans(each for each in exchanges if _COMMUNICATES.match(each["name"])), window)
    leaves = [span for each, spans in computing if _length(spans) == each["dur"] for span in spans]
    callers = _union((span for each, spans in computing if _length(spans) != each["dur"] for span in spans), window)
    # one that calls others may also wait for a collective
    computed = _union([*leaves, *_without(callers, exchanged)], window)
    whole = window[1] - window[0]
    computes = _length(computed)
    communicates = _length(_union([*computed, *exchanged], window)) - computes
    trace = RankTrace(
        rank=rank,
        file=file,
        steps=len(steps),
        seconds=whole / len(steps) / 1e6,
        on_gpu=bool(kernels),
        computes=computes / whole,
        communicates=communicates / whole,
        idle=(whole - computes - communicates) / whole,
    )
    return trace, _operators(((each, _length(spans)) for each, spans in timed), inside, len(steps))


def _operators(
    timed: Iterable[tuple[dict[str, Any], float]], events: Iterable[dict[str, Any]], steps: int
) -> list[Operator]:
    """Return the operators of a rank; a kernel counts for the operator that launched it."""
    launched = {_external(each): each["name"] for each in events if each.get("cat") == "cpu_op"}
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for each, time in timed:
        own = each["name"]
        name = launched.get(_external(each), own) if each.get("cat") in _ON_GPU else own
        # the name says more than that of the operator that every collective goes through
        name = own if _COMMUNICATES.match(own) else _GRAPH.sub(r"compiled graph \1", name)
        seconds[name] += time
        calls[name] += 1
    return [Operator(name, seconds[name] / steps / 1e6, calls[name] / steps) for name in seconds]


def _external(event: dict[str, Any]) -> object:
    """Return what an operator and its kernels have in common."""
    return event.get("args", {}).get("External id", event["name"])


def _together(ranks: Sequence[Sequence[Operator]]) -> tuple[Operator, ...]:
    """Return the means over ranks, the most expensive first."""
    by_name: dict[str, list[Operator]] = defaultdict(list)
    for each in (operator for operators in ranks for operator in operators):
        by_name[each.name].append(each)
    means = [
        Operator(name, sum(each.seconds for each in found) / len(ranks), sum(each.calls for each in found) / len(ranks))
        for name, found in by_name.items()
    ]
    return tuple(sorted(means, key=lambda each: -each.seconds))


def _own_spans(events: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], list[Span]]]:
    """Return each operator on a CPU with its time outside of those that it calls, which are inside of it in its
    thread."""
    by_thread: dict[object, list[dict[str, Any]]] = defaultdict(list)
    for each in events:
        if each.get("cat") == "cpu_op":
            by_thread[each["tid"]].append(each)
    return [found for called in by_thread.values() for found in _own_spans_of_thread(called)]


def _own_spans_of_thread(called: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[Span]]]:
    open_calls: list[tuple[dict[str, Any], list[Span]]] = []
    at = 0.0
    """Until when the time of this thread is assigned."""

    def run_until(time: float) -> None:
        nonlocal at
        if open_calls and time > at:
            open_calls[-1][1].append((at, time))
        at = max(at, time)

    for each in sorted(called, key=lambda each: (each["ts"], -each["dur"])):
        while open_calls and each["ts"] >= _end(open_calls[-1][0]):
            run_until(_end(open_calls[-1][0]))
            yield open_calls.pop()
        run_until(each["ts"])
        open_calls.append((each, []))
    while open_calls:
        run_until(_end(open_calls[-1][0]))
        yield open_calls.pop()


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def _spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    return [(each["ts"], each["ts"] + each["dur"]) for each in events]


def _union(spans: Iterable[Span], window: Span) -> list[Span]:
    """Return spans that do not overlap and cover the same time within the window."""
    merged: list[Span] = []
    for begin, end in sorted((max(begin, window[0]), min(end, window[1])) for begin, end in spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > begin:
            merged.append((begin, end))
    return merged


def _without(spans: Iterable[Span], holes: Sequence[Span]) -> Iterator[Span]:
    """Yield the parts of spans outside of others, of which none overlap and which are in order."""
    for begin, end in spans:
        for hole_begins, hole_ends in holes:
            if begin < hole_begins < end:
                yield begin, hole_begins
            if hole_begins < end:
                begin = max(begin, hole_ends)
        if begin < end:
            yield begin, end


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:,.3g} ms"


def _count(calls: float) -> str:
    return f"{calls:,.0f}" if calls >= 10 else f"{calls:.3g}"


def _joined(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
