"""Charts of a sweep: its trials in their order, what parameters do, rungs, workers, front and confirmation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mgpu_slurm.core.formatting import counted, duration
from mgpu_slurm.reports.page.facts import SweepFacts
from mgpu_slurm.reports.page.markup import Markup, joined, number, tag
from mgpu_slurm.reports.page.run_charts import Bar, timeline
from mgpu_slurm.reports.page.svg import Chart, Scale, finite_range, path, whole_ticks

if TYPE_CHECKING:
    from mgpu_slurm.sweeps.analysis.study_facts import SearchedParameter, StudyFacts, TrialFacts

CLIPPED_FROM = 3.0
"""How many times as far as the complete trials spread, all values have to reach for the axis to be cut."""

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
            low, high = max(low, float(whole.min()) - room), min(high, float(whole.max()) + room)
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
        if not self.cut:
            return Markup()
        is_one = self.cut == 1
        words = f"{counted(self.cut, 'value')} beyond the axis {'is' if is_one else 'are'} drawn at its end."
        return tag("p", words, cls="quiet")


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
    return joined(chart.svg(), values.note)


def importance(study: StudyFacts, ident: str) -> Markup:
    """Return the importance of each parameter with its 95% interval, or why there is none."""
    found = study.importance
    if found is None:
        return tag("p", f"{study.no_importance[:1].upper()}{study.no_importance[1:]}.", cls="quiet")
    words = "; ".join(f"{each.name} {each.share:.0%} ({each.low:.0%} to {each.high:.0%})" for each in found.parameters)
    longest = max((len(each.name) for each in found.parameters), default=0)
    left = min(200, 16 + 7 * longest)
    chart = Chart(
        ident, "Importance of the parameters", words, height=44 + 34 * len(found.parameters), left=left, right=24
    )
    x = Scale(0.0, 1.0, chart.x0, chart.x1)
    for place, each in enumerate(found.parameters):
        top = chart.y1 + 2 + 34 * place
        low, high = round(x(each.low), 1), round(x(each.high), 1)
        chart.add(
            tag("text", each.name, cls="row", x=chart.x0 - 8, y=top + 14, text_anchor="end"),
            tag("rect", cls="share", x=chart.x0, y=top, width=round(x(each.share) - chart.x0, 1), height=18, rx=2),
            tag("path", cls="interval", d=f"M{low} {top + 9}H{high}M{low} {top + 5}v8M{high} {top + 5}v8"),
        )
    chart.x_axis(x, "share", [0.0, 0.25, 0.5, 0.75, 1.0], lambda value: f"{value:.0%}")
    trials_there = f"{counted(found.trials, 'trial')} at {found.at}"
    note = f"By the values of {trials_there}; lines are 95% intervals over resampled trials."
    return joined(chart.svg(), tag("p", note, cls="quiet"))


# -- parameters as axes


def position(parameter: SearchedParameter, value: object) -> float | None:
    """Return the place of a value on its own axis, from 0 to 1; None if it is not on it."""
    if parameter.is_choice:
        kept = json.dumps(value) if isinstance(value, (list, dict)) else value
        return (list(parameter.ends).index(kept) + 0.5) / len(parameter.ends) if kept in parameter.ends else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    low, high = (float(end) for end in parameter.ends)
    if parameter.is_log:
        return math.log(value / low) / math.log(high / low) if value > 0 else None
    return (value - low) / (high - low)


def axis_ticks(parameter: SearchedParameter, count: int = 4) -> list[Any]:
    """Return values to write at the axis of a parameter."""
    if parameter.is_choice:
        return list(parameter.ends)
    found = Scale(float(parameter.ends[0]), float(parameter.ends[1]), 0, 1, parameter.is_log).ticks(count)
    return [each for each in found if not parameter.is_whole or each.is_integer()]


def parallel(study: StudyFacts, ident: str, runs: Runs) -> Markup:
    """Return parallel coordinates: a line for each trial over all parameters and the metric; better ones are darker."""
    trials = with_value(study)
    names = ", ".join(each.name for each in study.parameters)
    chart = Chart(
        ident,
        "Parallel coordinates",
        f"A line for each of {counted(len(trials), 'trial')} over {names} and {study.metric}; darker lines are better.",
        width=940,
        height=340,
        left=64,
        right=76,
        top=36,
        bottom=20,
        cls="parallel linked wide",
    )
    values = Values(study, chart.y0, chart.y1)
    places = np.linspace(chart.x0, chart.x1, len(study.parameters) + 1).tolist()
    order = sorted(trials, key=lambda each: float(each.row.value or 0), reverse=study.direction == "minimize")
    for rank, trial in enumerate(order):
        heights = [
            position(each, trial.row.params[each.name]) if each.name in trial.row.params else None
            for each in study.parameters
        ]
        points = [
            (x, chart.y0 + (chart.y1 - chart.y0) * at) for x, at in zip(places, heights, strict=False) if at is not None
        ]
        points.append((places[-1], values(float(trial.row.value or 0))))
        shade = f"--shade:{rank / max(1, len(order) - 1):.2f}"
        xs, ys = (np.asarray(each) for each in zip(*points, strict=True))
        title = tag("title", trial_words(study, trial))
        run = runs.get(trial.row.number)
        chart.add(tag("path", title, cls=f"line s-{trial.row.state}", d=path(xs, ys), style=shade, data_r=run))
    for x, parameter in zip(places, study.parameters, strict=False):
        at = [
            (chart.y0 + (chart.y1 - chart.y0) * (position(parameter, value) or 0), number(value))
            for value in axis_ticks(parameter)
        ]
        chart.add(_upright(chart, x, parameter.name + (" (log)" if parameter.is_log else ""), at))
    at = [(values.scale(value), number(value)) for value in values.scale.ticks(4)]
    chart.add(_upright(chart, places[-1], study.metric, at, is_last=True))
    return joined(chart.svg(), values.note)


def _upright(chart: Chart, x: float, name: str, at: Sequence[tuple[float, str]], is_last: bool = False) -> Markup:
    x = round(x, 1)
    side, anchor = (6, "start") if is_last else (-6, "end")
    words = [tag("text", text, x=x + side, y=round(y, 1) + 4, text_anchor=anchor) for y, text in at]
    line = tag("path", cls="base", d=f"M{x} {chart.y0}V{chart.y1}")
    return tag(
        "g", line, tag("text", name, cls="label", x=x, y=18, text_anchor="middle"), *words, cls="axis upright", data_x=x
    )


def slices(study: StudyFacts, ident: str, runs: Runs) -> Markup:
    """Return a chart for each parameter: its values across, and those of the metric upwards."""
    trials = with_value(study)
    figures = []
    for place, parameter in enumerate(study.parameters):
        chart = Chart(
            f"{ident}-{place}",
            f"{study.metric} by {parameter.name}",
            f"A mark for each trial: {parameter.name} across, {study.metric} upwards.",
            width=320,
            height=230,
            cls="linked",
        )
        values = Values(study, chart.y0, chart.y1)
        across = Scale(0.0, 1.0, chart.x0 + 6, chart.x1 - 6)
        chart.y_axis(values.scale, values.scale.ticks(4))
        words = {position(parameter, each) or 0.0: number(each) for each in axis_ticks(parameter)}
        label = parameter.name + (" (log)" if parameter.is_log else "")
        chart.x_axis(across, label, list(words), lambda at, words=words: words[at])  # type: ignore[misc]
        for trial in trials:
            at = position(parameter, trial.row.params.get(parameter.name))
            if at is not None:
                value = number(trial.row.params[parameter.name])
                text = f"{trial_words(study, trial)}, {parameter.name} {value}"
                chart.add(mark(trial, across(at), values(float(trial.row.value or 0)), text, runs))
        figures.append(tag("div", chart.svg()))
    return tag("div", *figures, cls="grid slices")


# -- rungs, front, workers


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
    return tag(
        "div",
        table,
        cls="scroll",
        tabindex="0",
        role="region",
        aria_label=title if bracket is None else f"Rungs of bracket {bracket}",
    )


def front(study: StudyFacts, ident: str, runs: Runs) -> Markup:
    """Return all complete trials by two objectives, those of the Pareto front filled and joined."""
    first, second = list(study.metrics)[:2]
    complete = [trial for trial in study.trials if first in trial.row.values and second in trial.row.values]
    if not complete:
        return tag("p", "No trial is complete yet.", cls="quiet")
    chart = Chart(
        ident,
        f"Pareto front of {first} and {second}",
        f"{counted(len(study.front), 'trial')} of {len(complete)} complete ones that no other beats in all metrics.",
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


def workers(sweep: SweepFacts, ident: str, runs: Runs) -> tuple[Markup, float]:
    """Return the timeline of the workers, and the part of their time in which they had a trial."""
    states = {trial.row.number: trial.row.state for trial in sweep.study.trials}
    rows, busy, total = [], 0.0, 0.0
    for worker in sweep.workers:
        total += sum(each.seconds for each in worker.attempts)
        busy += sum(piece.end - piece.begin for piece in worker.pieces)
        bars = [
            Bar(
                piece.begin,
                piece.end,
                f"s-{states.get(piece.trial, '')}",
                f"worker {worker.worker}, trial {piece.trial}: {duration(piece.end - piece.begin)}",
                str(piece.trial),
                runs.get(piece.trial),
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
        rest = ["", "", "best"]
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
    caption = tag("caption", f"The best trials, trained again with seeds {', '.join(map(str, found.seeds))}")
    return tag(
        "div",
        tag("table", caption, tag("thead", head), tag("tbody", *rows)),
        cls="scroll",
        tabindex="0",
        role="region",
        aria_label="Confirmation",
    )
