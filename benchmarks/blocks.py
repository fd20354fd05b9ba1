"""Loops of one run that take turns in blocks of steps: run the job, and read what its blocks took."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from benchmarks.measure import Estimate, median
from benchmarks.project import Project

Blocks = dict[str, list[list[float]]]
"""CPU seconds and seconds per step, by loop; item i of every list is of the same round."""


def blocks_of(made: Project, job: str, ranks: int, options: Sequence[str], config: Mapping[str, object]) -> Blocks:
    """Run a job whose ranks write what their blocks took (`benchmarks/jobs/loops.py`)."""
    words = [f"{key}={value}" for key, value in config.items()]
    _, folder = made.submit("--ntasks-per-node", str(ranks), *options, job, *words)
    made.wait(folder)
    found: list[Blocks] = [json.loads((folder / f"blocks-{rank}.json").read_text()) for rank in range(ranks)]
    # of all ranks together: the CPU time of their sum, the wall time of the slower one
    return {
        name: [
            [sum(cpu for cpu, _ in round_), max(wall for _, wall in round_)]
            for round_ in zip(*(rank[name] for rank in found), strict=True)
        ]
        for name in found[0]
    }


def cpu_and_wall(blocks: Blocks) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """CPU seconds and seconds per step of each block, by loop."""
    cpu, wall = ({name: [pair[at] for pair in pairs] for name, pairs in blocks.items()} for at in (0, 1))
    return cpu, wall


def in_ms(seconds: list[float]) -> Estimate:
    return median(seconds).scaled(1e3)
