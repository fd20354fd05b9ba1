"""What `--compile` costs at the start, without and with code that an earlier run has left, and what it saves later."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.measure import difference, interleave, median, ratio
from benchmarks.project import JOBS, Project, project
from benchmarks.report import Row, Section

ROUNDS = 5
RANKS = 2

Took = dict[str, float]


def run() -> Section:
    with project("jobs") as made:
        cases = {
            "not compiled": partial(_run, made, 1, "--no-compile"),
            "warm": partial(_run, made, 1, "--compile"),
            "cold": partial(_cold, made, 1),
            "cold, 2 ranks": partial(_cold, made, RANKS),
        }
        found = interleave(cases, ROUNDS)
    first = {name: [each["first"] for each in took] for name, took in found.items()}
    step = {name: [each["step"] for each in took] for name, took in found.items()}
    rows = [
        *(Row(f"first step: {name}", median(seconds), "s", 1) for name, seconds in first.items()),
        Row("first step: warm - not compiled", difference(first["warm"], first["not compiled"]), "s", 1),
        Row("first step: warm / cold", ratio(first["warm"], first["cold"]), "", 2),
        Row("first step: 2 ranks / 1 rank, cold", ratio(first["cold, 2 ranks"], first["cold"]), "", 2),
        Row("later step: compiled / not", ratio(step["warm"], step["not compiled"]), "", 2),
        Row("later step: not compiled", median(step["not compiled"]).scaled(1e3), "ms", 0),
    ]
    return Section("compilation", _ABOUT, rows, [])


def _run(made: Project, ranks: int, *options: str) -> Took:
    """Return what the slowest rank took, with the code of earlier runs of this project."""
    with_cache = replace(made, more=made.more | {"TORCHINDUCTOR_CACHE_DIR": str(_cache(made))})
    _, folder = with_cache.submit("--ntasks-per-node", str(ranks), *options, f"{JOBS}.first_steps")
    made.wait(folder)
    found = [json.loads((folder / f"took-{rank}.json").read_text()) for rank in range(ranks)]
    return {key: max(each[key] for each in found) for key in found[0]}


def _cold(made: Project, ranks: int) -> Took:
    if _cache(made).exists():
        shutil.rmtree(_cache(made))
    return _run(made, ranks, "--compile")


def _cache(made: Project) -> Path:
    return made.base / "compiled"


_ABOUT = (
    "A GPT of 4 blocks of width 128 on a CPU, `jobs/gpt.py`, from `run.wrap` to the end of the first step. The ranks of"
    " a node compile at the same time, each with its share of the cores; what one has compiled, the others load."
)
