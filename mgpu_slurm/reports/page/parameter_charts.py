"""Charts of what the parameters of a sweep do: their importance, all at once, and one by one."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mgpu_slurm.core.formatting import counted
from mgpu_slurm.reports.page.markup import Markup, joined, number, tag
from mgpu_slurm.reports.page.svg import Chart, Scale, path
from mgpu_slurm.reports.page.sweep_charts import Runs, Values, mark, trial_words, with_value

if TYPE_CHECKING:
    from mgpu_slurm.sweeps.analysis.study_facts import SearchedParameter, StudyFacts


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
    found = [each for each in found if not parameter.is_whole or each.is_integer()]
    powers = [each for each in found if math.log10(each).is_integer()] if parameter.is_log else []
    return powers if len(powers) > 1 and len(found) > count else found


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
    values.add_note(chart)
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
        values.add_note(chart)
        figures.append(tag("div", chart.svg()))
    note = Values(study, 1.0, 0.0).note
    return joined(tag("div", *figures, cls="grid slices"), note)
