"""Where the time of attempts went. Pure: from the times of a run's events, reports and checkpoints.

Each moment of an attempt belongs to exactly one part, so that the parts add up to what was allocated:

- `starting`: from the start of the attempt to one typical report before the first one.
- `training`: all other time up to the last report. A script that reports nothing counts as training.
- `saving`: time for which the training stood for checkpoints.
- `repeated`: reports at or below the highest progress before, which a resumed run has done again.
- `failed`: what came to nothing: after the last checkpoint or report of an attempt that failed or was lost, and all
  after the last checkpoint of a failed run.
- `between_trials`: a sweep's worker without a trial.
- `other`: after the last report of a run that completed.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Literal

Part = Literal["starting", "training", "saving", "repeated", "failed", "between_trials", "other"]

Outcome = Literal["running", "completed", "stopped", "failed", "lost"]
"""How an attempt ended: `stopped` has saved its work; `lost` was killed, or its end was not recorded."""


@dataclass(frozen=True)
class Ledger:
    """Allocated time by part, in seconds times GPUs, or times cores. Fractions, as the parts have to add up exactly."""

    starting: Fraction = Fraction()
    training: Fraction = Fraction()
    saving: Fraction = Fraction()
    repeated: Fraction = Fraction()
    failed: Fraction = Fraction()
    between_trials: Fraction = Fraction()
    other: Fraction = Fraction()

    @property
    def total(self) -> Fraction:
        return sum((getattr(self, name) for name in PARTS), Fraction())

    def __add__(self, more: Ledger) -> Ledger:
        return Ledger(**{name: getattr(self, name) + getattr(more, name) for name in PARTS})

    def times(self, units: Fraction | int) -> Ledger:
        """Return the ledger of so many GPUs or cores."""
        return Ledger(**{name: getattr(self, name) * units for name in PARTS})

    def share(self, part: Part) -> float:
        """Return a part of the whole, from 0 to 1."""
        return float(getattr(self, part) / self.total) if self.total else 0.0

    def to_json(self) -> dict[str, float]:
        return {name: round(float(getattr(self, name)), 3) for name in PARTS}


PARTS = tuple(each.name for each in fields(Ledger))


@dataclass(frozen=True)
class Reported:
    """A report: its time, and its progress."""

    time: int
    """Milliseconds since the epoch, as all times here."""
    progress: int


@dataclass(frozen=True)
class Save:
    """A checkpoint."""

    begun: int
    resumed: int
    """When the training continued."""
    complete: int


@dataclass(frozen=True)
class Stretch:
    """An attempt of a run, or of a trial on a worker."""

    begin: int
    end: int
    outcome: Outcome = "completed"
    reports: Sequence[Reported] = ()
    saves: Sequence[Save] = ()


@dataclass(frozen=True)
class Span:
    """Time that belongs to one part."""

    begin: int
    end: int
    part: Part


@dataclass
class _Highest:
    """The highest progress that was reported so far."""

    progress: int | None = None

    def is_repeated(self, progress: int) -> bool:
        """Take a report; return whether it repeats an earlier one."""
        is_repeated = self.progress is not None and progress <= self.progress
        self.progress = progress if self.progress is None else max(self.progress, progress)
        return is_repeated


def typical_report(stretches: Iterable[Stretch]) -> int | None:
    """Return the median time from one report to the next; None if there are no two reports in one attempt."""
    gaps = []
    for stretch in stretches:
        times = sorted(each.time for each in stretch.reports)
        gaps += [later - earlier for earlier, later in itertools.pairwise(times)]
    return round(statistics.median(gaps)) if gaps else None


def of_run(stretches: Sequence[Stretch], typical: int | None = None, failed: bool = False) -> list[Ledger]:
    """Return the ledgers of a run's attempts, of one GPU or core, in the order of the attempts.

    Args:
        stretches: the attempts, oldest first.
        typical: what is known of the time of a report from other runs, if this one does not show it.
        failed: whether the run has failed for good: then nothing after its last checkpoint counts.
    """
    return [_sum(spans) for spans in spans_of_run(stretches, typical, failed)]


def spans_of_run(stretches: Sequence[Stretch], typical: int | None = None, failed: bool = False) -> list[list[Span]]:
    """Return the parts of each attempt in their order; see `of_run`."""
    own = typical_report(stretches)
    highest = _Highest()
    found = [_spans(stretch, typical if own is None else own, highest) for stretch in stretches]
    if failed:
        kept = max((save.resumed for stretch in stretches for save in stretch.saves), default=0)
        found = [_overlaid(spans, [_rest(spans, kept, "failed")]) for spans in found]
    return found


def _spans(stretch: Stretch, typical: int | None, highest: _Highest) -> list[Span]:
    begin, end = stretch.begin, max(stretch.begin, stretch.end)
    # the clocks of nodes differ a little
    reports = sorted((min(max(each.time, begin), end), each.progress) for each in stretch.reports)
    spans: list[Span] = []
    at = begin
    if reports and typical is not None:
        at = max(begin, reports[0][0] - typical)
        spans.append(Span(begin, at, "starting"))
    for time, progress in reports:
        spans.append(Span(at, time, "repeated" if highest.is_repeated(progress) else "training"))
        at = time
    is_done = stretch.outcome == "completed" and reports
    spans.append(Span(at, end, "other" if is_done else "training"))
    saves = sorted(stretch.saves, key=lambda save: save.begun)
    # nothing is trained while the last one is completed
    waits = bool(saves) and stretch.outcome in ("completed", "stopped") and saves[-1].begun >= at
    ends = [save.resumed for save in saves[:-1]] + [save.complete if waits else save.resumed for save in saves[-1:]]
    spans = _overlaid(spans, [Span(save.begun, last, "saving") for save, last in zip(saves, ends, strict=True)])
    if stretch.outcome in ("failed", "lost"):
        kept = max((save.resumed for save in saves), default=begin)
        spans = _overlaid(spans, [_rest(spans, max(kept, at if reports else begin), "failed")])
    return spans


def _rest(spans: Sequence[Span], begin: int, part: Part) -> Span:
    """Return the time from a moment on as a span."""
    return Span(begin, max((span.end for span in spans), default=begin), part)


def _overlaid(spans: Iterable[Span], over: Sequence[Span]) -> list[Span]:
    """Return consecutive spans, in which the time of others is given to the parts of those.

    Args:
        over: in the order of their beginnings.
    """
    found = []
    index = 0
    for span in spans:
        at = span.begin
        while index < len(over) and over[index].begin < span.end:
            piece = over[index]
            first = max(at, piece.begin)
            last = min(span.end, max(piece.end, first))
            found += [replace(span, begin=at, end=first), Span(first, last, piece.part)]
            at = last
            if piece.end > span.end:
                # it continues in the next one
                break
            index += 1
        # most spans are as before
        found.append(span if at == span.begin else replace(span, begin=at))
    return [span for span in found if span.end > span.begin]


def _sum(spans: Iterable[Span]) -> Ledger:
    milliseconds = dict.fromkeys(PARTS, 0)
    for span in spans:
        milliseconds[span.part] += span.end - span.begin
    return Ledger(**{name: Fraction(value, 1000) for name, value in milliseconds.items()})


# -- workers

OPEN = 1 << 62
"""The end of an attempt of a trial that nobody recorded."""


@dataclass(frozen=True)
class TrialRun:
    """A run of a sweep: a trial, or a trial with one of several seeds. Its attempts may be on different workers."""

    stretches: Sequence[Stretch]
    workers: Sequence[int]
    """The worker of each attempt."""
    failed: bool = False


@dataclass(frozen=True)
class _Piece:
    """An attempt of a trial on a worker."""

    begin: int
    end: int
    spans: Sequence[Span]


def of_workers(
    workers: Mapping[int, Sequence[Stretch]], trials: Sequence[TrialRun], at_once: int = 1
) -> dict[int, list[Ledger]]:
    """Return the ledgers of the attempts of a sweep's workers, of one GPU or core.

    Args:
        workers: the attempts of each worker, oldest first.
        at_once: the number of trials that each worker trains at the same time.
    """
    typical = typical_report(stretch for trial in trials for stretch in trial.stretches)
    ends = {worker: _ends(worker, attempts, trials, at_once) for worker, attempts in workers.items()}
    pieces: dict[int, list[_Piece]] = {worker: [] for worker in workers}
    for trial in trials:
        owned = [(worker, stretch) for worker, stretch in zip(trial.workers, trial.stretches, strict=True)]
        closed = [_closed(stretch, ends.get(worker, [])) for worker, stretch in owned]
        for (worker, _), stretch, spans in zip(owned, closed, spans_of_run(closed, typical, trial.failed), strict=True):
            if worker in pieces:
                pieces[worker].append(_Piece(stretch.begin, stretch.end, spans))
    return {
        worker: [_of_attempt(attempt, pieces[worker], at_once) for attempt in attempts]
        for worker, attempts in workers.items()
    }


def _ends(
    worker: int, attempts: Sequence[Stretch], trials: Sequence[TrialRun], at_once: int
) -> list[tuple[int, Outcome]]:
    """Return the times at which a trial of a worker is over at the latest, and how it ended then, in their order."""
    found = [(attempt.end, attempt.outcome) for attempt in attempts]
    if at_once == 1:
        found += [
            (stretch.begin, "stopped")
            for trial in trials
            for stretch, owner in zip(trial.stretches, trial.workers, strict=True)
            if owner == worker
        ]
    return sorted(found)


def _closed(stretch: Stretch, ends: Sequence[tuple[int, Outcome]]) -> Stretch:
    """Return an attempt of a trial with an end."""
    if stretch.end < OPEN:
        return stretch
    place = bisect.bisect_right(ends, stretch.begin, key=lambda each: each[0])
    if place == len(ends):
        return replace(stretch, end=stretch.begin)
    end, outcome = ends[place]
    return replace(stretch, end=end, outcome=outcome if outcome in ("running", "stopped") else "lost")


def _of_attempt(attempt: Stretch, pieces: Sequence[_Piece], at_once: int) -> Ledger:
    own = sorted(
        (piece for piece in pieces if attempt.begin <= piece.begin < attempt.end), key=lambda piece: piece.begin
    )
    lanes = [_sum(_lane(attempt, lane)) for lane in _lanes(own, at_once)]
    return sum(lanes, Ledger()).times(Fraction(1, at_once))


def _lanes(pieces: Sequence[_Piece], count: int) -> list[list[_Piece]]:
    """Return pieces, in the order of their beginnings, as rows in which they follow each other."""
    lanes: list[list[_Piece]] = [[] for _ in range(count)]
    for piece in pieces:
        min(lanes, key=lambda lane: lane[-1].end if lane else 0).append(piece)
    return lanes


def _lane(attempt: Stretch, pieces: Sequence[_Piece]) -> list[Span]:
    begin, end = attempt.begin, max(attempt.begin, attempt.end)
    if not pieces:
        # it had to start, too, but it is not known how long that took
        return [Span(begin, end, "failed" if attempt.outcome in ("failed", "lost") else "between_trials")]
    spans = []
    at = begin
    for piece in pieces:
        # two may overlap by a moment
        own = [Span(min(max(at, span.begin), end), min(max(at, span.end), end), span.part) for span in piece.spans]
        first = own[0].begin if own else at
        spans.append(Span(at, first, "starting" if piece is pieces[0] else "between_trials"))
        spans += own
        at = own[-1].end if own else at
    return [*spans, Span(at, end, "between_trials")]
