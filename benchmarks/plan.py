"""What `submit --dry-run --fit` costs, which runs a job on tensors without values."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import interleave, median
from benchmarks.project import MGPU, Project, project
from benchmarks.report import Row, Section

ROUNDS = 5

_GPT = ["jobs.gpt", "layers=28", "width=2048", "heads=16", "context=1024", "batch_size=8"]
_CASES = {
    "ResNet-50, batch of 64": (["jobs.images", "dataset=fake", "model=resnet50", "batch_size=64"], 8.0),
    "GPT of 1.4 B parameters": (_GPT, 30.0),
    "the same with `--strategy fsdp` on 8 ranks": ([*_GPT, "--nodes", "8", "--strategy", "fsdp"], 30.0),
}
"""Options, and the target in CPU seconds."""


def run() -> Section:
    rows = []
    with project() as made:
        shutil.copytree(Path(__file__).parents[1] / "jobs", made.folder / "jobs", dirs_exist_ok=True)
        text = made.folder / "text.txt"
        text.write_text("It was a dark and stormy night. " * 4000)
        cases = {
            name: lambda words=words: _cost(made, [*words, *([f"text={text}"] if words[0] == _GPT[0] else [])])
            for name, (words, _) in _CASES.items()
        }
        for name, costs in interleave(cases, ROUNDS).items():
            rows.append(Row(f"CPU time of a plan: {name}", median([cpu for cpu, _ in costs]), "s", 2, _CASES[name][1]))
            rows.append(Row(f"planned memory: {name}", median([peak / 2**30 for _, peak in costs]), "GiB", 2))
    return Section("plan", _ABOUT, rows, [])


def _cost(made: Project, words: Sequence[str]) -> tuple[float, int]:
    """Return the CPU seconds of a plan, and the peak that it finds in bytes."""
    before = _cpu()
    printed = made.call([*MGPU, "submit", *words, "--executor", "local", "--dry-run", "--fit", "--json"])
    return _cpu() - before, json.loads(printed)["memory"]["peak"]


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


_ABOUT = (
    "The whole command, with the imports of two processes and two real batches of data. That a plan is what torch"
    " allocates for real tensors on a CPU is tested: tests/training/memory/test_planning.py. It was not compared with a"
    " GPU."
)
