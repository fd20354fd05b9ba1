"""What the primitives of `run` cost per step of a sharded model, against a hand-written `fully_shard` loop."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.measure import Estimate, difference, interleave, median, ratio
from benchmarks.project import JOBS, Project, project
from benchmarks.report import Row, Section

RATIO_TARGET = 1.02
"""Of CPU time, for the upper end of the interval."""
START_TARGET_S = 1.0
STARTS = 15
RANKS = 2

Blocks = dict[str, list[list[float]]]
"""CPU seconds and seconds per step, by loop; item i of every list is of the same round."""

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


def cpu_and_wall(blocks: Blocks) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """CPU seconds and seconds per step of each block, by loop."""
    cpu, wall = ({name: [pair[at] for pair in pairs] for name, pairs in blocks.items()} for at in (0, 1))
    return cpu, wall


def in_ms(seconds: list[float]) -> Estimate:
    return median(seconds).scaled(1e3)


def blocks_of(made: Project, job: str, ranks: int, options: Sequence[str], config: Mapping[str, object]) -> Blocks:
    """Run a job whose ranks write what their blocks took."""
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
    " tiny model, its imports included. Not run on a GPU."
)
