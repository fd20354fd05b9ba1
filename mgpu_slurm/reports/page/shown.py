"""How runs appear on a page: their numbers, short names, colours and the words for their states."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mgpu_slurm.reports.aggregation.aggregate import is_seed
from mgpu_slurm.reports.facts.gather import short_name
from mgpu_slurm.reports.facts.report_facts import Facts, RunFacts
from mgpu_slurm.reports.page.markup import Markup, joined, tag
from mgpu_slurm.reports.page.svg import COLORS

SIGNS = {
    "COMPLETED": "✓",
    "PRUNED": "◓",
    "PAUSED": "❚❚",
    "FAILED": "✕",
    "OUT_OF_MEMORY": "✕",
    "TIMEOUT": "◔",
    "CANCELLED": "■",
    "RUNNING": "▶",
    "PENDING": "…",
}
"""Signs of states, so that none depends on its colour alone."""


@dataclass(frozen=True)
class Shown:
    """A run on a page."""

    index: int
    """Its number on the page, by which marks of it in charts and tables find each other."""
    facts: RunFacts
    name: str
    family: str
    """Its group or study, or itself; a family has one colour."""
    family_name: str
    repeats: str | None
    """What runs have in common that differ in their seed only; None for a run that none repeats."""
    color: int

    @property
    def color_class(self) -> str:
        return f"k{self.color}"

    @property
    def classes(self) -> str:
        return f"{self.color_class} s-{self.facts.state}"


def arranged(facts: Facts) -> list[Shown]:
    """Return the runs of a page, numbered and coloured by family."""
    colors: dict[str, int] = {}
    names = names_of(facts)
    found = []
    for index, run in enumerate(facts.runs):
        family = run.group or run.run
        color = colors.setdefault(family, len(colors) % COLORS)
        found.append(Shown(index, run, names.of(run.run), family, names.of(family), _repeats(run), color))
    return found


def names_of(facts: Facts) -> Names:
    return Names([*(run.run for run in facts.runs), *(run for each in facts.advice for run in each.runs)])


def _repeats(run: RunFacts) -> str | None:
    if "/seeds/" in run.run:
        return run.run.partition("/seeds/")[0]
    if run.kind != "run" or run.group is None:
        return None
    config = {key: value for key, value in run.config.items() if not is_seed(key)}
    return json.dumps([run.group, config], sort_keys=True, default=str)


class Names:
    """Short names of runs: without what a submission adds to them, unless two would have the same name."""

    def __init__(self, runs: Iterable[str]) -> None:
        groups = {run.partition("/")[0] for run in runs}
        self._counts = Counter(short_name(group) for group in groups)

    def of(self, run: str) -> str:
        """Return a run's name for people: `digits · 3` for the trial `digits/trials/3`."""
        group, slash, rest = run.partition("/")
        short = short_name(group) if self._counts[short_name(group)] == 1 else group
        return (short + slash + rest).replace("/trials/", " · ").replace("/seeds/", " · seed ").replace("/", " · ")


def families(runs: Sequence[Shown]) -> dict[str, list[Shown]]:
    found: dict[str, list[Shown]] = {}
    for run in runs:
        found.setdefault(run.family, []).append(run)
    return found


def badge(state: str) -> Markup:
    sign = tag("span", SIGNS.get(state, "?"), aria_hidden="true")
    return tag("span", joined(sign, " ", state.lower().replace("_", " ")), cls=f"state s-{state}")
