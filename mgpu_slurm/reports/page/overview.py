"""The first section of a page: what came out, and what to look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from mgpu_slurm.core.formatting import counted, duration
from mgpu_slurm.reports.facts.report_facts import Facts
from mgpu_slurm.reports.page.markup import Markup, Section, joined, number, section, tag
from mgpu_slurm.reports.page.shown import Names, Shown, names_of
from mgpu_slurm.reports.usage.advice import Advice

MOST_ITEMS = 40
"""Maximum number of failures, and of warnings, that are listed."""

_WELL = ("COMPLETED", "RUNNING", "PENDING", "UNKNOWN", "CANCELLED")
_ICONS = {"memory": "▤", "time": "◔", "cores": "▦", "gpu": "▦", "workers": "⚑", "starting": "◔", "range": "↔"}


def overview(facts: Facts, runs: Sequence[Shown]) -> Section:
    cards = tag("div", *(_card(*each) for each in _cards(facts, runs)), cls="cards")
    return section("overview", "Overview", cards, tag("h3", "What to look at"), _to_look_at(facts, runs))


# -- cards


def _card(name: str, value: str, more: str) -> Markup:
    parts = (("key", name), ("value", value), ("more", more))
    return tag("div", *(tag("div", words, cls=cls) for cls, words in parts), cls="card")


def _cards(facts: Facts, runs: Sequence[Shown]) -> Iterator[tuple[str, str, str]]:
    yield from _best(facts, runs)
    counts = Counter(run.facts.state for run in runs)
    words = ", ".join(f"{count} {state.lower().replace('_', ' ')}" for state, count in counts.most_common())
    yield "Runs", str(len(runs)), words
    if facts.ledger.total:
        name = "GPU time" if facts.unit == "gpu" else "Core time"
        yield name, duration(float(facts.ledger.total)), "allocated to all attempts"
        yield "Spent on training", f"{facts.ledger.share('training'):.0%}", "the rest is in “Resources”"


def _best(facts: Facts, runs: Sequence[Shown]) -> Iterator[tuple[str, str, str]]:
    """Yield the best trial of the first sweep if the page is about its metric, else the run with the best value."""
    metric = facts.metric
    study = facts.sweeps[0].study if facts.sweeps else None
    if metric is None:
        return
    if study is not None and study.metric == metric:
        best = next((trial.row for trial in study.trials if trial.row.number == study.best), None)
        if best is not None:
            yield f"Best {metric}", number(best.value, 5), f"trial {best.number} of {study.study}"
        return
    known = [run for run in runs if metric in run.facts.metrics and run.facts.metrics[metric].best is not None]
    if known:
        first = known[0].facts.metrics[metric]
        sign = 1 if first.direction == "maximize" else -1
        found = max(known, key=lambda run: sign * float(run.facts.metrics[metric].best or 0))
        option = "--minimize" if sign == 1 else "--maximize"
        words = f"; higher is assumed to be better, see {option}" if sign == 1 else f"; lower is assumed, see {option}"
        value = number(found.facts.metrics[metric].best, 5)
        yield f"Best {metric}", value, found.name + (words if first.is_assumed else "")


# -- what to look at


def _to_look_at(facts: Facts, runs: Sequence[Shown]) -> Markup:
    names = names_of(facts)
    failures = list(_failures(facts, runs))
    warnings = [_item("!", words, "", "left-out") for words in facts.warnings]
    items = [
        *_limited(failures, "failure"),
        *(_advice_item(each, names) for each in facts.advice),
        *_limited(warnings, "warning"),
    ]
    if items:
        return tag("ul", *items, cls="advice")
    is_known = any(run.facts.used is not None for run in runs)
    words = "No run failed, and none asked for much more than it used." if is_known else "No run failed."
    return tag("p", words, cls="quiet")


def _limited(items: Sequence[Markup], thing: str) -> list[Markup]:
    more = len(items) - MOST_ITEMS
    rest = [_item("!", f"{counted(more, f'more {thing}')}: see --json", "", "left-out")] if more > 0 else []
    return [*items[:MOST_ITEMS], *rest]


def _failures(facts: Facts, runs: Sequence[Shown]) -> Iterator[Markup]:
    for run in runs:
        if run.facts.kind != "trial" and run.facts.state not in _WELL:
            state = run.facts.state.lower().replace("_", " ")
            yield _item("✕", joined(tag("b", run.name), f": {state}"), run.facts.reason, "failed")
    for sweep in facts.sweeps:
        failed = [trial.row for trial in sweep.study.trials if trial.row.state == "FAIL"]
        states = [] if sweep.state in _WELL else [f"the sweep {sweep.state.lower().replace('_', ' ')}"]
        states += [counted(len(failed), "failed trial")] if failed else []
        if states:
            reason = failed[-1].reason if failed else ""
            yield _item("✕", joined(tag("b", sweep.run), f": {', '.join(states)}"), reason, "failed")


def _item(icon: str, words: object, more: object, cls: str) -> Markup:
    body = tag("div", words, tag("div", more, cls="quiet") if more else "")
    return tag("li", tag("span", icon, cls="icon", aria_hidden="true"), body, cls=cls)


def _advice_item(advice: Advice, names: Names) -> Markup:
    others = f" and {len(advice.runs) - 1} more" if len(advice.runs) > 1 else ""
    flags = joined(": next time ", tag("code", advice.flags)) if advice.flags else ""
    words = joined(tag("b", names.of(advice.runs[0])), others, flags)
    return _item(_ICONS.get(advice.kind, "•"), words, advice.why, f"a-{advice.kind}")
