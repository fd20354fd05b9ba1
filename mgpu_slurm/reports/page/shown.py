"""How runs appear on a page: their numbers, short names, colours and the words for their states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    found = []
    for index, run in enumerate(facts.runs):
        family = run.group or run.run
        color = colors.setdefault(family, len(colors) % COLORS)
        found.append(Shown(index, run, display_name(run.run), family, color))
    return found


def display_name(run: str) -> str:
    """Return a run's name for people: `digits · 3` for the trial `digits/trials/3`."""
    return short_name(run).replace("/trials/", " · ").replace("/seeds/", " · seed ").replace("/", " · ")


def families(runs: Sequence[Shown]) -> dict[str, list[Shown]]:
    found: dict[str, list[Shown]] = {}
    for run in runs:
        found.setdefault(run.family, []).append(run)
    return found


def badge(state: str) -> Markup:
    sign = tag("span", SIGNS.get(state, "?"), aria_hidden="true")
    return tag("span", joined(sign, " ", state.lower().replace("_", " ")), cls=f"state s-{state}")
