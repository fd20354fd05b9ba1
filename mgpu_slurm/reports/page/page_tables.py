"""Tables of a page: runs, attempts, and what was asked for and used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mgpu_slurm.core.formatting import binary_size, counted, duration
from mgpu_slurm.reports.facts.report_facts import Facts, RunFacts, WorkerFacts
from mgpu_slurm.reports.page.markup import Markup, joined, number, scrolling, tag
from mgpu_slurm.reports.page.run_charts import sparkline
from mgpu_slurm.reports.page.shown import Shown, badge, families

MOST_COLUMNS = 12
"""Maximum number of config values that are shown; the others are hidden until asked for."""

MOST_ATTEMPT_ROWS = 200


# -- runs


def runs_table(facts: Facts, runs: Sequence[Shown]) -> Markup:
    """Return the table of runs: state, results, and the config values in which they differ."""
    others = [name for name in facts.metric_names if name != facts.metric][:3]
    keys = facts.differing_keys
    has_several = any(len(run.facts.attempts) > 1 for run in runs)
    main = facts.metric
    heads = ["Run", "State"]
    heads += [] if main is None else [f"Best {main}", f"Last {main}", "Curve"]
    heads += [f"Last {name}" for name in others] + ["Progress"] + (["Attempts"] if has_several else []) + ["Time"]
    body = [tag("tr", *_cells(run, main, others, keys, has_several), data_r=run.index) for run in runs]
    head = [_head(words) for words in heads]
    head += [_head(key, "more" if place >= MOST_COLUMNS else None) for place, key in enumerate(keys)]
    table = tag("table", tag("caption", "All runs of this report", cls="hidden"), tag("thead", tag("tr", *head)),
                tag("tbody", *body), id="runs")  # fmt: skip
    hidden = max(0, len(keys) - MOST_COLUMNS)
    words = f"Show {counted(hidden, 'more config value')}"
    more = tag("button", words, type="button", id="more-columns", cls="script") if hidden else ""
    return joined(scrolling("Table of runs", table, cls="runs"), more)


def _head(words: str, cls: str | None = None) -> Markup:
    return tag("th", tag("span", words), scope="col", aria_sort="none", cls=cls)


def _cells(
    run: Shown, main: str | None, others: Sequence[str], keys: Sequence[str], has_several: bool
) -> Iterable[Markup]:
    facts = run.facts
    swatch = tag("span", cls=f"swatch {run.color_class}", aria_hidden="true")
    box = tag("input", type="checkbox", checked="checked", cls="script", aria_label=f"show {run.name}")
    yield tag("th", box, swatch, tag("span", run.name, cls="name", title=facts.run), scope="row")
    yield tag("td", badge(facts.state), title=facts.reason or None)
    if main is not None:
        found = facts.metrics.get(main)
        yield _value(None if found is None else found.best)
        yield _value(None if found is None else found.last)
        yield tag("td", sparkline(run, main))
    for name in others:
        found = facts.metrics.get(name)
        yield _value(None if found is None else found.last)
    words = str(facts.progress) if facts.total is None else f"{facts.progress}/{facts.total}"
    yield tag("td", words, cls="n", data_v=facts.progress)
    if has_several:
        yield _value(len(facts.attempts))
    yield tag("td", duration(facts.seconds), cls="n", data_v=round(facts.seconds, 3))
    for place, key in enumerate(keys):
        yield _value(facts.config.get(key), "more" if place >= MOST_COLUMNS else None)


def _value(value: Any, cls: str | None = None) -> Markup:
    """Return a cell; numbers to the right, with their exact value for sorting."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return tag("td", number(value), cls=f"n {cls or ''}".strip(), data_v=_exact(value))
    return tag("td", number(value) if value is not None else "", cls=cls)


def _exact(value: float) -> str:
    """Return a number as scripts read it."""
    return repr(value).replace("inf", "Infinity")


# -- attempts


