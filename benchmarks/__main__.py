"""`python -m benchmarks [--long] [NAME ...]`: runs those or all, keeps tables in results.md.

A target that is missed is reported like one that is met; it is no error.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks import (
    checkpoint,
    compilation,
    control_plane,
    curves,
    epochs,
    gauges,
    gpu,
    input,
    launch,
    many_ranks,
    memory,
    pages,
    plan,
    report,
    report_cost,
    search,
    sharded,
    slow_disk,
    slurm,
    startup,
    step,
    storage,
    sweep,
    usage,
)

BENCHMARKS = {
    "startup": startup.run,
    "slow-disk": slow_disk.run,
    "launch": launch.run,
    "control": control_plane.run,
    "step": step.run,
    "sharded": sharded.run,
    "memory": memory.run,
    "plan": plan.run,
    "compilation": compilation.run,
    "report": report_cost.run,
    "checkpoint": checkpoint.run,
    "slurm": slurm.run,
    "many-ranks": many_ranks.run,
    "many-tasks": many_ranks.tasks,
    "curves": curves.run,
    "pages": pages.run,
    "gauges": gauges.run,
    "usage": usage.run,
    "input": input.run,
    "storage": storage.run,
    "sweep": sweep.run,
    "search": search.run,
    "epochs": epochs.run,
    "gpu": gpu.run,
}
LONG = {"search": search.run_long}
"""Run instead with `--long`."""
NEED_GPU = {"gpu"}
RESULTS = Path(__file__).parent / "results.md"
PREFACE = """# Speed

Written by `make bench`. Cases that are compared take turns within one run; figures are medians, intervals are 95% by
bootstrap over the pairs. Targets are upper bounds.
"""


def main(words: list[str]) -> None:
    names = [word for word in words if word != "--long"]
    benchmarks = LONG if "--long" in words else BENCHMARKS
    unknown = [name for name in names if name not in benchmarks]
    if unknown:
        sys.exit(f"benchmark {unknown[0]!r}: expected some of {', '.join(benchmarks)}, or none for all")
    for name in names or benchmarks:
        if name in NEED_GPU and not torch.cuda.is_available():
            print(f"{name}: skipped: torch finds no GPU on this machine", file=sys.stderr)
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        load = report.load()
        section = benchmarks[name]()
        text = section.text(report.circumstances(load))
        print(text, flush=True)
        report.save(RESULTS, PREFACE, section.title, text)


if __name__ == "__main__":
    main(sys.argv[1:])
