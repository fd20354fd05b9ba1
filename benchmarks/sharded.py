"""What the primitives of `run` cost per step of a sharded model, against a hand-written `fully_shard` loop."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.blocks import blocks_of, cpu_and_wall, in_ms
from benchmarks.measure import difference, interleave, median, ratio
from benchmarks.project import JOBS, Project, project
from benchmarks.report import Row, Section

RATIO_TARGET = 1.01
"""Of CPU time, for the upper end of the interval."""
START_TARGET_S = 1.0
STARTS = 15
RANKS = 2

CONFIG = {"width": 384, "depth": 6, "batch_size": 256, "steps": 20, "rounds": 120}


def run() -> Section:
    with project() as made:
        blocks = blocks_of(made, f"{JOBS}.sharded_blocks", RANKS, ("--strategy", "fsdp"), CONFIG)
        started = interleave({name: partial(_start, made, name) for name in ("ddp", "fsdp")}, STARTS)
    cpu, wall = cpu_and_wall(blocks)
    upper = ratio(cpu["run"], cpu["plain"])
    rows = [
        Row("CPU time: `run` / hand-written `fully_shard`", upper, "", 4, RATIO_TARGET),
        Row("CPU time: `run` - hand-written, a step", difference(cpu["run"], cpu["plain"]).scaled(1e6), "us", 0),
        *(Row(f"CPU time: {name}, a step", in_ms(cpu[case]), "ms", 2) for case, name in _NAMES.items()),
        Row("wall time: `run` / hand-written `fully_shard`", ratio(wall["run"], wall["plain"]), "", 4),
        *(Row(f"wall time: {name}, a step", in_ms(wall[case]), "ms", 2) for case, name in _NAMES.items()),
        Row("CPU time to start: `fsdp` - `ddp`", difference(started["fsdp"], started["ddp"]), "s", 2, START_TARGET_S),
        *(Row(f"CPU time to start: `{name}`", median(started[name]), "s", 2) for name in started),
    ]
    return Section("sharded", _ABOUT, rows, [])


def _start(made: Project, strategy: str) -> float:
    """CPU seconds of one rank until it has made three steps of a tiny model."""
    with tempfile.TemporaryDirectory(dir=made.base) as out:
        options = ("--ntasks-per-node", str(RANKS), "--strategy", strategy)
        _, folder = made.submit(*options, f"{JOBS}.three_steps_function", f"out={out}")
        made.wait(folder)
    return float(json.loads(Path(folder, "result.json").read_text())["result"]["cpu_seconds"])


_NAMES = {"run": "`run`", "plain": "hand-written"}

_ABOUT = (
    "Two training loops over a sharded model take turns, block by block, on the two CPU ranks of one run: the"
    " primitives under `--strategy fsdp` (`run.wrap(blocks=...)`, `run.loader`, `run.backward`,"
    " `run.update(clip=1.0)`, restored so that every batch is a boundary), and a hand-written loop (`fully_shard` of"
    " the same blocks, DataLoader with DistributedSampler, `zero_grad`, `backward`, `clip_grad_norm_`, `step`). A pair"
    " is two blocks of one round; CPU time is that of both ranks. One thread per rank."
    f" Blocks have {CONFIG['steps']} steps. The start is what one rank computes until it has made three steps of a"
    " tiny model; torch was imported by the process that it was forked from. Not run on a GPU."
)
