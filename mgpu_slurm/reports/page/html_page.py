"""The page of a report: one HTML file that needs no network, and shows all charts without a script too."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence

from mgpu_slurm.core.formatting import counted
from mgpu_slurm.reports.facts.report_facts import Facts
from mgpu_slurm.reports.page import page_data, page_tables, run_charts
from mgpu_slurm.reports.page.markup import Markup, Section, figure, joined, scrolling, section, tag
from mgpu_slurm.reports.page.overview import overview
from mgpu_slurm.reports.page.shown import Shown, arranged, families
from mgpu_slurm.reports.page.sweep_section import sweep_section
from mgpu_slurm.submission.project.outputs import GENERATOR

MOST_ROWS = 40
"""Number of rows of the timeline from which it shows runs that were interrupted or failed only."""

MOST_USAGE = 8
"""Number of runs whose usage over time is drawn."""

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; form-action 'none'; base-uri 'none'"
)
"""Content security policy of the page: it cannot load or send anything."""

SCRIPTS = ("core.js", "curves.js", "table.js", "sweep.js", "reload.js")


def page(facts: Facts, refresh: int | None = None, with_points: bool = True) -> str:
    """Return the whole page.

    Args:
        refresh: seconds after which a browser loads the file again.
        with_points: hold the points of curves, for smoothing and zooming.
    """
    runs = arranged(facts)
    most = page_data.points_per_curve(runs) if with_points else 0
    sections = [section for section in _sections(facts, runs) if section is not None]
    links = [tag("a", name, href=f"#{ident}") for ident, name, _ in sections]
    body = [part for _, _, part in sections]
    data = page_data.packed(runs if with_points else [], most, facts.differing_keys)
    held = f" Each curve has at most {most:,} points here; the files of the runs have all." if with_points else ""
    head = joined(
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        Markup(f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""),
        Markup(f'<meta {GENERATOR}><meta name="color-scheme" content="light dark">'),
        tag("title", facts.title),
        tag("style", Markup(_asset("report.css"))),
    )
    controls = [
        tag("button", name, type="button", id=ident, cls="script")
        for ident, name in (("theme", "Dark"), ("print", "Print"))
    ]
    made = joined("Made ", facts.made[:16].replace("T", " "), " UTC by ", tag("code", f"mgpu-slurm {facts.version}"))
    header = tag(
        "header",
        tag(
            "div", tag("h1", facts.title), tag("p", made, " from ", counted(len(runs), "run"), cls="quiet"), cls="inner"
        ),
        tag("nav", tag("div", *links, tag("span", cls="space"), *controls, cls="inner"), aria_label="Sections"),
    )
    footer = tag("footer", tag("p", f"This file needs no network.{held}", cls="quiet"), cls="inner")
    tip = tag("div", id="tip", hidden="hidden")
    scripts = [tag("script", Markup(_asset(name))) for name in SCRIPTS] if with_points else []
    stored = tag("script", data, type="application/json", id="data")
    whole = tag("body", header, tag("main", *body), footer, tip, stored, *scripts)
    return f"<!doctype html>\n{tag('html', tag('head', head), whole, lang='en')}\n"


def _asset(name: str) -> str:
    folder = importlib.resources.files("mgpu_slurm.reports.page") / "assets"
    return (folder / name).read_text(encoding="utf-8")


def stylesheet() -> str:
    """Return the styles of charts, for files that have a chart alone."""
    return _asset("report.css")


def _sections(facts: Facts, runs: Sequence[Shown]) -> list[Section | None]:
    return [
        overview(facts, runs),
        section("table", "Runs", _filter(), page_tables.runs_table(facts, runs)) if runs else None,
        _curves(facts, runs),
        *(sweep_section(place, sweep, runs) for place, sweep in enumerate(facts.sweeps)),
        _attempts(runs),
        _resources(facts, runs),
    ]


# -- runs and curves


def _filter() -> Markup:
    box = tag(
        "input", id="filter", type="search", placeholder="words  state:failed  lr<0.01  width=32", autocomplete="off"
    )
    buttons = [
        tag("button", name, type="button", id=ident) for ident, name in (("all", "All"), ("csv", "CSV of the points"))
    ]
    count = tag("span", id="count", role="status", cls="quiet")
    return tag("div", tag("label", "Filter ", box, cls="grow"), count, *buttons, cls="bar script")


def _curves(facts: Facts, runs: Sequence[Shown]) -> Section | None:
    names = facts.metric_names
    if not names:
        return None
    most = run_charts.spread_points(runs, names)
    figures = []
    for place, metric in enumerate(names):
        having = [run for run in runs if metric in run.facts.series]
        chart = run_charts.curves(f"curve-{place}", metric, having, most)
        figures.append(figure(metric, tag("div", chart.svg(), cls="drawing")))
    return section("curves", "Curves", _curve_controls(facts), _legend(runs), tag("div", *figures, cls="grid pairs"))


def _curve_controls(facts: Facts) -> Markup:
    smooth = tag("input", id="smooth", type="range", min=0, max=0.99, step=0.01, value=0)
    return tag(
        "div",
        tag("label", "Smoothing ", smooth, tag("output", "0", id="smooth-value")),
        _select("axis", "Over", [("progress", "progress"), ("step", "step"), ("minutes", "minutes at work")]),
        _select("color", "Colour by", [("", "group"), *((key, key) for key in facts.differing_keys)]),
        _select("band", "Band", [("std", "mean and std of seeds"), ("range", "range of seeds"), ("none", "none")]),
        tag("label", tag("input", id="log", type="checkbox"), " log scale"),
        cls="bar script",
    )


def _select(ident: str, name: str, options: Sequence[tuple[str, str]]) -> Markup:
    choices = [tag("option", words, value=value) for value, words in options]
    return tag("label", f"{name} ", tag("select", *choices, id=ident))


def _legend(runs: Sequence[Shown]) -> Markup:
    items = [
        tag("li", tag("span", cls=f"swatch {family[0].color_class}", aria_hidden="true"), family[0].family_name, " ",
            tag("span", counted(len(family), "trial" if family[0].facts.kind == "trial" else "run"), cls="quiet"))
        for family in list(families(runs).values())[:MOST_ROWS]
    ]  # fmt: skip
    return tag("ul", *items, cls="legend", id="legend")


# -- attempts and resources


def _attempts(runs: Sequence[Shown]) -> Section | None:
    own = [run for run in runs if run.facts.kind == "run" and run.facts.attempts]
    if not own:
        return None
    shown = own if len(own) <= MOST_ROWS else [run for run in own if page_tables.was_interrupted(run.facts)][:MOST_ROWS]
    note = f"{len(shown)} of {len(own)} runs: those that were interrupted or failed." if len(shown) < len(own) else ""
    chart = scrolling("Timeline of attempts", run_charts.attempts(shown).svg()) if shown else ""
    return section(
        "attempts", "Attempts", figure("Attempts over time", chart, tag("p", note, cls="quiet") if note else ""),
        page_tables.attempts_table(own),
    )  # fmt: skip


def _resources(facts: Facts, runs: Sequence[Shown]) -> Section | None:
    if not facts.ledger.total:
        return None
    sampled = [run for run in runs if run.facts.usage]
    figures: list[Markup] = []
    for run in sampled[:MOST_USAGE]:
        asked = run.facts.asked
        cores = None if asked is None or asked.cpus_per_task is None else asked.cpus_per_task * asked.ranks_per_node
        chart = run_charts.usage(f"usage-{run.index}", run.name, run.facts.usage, cores)
        of_gpus = run_charts.gpu_usage(f"gpus-{run.index}", run.name, run.facts.usage)
        for drawn, words in (
            (chart, " cores busy (line), asked for (dotted), memory (dashed)"),
            (of_gpus, " % of the time its GPUs computed (line), memory of the fullest (dashed)"),
        ):
            if drawn is not None:
                figures.append(figure(joined(run.name, tag("span", words, cls="quiet")), drawn.svg()))
    table = page_tables.resources_table(facts, runs)
    unit = "GPU" if facts.unit == "gpu" else "core"
    return section(
        "resources",
        "Resources",
        figure(f"Where the allocated {unit} time went", run_charts.ledger(facts.ledger)),
        joined(tag("h3", "Asked for and used"), table) if table else "",
        tag("div", *figures, cls="grid pairs gap") if figures else "",
        tag("p", f"Usage over time is that of the first {MOST_USAGE} of {len(sampled)} runs.", cls="quiet")
        if len(sampled) > MOST_USAGE
        else "",
    )
