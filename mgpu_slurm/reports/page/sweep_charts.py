"""Charts of a sweep: its trials in their order, rungs, the front, the confirmation and the workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mgpu_slurm.core.formatting import counted, duration
from mgpu_slurm.reports.facts.report_facts import Piece, SweepFacts
from mgpu_slurm.reports.page.markup import Markup, joined, number, scrolling, tag
from mgpu_slurm.reports.page.run_charts import Bar, timeline
from mgpu_slurm.reports.page.svg import Chart, Scale, finite_range, path, whole_ticks

if TYPE_CHECKING:
    from mgpu_slurm.sweeps.analysis.study_facts import StudyFacts, TrialFacts

CLIPPED_FROM = 3.0
"""How many times as far as the complete trials spread, values have to lie beyond these for the axis to be cut."""

FEW = 0.1
"""Part of the values that an end of the axis may leave out."""

Runs = Mapping[int, int]
"""The number on the page of a trial's run, by the trial's number."""


def with_value(study: StudyFacts) -> list[TrialFacts]:
    """Return the trials that have a value, which pruned and running ones take from their last report."""
    return [trial for trial in study.trials if trial.row.value is not None]


def is_better(study: StudyFacts, one: float, other: float) -> bool:
    return one > other if study.direction == "maximize" else one < other


class Values:
    """The axis of the metric. It is cut if the values of a few bad trials would leave no room for the others."""

    def __init__(self, study: StudyFacts, start: float, stop: float) -> None:
        trials = with_value(study)
        everything = np.asarray([trial.row.value for trial in trials], np.float64)
        whole = np.asarray([trial.row.value for trial in trials if trial.row.state == "COMPLETE"], np.float64)
        low, high = finite_range([everything])
        if len(whole) > 1 and (spread := float(whole.max() - whole.min())) > 0:
            room = CLIPPED_FROM * spread
            few_below, few_above = np.quantile(everything, [FEW, 1 - FEW])
            low = max(low, min(float(few_below), float(whole.min()) - room))
            high = min(high, max(float(few_above), float(whole.max()) + room))
        self.scale = Scale.over([np.asarray([low, high])], start, stop)
        self._ends = (low, high)
        self.cut = int(((everything < low) | (everything > high)).sum())
        """Number of values beyond the ends."""

    def __call__(self, value: float) -> float:
        low, high = self._ends
        return float(self.scale(min(max(value, low), high)))

    @property
    def note(self) -> Markup:
        """Return a sentence on values that are drawn at an end of the axis; empty if none are."""
        return tag("p", self._words, cls="quiet") if self.cut else Markup()

    def add_note(self, chart: Chart) -> None:
        """Add that sentence to a chart, where it is seen if the chart is a file of its own."""
        if self.cut:
            chart.add(tag("text", self._words, cls="alone", x=chart.x1, y=9, text_anchor="end"))

    @property
    def _words(self) -> str:
        return f"{counted(self.cut, 'value')} beyond the axis {'is' if self.cut == 1 else 'are'} drawn at its end."


def mark(trial: TrialFacts, x: float, y: float, words: str, runs: Runs) -> Markup:
    """Return the mark of a trial: circles are complete, triangles pruned, squares paused, crosses failed."""
    x, y = round(x, 1), round(y, 1)
    state = trial.row.state
    attributes: dict[str, Any] = {"cls": f"point s-{state}", "data_r": runs.get(trial.row.number)}
    title = tag("title", words)
    if state == "COMPLETE":
        return tag("circle", title, r=3.6, cx=x, cy=y, **attributes)
    shapes = {
        "PRUNED": f"M{x} {y - 3.8}l3.8 6.6h-7.6z",
        "PAUSED": f"M{x - 3} {y - 3}h6v6h-6z",
        "RUNNING": f"M{x - 3} {y - 3.6}l6.4 3.6l-6.4 3.6z",
        "WAITING": f"M{x - 3} {y - 3}h6v6h-6z",
    }
    return tag("path", title, d=shapes.get(state, f"M{x - 3} {y - 3}l6 6m0 -6l-6 6"), **attributes)


def trial_words(study: StudyFacts, trial: TrialFacts) -> str:
    row = trial.row
    reason = f": {row.reason}" if row.reason else ""
    value = "" if row.value is None else f", {study.metric} {number(row.value, 5)}"
    copied = "" if trial.copy_of is None else f", a copy of trial {trial.copy_of}"
    return f"trial {row.number}{value}, {row.state.lower()}{copied}{reason}"


def history(study: StudyFacts, ident: str, runs: Runs) -> Markup:
    """Return the value of each trial in the order in which they began, and the best so far."""
    trials = with_value(study)
    chart = Chart(
        ident,
        f"{study.metric} of each trial",
        f"{counted(len(trials), 'trial')} in the order in which they began; the line is the best complete one so far.",
        cls="linked",
    )
    values = Values(study, chart.y0, chart.y1)
    highest = max((trial.row.number for trial in trials), default=1)
    x = Scale(-0.5, highest + 0.5, chart.x0, chart.x1)
    chart.y_axis(values.scale)
    chart.x_axis(x, "trial", whole_ticks(x))
    best: float | None = None
    steps = []
    for trial in trials:
        value = trial.row.value
        if trial.row.state == "COMPLETE" and not trial.row.infeasible and value is not None:
            best = value if best is None or is_better(study, value, best) else best
        if best is not None:
            steps.append((x(trial.row.number), values(best)))
    if steps:
        chart.add(
            tag(
                "path",
                cls="best",
                d="".join(
                    f"{'H' if i else 'M'}{px:.1f}{'V' if i else ' '}{py:.1f}" for i, (px, py) in enumerate(steps)
                ),
            )
        )
    chart.add(
        *(
            mark(each, x(each.row.number), values(float(each.row.value or 0)), trial_words(study, each), runs)
            for each in trials
        )
    )
    values.add_note(chart)
    return joined(chart.svg(), values.note)


def rungs(study: StudyFacts) -> Markup:
    """Return how many trials of each bracket came to each rung, with the best value there."""
    if not study.rungs:
        return Markup()
    found = sorted({trial.bracket for trial in study.trials if trial.bracket is not None})
    brackets: Sequence[int | None] = found or [None]
    return tag("div", *(_bracket(study, bracket) for bracket in brackets), cls="grid rungs")


def _bracket(study: StudyFacts, bracket: int | None) -> Markup:
    own = [trial for trial in study.trials if trial.bracket == bracket]
    head = [tag("th", f"progress {rung}", scope="col") for rung in study.rungs]
    cells = []
    for rung in study.rungs:
        values = [trial.row.rungs[str(rung)] for trial in own if str(rung) in trial.row.rungs]
        best = (max(values) if study.direction == "maximize" else min(values)) if values else None
        share = f"--share:{len(values) / max(1, len(own)):.3f}"
        told = "" if best is None else tag("span", f"best {number(best)}", cls="quiet")
        cells.append(tag("td", tag("span", cls="funnel", style=share), tag("b", len(values)), " ", told))
    title = f"{counted(len(own), 'trial')} by the rung that they reached"
    caption = tag("caption", title if bracket is None else f"Bracket {bracket}: {title}")
    body = tag("tbody", tag("tr", *cells))
    table = tag("table", caption, tag("thead", tag("tr", *head)), body, cls="rung")
    return scrolling(f"Rungs of {study.study}{'' if bracket is None else f', bracket {bracket}'}", table)


def front(study: StudyFacts, ident: str, runs: Runs) -> Markup:
    """Return all complete trials by two objectives, those of the Pareto front filled and joined."""
    first, second = list(study.metrics)[:2]
    complete = [trial for trial in study.trials if first in trial.row.values and second in trial.row.values]
    if not complete:
        return tag("p", "No trial is complete yet.", cls="quiet")
    chart = Chart(
        ident,
        f"Pareto front of {first} and {second}",
        f"{counted(len(study.front), 'trial')} of {len(complete)} complete ones that no other trial dominates.",
        cls="linked front",
    )
    across, upwards = ([trial.row.values[name] for trial in complete] for name in (first, second))
    x = Scale.over([np.asarray(across)], chart.x0 + 4, chart.x1 - 4)
    y = Scale.over([np.asarray(upwards)], chart.y0, chart.y1)
    chart.y_axis(y)
    chart.x_axis(x, f"{first} ({study.metrics[first]}), upwards {second} ({study.metrics[second]})")
    on_front = sorted(
        (trial for trial in complete if trial.row.number in study.front), key=lambda each: each.row.values[first]
    )
    line = path(
        *(
            np.asarray([scale(trial.row.values[name]) for trial in on_front])
            for name, scale in ((first, x), (second, y))
        )
    )
    chart.add(tag("path", cls="best", d=line))
    for trial in complete:
        words = ", ".join(f"{name} {number(value, 5)}" for name, value in trial.row.values.items())
        is_on = trial.row.number in study.front
        point = tag(
            "circle",
            tag("title", f"trial {trial.row.number}: {words}{', on the front' if is_on else ''}"),
            cls=f"point {'s-COMPLETE' if is_on else 'beaten'}",
            r=3.8,
            cx=round(x(trial.row.values[first]), 1),
            cy=round(y(trial.row.values[second]), 1),
            data_r=runs.get(trial.row.number),
        )
        chart.add(point)
    return chart.svg()


def _piece_words(piece: Piece) -> str:
    return f"{'confirming: ' if piece.is_confirming else ''}trial {piece.trial}"


def covered(pieces: Sequence[Piece]) -> float:
    """Return the seconds in which there was at least one trial; several may be trained at the same time."""
    covered, until = 0.0, -math.inf
    for piece in sorted(pieces, key=lambda each: each.begin):
        covered += max(0.0, piece.end - max(piece.begin, until))
        until = max(until, piece.end)
    return covered


def workers(sweep: SweepFacts, ident: str, runs: Runs) -> tuple[Markup, float]:
    """Return the timeline of the workers, and the part of their time in which they had a trial."""
    states = {trial.row.number: trial.row.state for trial in sweep.study.trials}
    rows, busy, total = [], 0.0, 0.0
    for worker in sweep.workers:
        total += sum(each.seconds for each in worker.attempts)
        busy += covered(worker.pieces)
        bars = [
            Bar(
                piece.begin,
                piece.end,
                "" if piece.is_confirming else f"s-{states.get(piece.trial, '')}",
                f"worker {worker.worker}, {_piece_words(piece)}: {duration(piece.end - piece.begin)}",
                f"c{piece.trial}" if piece.is_confirming else str(piece.trial),
                None if piece.is_confirming else runs.get(piece.trial),
            )
            for piece in worker.pieces
        ]
        rows.append((f"worker {worker.worker}", bars))
    chart = timeline(
        ident, "What the workers did", f"A row for each of {counted(len(rows), 'worker')}, a bar for each trial.", rows
    )
    return chart.svg(), min(1.0, busy / total) if total else 0.0


def confirmation(study: StudyFacts) -> Markup:
    """Return the table of the best trials that were trained again; empty if none were."""
    found = study.confirmation
    if found is None or not found.trials:
        return Markup()
    head = tag(
        "tr",
        *(tag("th", words, scope="col") for words in ("Trial", f"Mean {study.metric}", "Worse by", "95% interval", "")),
    )
    rows = []
    for place, each in enumerate(found.trials):
        rest = ["", "", "best" if len(found.trials) > 1 else "the only one"]
        if place:
            low, high = each.interval
            rest = [
                number(each.difference),
                f"{number(low)} to {number(high)}",
                "worse" if each.is_worse else "may be as good",
            ]
        rows.append(
            tag(
                "tr",
                tag("th", each.number, scope="row"),
                tag("td", number(each.mean, 5), cls="n"),
                *(tag("td", cell) for cell in rest),
            )
        )
    words = f"The best trials, trained again with seeds {', '.join(map(str, found.seeds))}"
    words += f"; {counted(found.left, 'trial')} left" if found.left else ""
    words += f"; {counted(found.without_result, 'trial')} without a result" if found.without_result else ""
    caption = tag("caption", words)
    table = tag("table", caption, tag("thead", head), tag("tbody", *rows))
    return scrolling(f"Confirmation of {study.study}", table)
