"""Sweeps beside Ray Tune and plain Optuna: what a trial costs, how busy workers are, how soon a search finds."""

from __future__ import annotations

from benchmarks import peers
from benchmarks.report import Section
from benchmarks.sweep import accuracy, busy, nothing


def run() -> Section:
    peers.install()
    parts = (nothing, busy, accuracy)
    rows = [row for part in parts for row in part.rows()]
    return Section(
        "sweep", " ".join(part.ABOUT for part in parts), rows, [note for part in parts for note in part.NOTES]
    )
