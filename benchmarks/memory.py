"""What `run.gradients` costs per step while memory suffices, against `run.backward`."""

from __future__ import annotations

from benchmarks.blocks import blocks_of, cpu_and_wall, in_ms
from benchmarks.measure import ratio
from benchmarks.project import JOBS, project
from benchmarks.report import Row, Section
from benchmarks.sharded import CONFIG

SHORTAGES = 30
"""Steps in which memory runs out."""
STEPS_TARGET = 2.0

_CASES = {
    "one rank": (1, ("--strategy", "single"), False, 60, 1.01),
    "`ddp`": (2, ("--strategy", "ddp"), False, 40, 1.01),
    "`fsdp`, agreeing": (2, ("--strategy", "fsdp"), True, 24, 1.05),
    "`fsdp`, as it settles": (2, ("--strategy", "fsdp"), False, 24, 1.01),
}
"""Ranks, options, whether ranks always tell each other whether memory has run out, rounds, and the target."""


def run() -> Section:
    rows = []
    with project() as made:
        for name, (ranks, options, agrees, rounds, target) in _CASES.items():
            config = CONFIG | {"rounds": rounds, "agrees": agrees}
            cpu, wall = cpu_and_wall(blocks_of(made, f"{JOBS}.gradients_blocks", ranks, options, config))
            upper = ratio(wall["gradients"], wall["backward"])
            rows += [
                Row(f"wall time: `run.gradients` / `run.backward`, {name}", upper, "", 4, target),
                Row(f"CPU time: the same, {name}", ratio(cpu["gradients"], cpu["backward"]), "", 4),
                Row(f"wall time: `run.backward`, a step, {name}", in_ms(wall["backward"]), "ms", 2),
            ]
        for strategy in ("ddp", "fsdp"):
            config = CONFIG | {"rounds": SHORTAGES, "agrees": True, "runs_out": True}
            blocks = blocks_of(made, f"{JOBS}.gradients_blocks", 2, ("--strategy", strategy), config)
            _, wall = cpu_and_wall(blocks)
            what = f"out of memory to the next finished step, in steps, `{strategy}`"
            rows.append(Row(what, ratio(wall["shortage"], wall["enough"]), "", 2, STEPS_TARGET))
    return Section("memory", _ABOUT, rows, [])


_ABOUT = (
    "One training loop computes its gradients by `run.gradients` and by `run.backward` in turns, block by block, on the"
    " CPU ranks of one run; the memory suffices. A pair is two blocks of one round. Agreeing: ranks tell each other"
    " whether memory has run out: before each exchange of gradients with `ddp`, and, once they know the order of their"
    " exchanges, at the end of each step with `fsdp`. As it settles: they stop after 20 steps if that takes more than"
    " 1% of a step. Out of memory: the last rank raises the error at the end of its forward pass, and all repeat the"
    " step in two parts; compared with a step in which memory suffices. One thread per rank."
)
