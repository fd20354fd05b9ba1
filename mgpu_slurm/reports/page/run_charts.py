"""Charts of runs: curves, sparklines, the timeline of attempts, where the time went, and usage over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

import numpy as np

from mgpu_slurm.core.formatting import binary_size, counted, duration
from mgpu_slurm.metrics.event_layout import Floats
from mgpu_slurm.reports.aggregation.decimation import decimated
from mgpu_slurm.reports.facts.series import Series
from mgpu_slurm.reports.page.markup import Markup, number, tag
from mgpu_slurm.reports.page.shown import Shown
from mgpu_slurm.reports.page.svg import Chart, Scale, finite_range, path, ticks, whole_ticks
from mgpu_slurm.reports.usage.ledger import PARTS, Ledger, Outcome
from mgpu_slurm.run_folder.usage_records import NodeUsage, UsageSample

STATIC_POINTS = 160
"""Maximum number of points of a curve that is drawn without a script."""
ALL_STATIC_POINTS = 120_000
"""The same for all curves of a page together."""

LEAST_SAMPLES = 3
"""Number of samples from which usage over time is drawn."""

MIB, GIB = 1 << 20, 1 << 30

LOG_FROM = 50
"""Ratio of the highest to the lowest value from which a metric that is minimized gets a logarithmic axis."""

PART_WORDS = {
    "training": "training",
    "saving": "saving checkpoints",
    "starting": "starting",
    "repeated": "repeated after a restart",
    "failed": "lost in failures",
    "between_trials": "between trials",
    "other": "other",
}
assert set(PART_WORDS) == set(PARTS)


# -- curves


def curves(ident: str, metric: str, runs: Sequence[Shown], most: int = STATIC_POINTS) -> Chart:
    """Return the chart of a metric over progress.

    Args:
        runs: those that have it.
        most: maximum number of points of a curve.
    """
    series = [run.facts.series[metric] for run in runs]
    values = [each.value for each in series]
    is_log = _is_log(runs[0], metric, values)
    last = [each.last for each in series if np.isfinite(each.last)]
    chart = Chart(
        ident,
        f"{metric} by progress",
        f"{counted(len(runs), 'run')}. {_range_in_words(last)}",
        cls="curves",
        data={"data_metric": metric, "data_log": int(is_log)},
    )
    x = Scale.over([each.progress for each in series], chart.x0, chart.x1, pad=0)
    y = Scale.over(values, chart.y0, chart.y1, is_log)
    chart.y_axis(y)
    chart.x_axis(x, "progress", whole_ticks(x) or x.ticks())
    bands = [mark for repetitions in repeated(runs).values() for mark in _band(repetitions, metric, x, y, most)]
    lines = [mark for run in runs for mark in _line(run, run.facts.series[metric], x, y, most)]
    chart.add(tag("g", *lines, *bands, cls="plot"))
    return chart


def _is_log(run: Shown, metric: str, values: Sequence[Floats]) -> bool:
    low, high = finite_range(values)
    return run.facts.metrics[metric].direction == "minimize" and low > 0 and high / low > LOG_FROM


def repeated(runs: Sequence[Shown]) -> dict[str, list[Shown]]:
    """Return runs that differ in their seed only, two of each kind at least."""
    found: dict[str, list[Shown]] = {}
    for run in runs:
        if run.repeats is not None:
            found.setdefault(run.repeats, []).append(run)
    return {key: group for key, group in found.items() if len(group) > 1}


def _range_in_words(last: Sequence[float]) -> str:
    if not last:
        return "No last value is finite."
    low, high = number(min(last)), number(max(last))
    return f"Last value {low}." if low == high else f"Last values from {low} to {high}."


def _line(run: Shown, series: Series, x: Scale, y: Scale, most: int) -> Iterable[Markup]:
    kept = decimated(series.value, most)
    xs, ys = x(series.progress[kept]), y(series.value[kept])
    if len(kept) == 1:
        if np.isfinite(ys).all():
            yield tag(
                "circle", cls=f"dot {run.classes}", r=2.5, cx=round(xs[0], 1), cy=round(ys[0], 1), data_r=run.index
            )
        return
    yield tag("path", cls=f"run {run.classes}", d=path(xs, ys), data_r=run.index)


def _band(family: Sequence[Shown], metric: str, x: Scale, y: Scale, most: int) -> Iterable[Markup]:
    """Yield the mean of runs that differ in their seed, and one standard deviation around it."""
    at, mean, std = _mean(family, metric)
    kept = decimated(mean, most)
    at, mean, std = at[kept], mean[kept], std[kept]
    low, high = (np.clip(mean + sign * std, y.low, y.high) for sign in (-1, 1))
    # a stretch without a gap is one outline
    for part in np.split(np.arange(len(at)), np.flatnonzero(~np.isfinite(mean))):
        part = part[np.isfinite(mean[part])]
        if len(part) > 1:
            outline = path(np.append(x(at[part]), x(at[part][::-1])), np.append(y(high[part]), y(low[part][::-1])))
            yield tag("path", cls=f"band {family[0].color_class}", d=f"{outline}Z")
    if len(at) > 1:
        yield tag("path", cls=f"mean {family[0].color_class}", d=path(x(at), y(mean)))


def _mean(family: Sequence[Shown], metric: str) -> tuple[Floats, Floats, Floats]:
    """Return the progress values that several runs have, with the mean and standard deviation there."""
    found: dict[float, list[float]] = {}
    for run in family:
        series = run.facts.series[metric]
        for at, value in zip(series.progress.tolist(), series.value.tolist(), strict=True):
            found.setdefault(at, []).append(value)
    several = sorted(at for at, values in found.items() if len(values) > 1)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = np.asarray([np.mean(found[at]) for at in several])
        std = np.asarray([np.std(found[at], ddof=1) for at in several])
    return np.asarray(several), mean, std


def sparkline(run: Shown, metric: str) -> Markup:
    """Return the curve of a run for a cell of a table; empty if it has no two points."""
    series = run.facts.series.get(metric)
    if series is None or np.isfinite(series.value).sum() < 2:
        return Markup()
    kept = decimated(series.value, 40)
    x = Scale.over([series.progress], 1, 71, pad=0)
    y = Scale.over([series.value], 17, 3, pad=0)
    line = tag("path", cls=run.color_class, d=path(x(series.progress[kept]), y(series.value[kept])))
    return tag("svg", line, cls="spark", viewBox="0 0 72 20", aria_hidden="true")


# -- timelines


@dataclass(frozen=True)
class Bar:
    """A bar of a timeline."""

    begin: float
    """Seconds since 1970."""
    end: float
    cls: str
    words: str
    """What it is, for people."""
    label: str = ""
    """Written into it if there is room."""
    run: int | None = None
    """The number of its run on the page."""


def seconds_of(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


def timeline(ident: str, title: str, description: str, rows: Sequence[tuple[str, Sequence[Bar]]]) -> Chart:
    """Return rows of bars over a common time, which begins with the first bar."""
    bars = [bar for _, row in rows for bar in row]
    begin = min((bar.begin for bar in bars), default=0.0)
    seconds = max((bar.end for bar in bars), default=1.0) - begin
    unit, name = (1, "seconds") if seconds < 300 else (60, "minutes") if seconds < 4 * 3600 else (3600, "hours")
    chart = Chart(
        ident, title, description, width=940, height=48 + 26 * len(rows), left=130, right=14, top=8, cls="linked wide"
    )
    scale = Scale(0.0, max(seconds / unit, 1e-9), chart.x0, chart.x1)
    for value in ticks(0.0, scale.high, 8):
        x = round(scale(value), 1)
        chart.add(tag("path", cls="grid", d=f"M{x} {chart.y0}V{chart.y1}"))
    chart.x_axis(scale, f"{name} since the first start", ticks(0.0, scale.high, 8))
    for place, (label, row) in enumerate(rows):
        top = chart.y1 + 2 + 26 * place
        shown = label if len(label) <= 19 else f"{label[:18]}…"
        chart.add(tag("text", shown, cls="row", x=chart.x0 - 8, y=top + 15, text_anchor="end"))
        chart.add(*(_bar(bar, scale, begin, unit, top) for bar in row))
    return chart


def _bar(bar: Bar, scale: Scale, begin: float, unit: float, top: int) -> Markup:
    x, end = (scale((time - begin) / unit) for time in (bar.begin, bar.end))
    width = max(end - x, 1.5)
    parts = [tag("title", bar.words), tag("rect", x=round(x, 1), y=top, width=round(width, 1), height=21, rx=3)]
    if bar.label and width > 8 + 6 * len(bar.label):
        parts.append(tag("text", bar.label, x=round(x + width / 2, 1), y=top + 15, text_anchor="middle"))
    return tag("g", *parts, cls=f"bar {bar.cls}", data_r=bar.run)


def attempts(runs: Sequence[Shown]) -> Chart:
    """Return the timeline of the attempts of runs, a row for each run."""
    rows = [(run.name, _bars(run)) for run in runs]
    return timeline("attempts-chart", "Attempts of runs", f"A row for each of {counted(len(runs), 'run')}.", rows)


_OUTCOMES: Mapping[Outcome, str] = {
    "completed": "s-COMPLETED",
    "running": "s-RUNNING",
    "stopped": "s-CANCELLED",
    "failed": "s-FAILED",
    "lost": "s-FAILED",
}


def _bars(run: Shown) -> list[Bar]:
    found = []
    for each in run.facts.attempts:
        begin = seconds_of(each.started)
        words = f"{run.name}, attempt {each.attempt}: {duration(each.seconds)}"
        words += f"; {each.ended_by}" if each.ended_by else ""
        found.append(Bar(begin, begin + each.seconds, _OUTCOMES[each.outcome], words, str(each.attempt), run.index))
    return found


# -- where the time went


def ledger(total: Ledger) -> Markup:
    """Return a bar of the parts of the allocated time, and what they are."""
    parts = {name: (float(getattr(total, name)), total.share(name)) for name in PART_WORDS}  # type: ignore[arg-type]
    shown = {name: each for name, each in parts.items() if each[0] > 0}
    chart = Chart(
        "ledger",
        "Where the time went",
        "; ".join(f"{PART_WORDS[name]} {share:.0%}" for name, (_, share) in shown.items()),
        width=940,
        height=28,
        left=0,
        right=0,
        top=0,
        bottom=0,
        cls="ledger",
    )
    at = 0.0
    for name, (_, share) in shown.items():
        chart.add(tag("rect", cls=f"part-{name}", x=round(at, 1), y=0, width=round(940 * share, 1), height=28))
        at += 940 * share
    items = [
        tag("li", tag("span", cls=f"swatch part-{name}", aria_hidden="true"), f"{PART_WORDS[name]} ",
            tag("b", "<1%" if share < 0.005 else f"{share:.0%}"), " ", tag("span", duration(seconds), cls="quiet"))
        for name, (seconds, share) in shown.items()
    ]  # fmt: skip
    return tag("div", chart.svg(), tag("ul", *items, cls="legend"))


# -- usage over time


def usage(ident: str, name: str, nodes: Sequence[NodeUsage], cores: int | None) -> Chart | None:
    """Return the cores that were busy and the memory on a node of a run over time; None if nothing was sampled.

    Args:
        nodes: of one run; the node with the highest memory is shown.
        cores: what it asked for, per node.
    """
    fullest = max(nodes, key=lambda node: node.peak, default=None)
    # the last one is of a node whose ranks have ended
    samples = [] if fullest is None else [each for each in fullest.samples if each.ranks]
    if fullest is None or len(samples) < LEAST_SAMPLES:
        return None
    times = _times(samples)
    rates = [
        later.cpu / max(1e-3, end - begin) for later, (begin, end) in zip(samples[1:], pairwise(times), strict=True)
    ]
    busy, memory = np.asarray([np.nan, *rates]), np.asarray([float(each.rss) for each in samples])
    words = (
        f"Up to {number(float(np.nanmax(busy)), 3)} cores busy on {fullest.node},"
        f" and {binary_size(int(memory.max()))} of memory."
    )
    chart = Chart(ident, f"Usage of {name}", words, right=64)
    _draw_usage(chart, times, busy, max(float(np.nanmax(busy)), float(cores or 0)), memory, cores)
    return chart


def gpu_usage(ident: str, name: str, nodes: Sequence[NodeUsage]) -> Chart | None:
    """Return the percentage of the time in which the GPUs of a node computed, and the highest memory of one, over time.

    None is returned if no GPU was sampled.

    Args:
        nodes: of one run; the node with the highest memory of a GPU is shown.
    """
    fullest = max(nodes, key=lambda node: max(map(_gpu_memory, node.samples), default=0.0), default=None)
    samples = [] if fullest is None else [each for each in fullest.samples if _utilizations(each)]
    if fullest is None or len(samples) < LEAST_SAMPLES:
        return None
    busy = np.asarray([100 * sum(found) / len(found) for found in map(_utilizations, samples)])
    memory = np.asarray([_gpu_memory(each) for each in samples])
    words = (
        f"{counted(max(len(each.gpu) for each in samples), 'GPU')} of {fullest.node}, computing for up to"
        f" {number(float(busy.max()), 3)}% of the time, with up to {binary_size(int(memory.max()))} of memory on one."
    )
    chart = Chart(ident, f"GPUs of {name}", words, right=64)
    _draw_usage(chart, _times(samples), busy, 100.0, memory)
    return chart


def _utilizations(sample: UsageSample) -> list[float]:
    return [gpu.util for gpu in sample.gpu if gpu.util is not None]


def _gpu_memory(sample: UsageSample) -> float:
    return float(max((gpu.mem or 0 for gpu in sample.gpu), default=0))


def _times(samples: Sequence[UsageSample]) -> list[float]:
    return [seconds_of(each.time) for each in samples]


def _draw_usage(
    chart: Chart, times: Sequence[float], busy: Floats, most: float, memory: Floats, asked: int | None = None
) -> None:
    """Draw what was busy by the axis on the left, and memory by the one on the right.

    Args:
        most: the highest value of the axis on the left.
        asked: a line there.
    """
    minutes = np.asarray([time - times[0] for time in times]) / 60
    x = Scale(0.0, max(float(minutes[-1]), 1e-9), chart.x0, chart.x1)
    y = Scale(0.0, max(most, 1e-9) * 1.05, chart.y0, chart.y1)
    of_memory = Scale(0.0, float(memory.max()) * 1.1 or 1.0, chart.y0, chart.y1)
    chart.y_axis(y)
    chart.x_axis(x, "minutes since the first sample")
    unit = GIB if of_memory.high > GIB else MIB
    for value in ticks(0.0, of_memory.high / unit, 4):
        height = round(of_memory(value * unit), 1) + 4
        chart.add(tag("text", binary_size(int(value * unit)), x=chart.x1 + 6, y=height))
    if asked:
        chart.add(tag("path", cls="asked", d=f"M{chart.x0} {round(y(asked), 1)}H{chart.x1}"))
    for cls, scale, values in (("busy", y, busy), ("memory", of_memory, memory)):
        kept = decimated(values, STATIC_POINTS)
        chart.add(tag("path", cls=cls, d=path(x(minutes[kept]), scale(values[kept]))))


def spread_points(runs: Sequence[Shown], metrics: Sequence[str]) -> int:
    """Return how many points each curve may have, so that those of a page do not become too many."""
    count = sum(name in run.facts.series for run in runs for name in metrics)
    return max(40, min(STATIC_POINTS, ALL_STATIC_POINTS // max(1, count)))
