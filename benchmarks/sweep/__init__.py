"""Sweeps beside Ray Tune and plain Optuna: what a trial costs, how busy workers are, how soon a search finds."""

from __future__ import annotations

from benchmarks.report import Section
from benchmarks.sweep import accuracy, busy, nothing, ray_tune


def run() -> Section:
    ray_tune.install()
    parts = (nothing, busy, accuracy)
    rows = [row for part in parts for row in part.rows()]
    return Section(
        "sweep", " ".join(part.ABOUT for part in parts), rows, [note for part in parts for note in part.NOTES]
    )