def attempts_table(runs: Sequence[Shown]) -> Markup:
    """Return a table of the attempts of runs that were interrupted or failed; empty if none was."""
    rows = [
        tag(
            "tr",
            tag("th", run.name, scope="row"),
            tag("td", each.attempt, cls="n"),
            tag("td", each.job_id or ""),
            tag("td", ", ".join(each.nodes)),
            tag("td", duration(each.seconds), cls="n"),
            tag("td", each.ended_by or ("still running" if each.ended is None else "completed"), cls="words"),
            tag("td", each.then),
        )
        for run in runs
        if was_interrupted(run.facts)
        for each in run.facts.attempts
    ]
    if not rows:
        return Markup()
    left_out = len(rows) - MOST_ATTEMPT_ROWS
    note = tag("p", f"{counted(left_out, 'further attempt')} left out.", cls="quiet") if left_out > 0 else ""
    caption = tag("caption", "Runs that were interrupted or failed, and what ended each attempt")
    head = tag(
        "tr", *(tag("th", each, scope="col") for each in ("Run", "Attempt", "Job", "Nodes", "Time", "Ended by", "Then"))
    )
    table = tag("table", caption, tag("thead", head), tag("tbody", *rows[:MOST_ATTEMPT_ROWS]))
    return joined(scrolling("Attempts and what ended them", table), note)


def was_interrupted(run: RunFacts) -> bool:
    return bool(run.attempts) and (len(run.attempts) > 1 or run.state not in ("COMPLETED", "RUNNING"))


# -- asked for and used


def resources_table(facts: Facts, runs: Sequence[Shown]) -> Markup:
    """Return what runs, groups and sweeps asked for and used; empty if nothing is known."""
    named = [(family[0], family[0].family_name, [run.facts for run in family]) for family in families(runs).values()]
    sweeps = {sweep.run: sweep.workers for sweep in facts.sweeps}
    every = [(first, name, sweeps.get(first.family, own)) for first, name, own in named]
    rows = [row for first, name, users in every if (row := _resources(first, name, users))]
    if not rows:
        return Markup()
    groups = tag(
        "tr",
        tag("td"),
        *(
            tag("th", words, scope="colgroup", colspan=3)
            for words in ("Cores of a rank", "Memory of a node", "Time limit")
        ),
        tag("th", "GPUs", scope="colgroup", colspan=2),
    )
    names = [
        "Run or group",
        "asked",
        "busy",
        "share",
        "asked",
        "most",
        "share",
        "asked",
        "longest",
        "share",
        "busy",
        "memory",
    ]
    head = tag("tr", *(tag("th", name, scope="col") for name in names))
    caption = tag("caption", "Resources that were asked for and used", cls="hidden")
    return scrolling("Table of resources", tag("table", caption, tag("thead", groups, head), tag("tbody", *rows)))


def _resources(first: Shown, name: str, users: Sequence[RunFacts | WorkerFacts]) -> Markup | None:
    """Return the row of a group of runs, or of the workers of a sweep; None if nothing is known."""
    known = [each for each in users if each.asked is not None and each.used is not None]
    if not known:
        return None
    asked = known[0].asked
    assert asked is not None
    used = [run.used for run in known if run.used is not None]
    cores, longest = (
        max((value for each in used if (value := getattr(each, key)) is not None), default=None)
        for key in ("cores", "longest")
    )
    memory = max((value for each in used if (value := each.needed_memory) is not None), default=None)
    gpu, gpu_memory = (
        max((value for each in used if (value := getattr(each, key)) is not None), default=None)
        for key in ("gpu", "gpu_mem")
    )
    swatch = tag("span", cls=f"swatch {first.color_class}", aria_hidden="true")
    return tag(
        "tr",
        tag("th", swatch, name, scope="row"),
        *_three(asked.cpus_per_task, cores, lambda value: number(value, 3)),
        *_three(asked.mem, memory, lambda value: binary_size(int(value))),
        *_three(asked.time, longest, duration),
        tag("td", "-" if gpu is None else f"{gpu:.0%}", cls="n"),
        tag("td", "-" if gpu_memory is None else binary_size(int(gpu_memory)), cls="n"),
    )


def _three(asked: float | None, used: float | None, words: Any) -> Iterable[Markup]:
    yield tag("td", "-" if asked is None else words(asked), cls="n")
    yield tag("td", "-" if used is None else words(used), cls="n")
    if asked and used is not None:
        share = used / asked
        meter = tag("span", cls="meter", style=f"--share:{min(1.0, share):.2f}")
        yield tag("td", meter, f"{share:.0%}")
    else:
        yield tag("td", "-")
