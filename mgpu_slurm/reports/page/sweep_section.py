"""The section of a page on a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mgpu_slurm.core.formatting import counted
from mgpu_slurm.reports.facts.report_facts import SweepFacts
from mgpu_slurm.reports.page import parameter_charts, sweep_charts
from mgpu_slurm.reports.page.markup import Markup, Section, figure, joined, number, scrolling, section, tag
from mgpu_slurm.reports.page.shown import Shown


def sweep_section(place: int, sweep: SweepFacts, runs: Sequence[Shown]) -> Section:
    study, ident = sweep.study, f"sweep-{place}"
    own = _runs_by_trial(sweep, runs)
    parts: list[object] = [_sweep_words(sweep), _marks()]
    pairs = [
        figure("Trials in their order", sweep_charts.history(study, f"{ident}-history", own)),
        figure("Importance of the parameters", parameter_charts.importance(study, f"{ident}-importance")),
    ]
    if len(study.metrics) > 1:
        pairs.append(figure("Pareto front", sweep_charts.front(study, f"{ident}-front", own)))
    parts.append(tag("div", *pairs, cls="grid pairs"))
    confirmation = sweep_charts.confirmation(study)
    if confirmation:
        parts.append(figure("Confirmation", confirmation))
    if study.parameters and sweep_charts.with_value(study):
        hint = tag("span", " drag along an axis to choose trials, press Escape to choose all", cls="quiet script")
        drawing = scrolling(
            f"Parallel coordinates of {study.study}", parameter_charts.parallel(study, f"{ident}-parallel", own)
        )
        parts.append(figure(joined("All parameters at once", hint), drawing))
        parts.append(figure("One parameter at a time", parameter_charts.slices(study, f"{ident}-slice", own)))
    if study.rungs:
        parts.append(figure("Rungs", sweep_charts.rungs(study)))
    if any(worker.pieces for worker in sweep.workers):
        chart, share = sweep_charts.workers(sweep, f"{ident}-workers", own)
        parts.append(
            figure(
                f"Workers: {share:.0%} of their time with a trial",
                scrolling(f"Timeline of the workers of {study.study}", chart),
            )
        )
    return section(ident, sweep.run, *parts, title=joined("Sweep ", tag("code", sweep.run)))


def _runs_by_trial(sweep: SweepFacts, runs: Sequence[Shown]) -> dict[int, int]:
    """Return the number on the page of the first run of each trial."""
    found: dict[int, int] = {}
    prefix = f"{sweep.run}/trials/"
    for run in runs:
        if run.facts.run.startswith(prefix):
            found.setdefault(int(run.facts.run[len(prefix) :].partition("/")[0]), run.index)
    return found


def _sweep_words(sweep: SweepFacts) -> Markup:
    study = sweep.study
    counts = Counter(trial.row.state for trial in study.trials)
    states = ", ".join(f"{count} {_TRIAL_WORDS.get(state, state.lower())}" for state, count in counts.most_common())
    words: list[object] = [f"{counted(len(study.trials), 'trial')} by {study.sampler}"]
    words.append("" if study.pruner == "none" else f", pruned by {study.pruner}")
    words.append(f": {states}." if states else ".")
    best = next((trial.row for trial in study.trials if trial.row.number == study.best), None)
    if best is not None:
        params = [tag("code", f"{name}={number(value)}") for name, value in best.params.items()]
        words += [f" Best: trial {best.number}, {study.metric} ", tag("b", number(best.value, 5)), " with "]
        words += [part for each in params for part in (each, " ")]
    if study.seeds:
        words.append(
            f" Each trial was trained with seeds {study.seeds[0]} to {study.seeds[-1]}; its value is their mean."
        )
    copies = sum(trial.copy_of is not None for trial in study.trials)
    words.append(
        f" {copies} of them began as {'a copy' if copies == 1 else 'copies'} of better ones." if copies else ""
    )
    return tag("p", *words, cls="lead")


_TRIAL_WORDS = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "PAUSED": "paused", "WAITING": "waiting"}


def _marks() -> Markup:
    shapes = (
        ("●", "complete", "COMPLETE"),
        ("▲", "pruned", "PRUNED"),
        ("■", "paused", "PAUSED"),
        ("✕", "failed", "FAIL"),
        ("▶", "running", "RUNNING"),
    )
    items = [
        tag("li", tag("span", sign, cls=f"sign s-{state}", aria_hidden="true"), words) for sign, words, state in shapes
    ]
    return tag("ul", *items, cls="legend")
