"""What the primitives of `run` cost per step, against a hand-written DDP loop in the same processes."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.blocks import blocks_of, cpu_and_wall, in_ms
from benchmarks.measure import difference, median, ratio
from benchmarks.project import JOBS, Project, project
from benchmarks.report import Row, Section

RATIO_TARGET = 1.01
RANKS = 2

MODELS: dict[str, dict[str, Any]] = {
    "ResNet-18": {"model": "resnet18", "batch_size": 16, "steps": 5, "rounds": 40},
    "transformer": {"model": "transformer", "batch_size": 32, "steps": 10, "rounds": 40},
}
TINY = {"model": "tiny", "batch_size": 16, "steps": 200, "rounds": 60}
PARTS = {"batch_size": 8, "steps": 200, "rounds": 40}


def run() -> Section:
    rows = []
    with project() as made:
        for name, config in MODELS.items():
            rows += _rows(name, *cpu_and_wall(blocks_of(made, f"{JOBS}.step_blocks", RANKS, (), config)))
        rows += _tiny_rows(*cpu_and_wall(blocks_of(made, f"{JOBS}.step_blocks", RANKS, (), TINY)))
        rows += _rows_of_parts(made)
    return Section("step", _ABOUT, rows, _NOTES)


def _rows(model: str, cpu: dict[str, list[float]], wall: dict[str, list[float]]) -> list[Row]:
    rows = []
    for kind, seconds in (("wall time", wall), ("CPU time", cpu)):
        for case in ("plain", "same"):
            compared = ratio(seconds["run"], seconds[case])
            rows.append(Row(f"{model}, {kind}: `run` / {_NAMES[case]}", compared, "", 4, RATIO_TARGET))
        in_order = ratio(seconds["ordered"], seconds["same"])
        rows.append(Row(f"{model}, {kind}: DDP with its gradients in one order / without", in_order, "", 4))
    return rows + [Row(f"{model}: {name}, a step", in_ms(wall[case]), "ms", 2) for case, name in _NAMES.items()]


def _tiny_rows(cpu: dict[str, list[float]], wall: dict[str, list[float]]) -> list[Row]:
    rows = []
    for kind, seconds in (("wall time", wall), ("CPU time", cpu)):
        for case in ("plain", "same"):
            cost = difference(seconds["run"], seconds[case]).scaled(1e6)
            rows.append(Row(f"tiny model, {kind}: `run` - {_NAMES[case]}, a step", cost, "us", 0))
        in_order = difference(seconds["ordered"], seconds["same"]).scaled(1e6)
        rows.append(Row(f"tiny model, {kind}: DDP with its gradients in one order - without", in_order, "us", 0))
    return rows + [
        Row(f"tiny model: {name}, a step", median(wall[case]).scaled(1e6), "us", 0) for case, name in _NAMES.items()
    ]


def _rows_of_parts(made: Project) -> list[Row]:
    """What `run` adds to each part of a step of the tiny model, on one rank."""
    _, folder = made.submit(f"{JOBS}.step_parts", *(f"{key}={value}" for key, value in PARTS.items()))
    made.wait(folder)
    found: dict[str, list[dict[str, float]]] = json.loads((folder / "parts.json").read_text())
    rows = []
    for part, name in _PARTS.items():
        own, plain = ([block[part] for block in found[case]] for case in ("run", "plain"))
        rows.append(Row(f"tiny model on one rank: {name}", difference(own, plain).scaled(1e6), "us", 0))
    return rows


_PARTS = {
    "batch": "fetching a batch, `run.loader` - DataLoader",
    "forward": "forward pass, of `run.wrap` - of the model",
    "backward": "`run.backward` - `backward`",
    "update": "`run.update` - clipping, step and `zero_grad`",
}

_NAMES = {
    "run": "`run`",
    "plain": "hand-written DDP",
    "same": "DDP with `run.wrap`'s options",
    "ordered": "the same with `find_unused_parameters=True`",
}

_ABOUT = (
    "Four training loops over the same data take turns, block by block, on the two CPU ranks of one run: the"
    " primitives (`run.loader`, `run.backward`, `run.update(clip=1.0)`, restored so that every batch is a boundary); a"
    " hand-written loop (DDP as it comes, DataLoader with DistributedSampler, `zero_grad`, `backward`,"
    " `clip_grad_norm_`, `step`); that loop with the DDP options which `run.wrap` chooses; and those with what"
    " `run.seed(deterministic=True)` adds on more than two ranks, so that the cost is seen alone. A pair is two blocks"
    " of one round: wall time to the end of the slower rank, CPU time of both ranks. One thread per rank. ResNet-18 has"
    " images of 64 x 64 pixels, the transformer four layers of width 128 over 32 tokens, the tiny model three layers of"
    " width 16; batches are of 8, 16 and 8 samples per rank."
    f" Blocks have {MODELS['ResNet-18']['steps']}, {MODELS['transformer']['steps']} and {TINY['steps']} steps. The"
    " parts of a step are timed in two such loops on one rank, without DDP: what `run` adds to each."
)
_NOTES = [
    "`run.wrap` sets `gradient_as_bucket_view=True`, which spares a copy of the gradients, and"
    " `forward_sync_buffers=False`, so that buffers, such as ResNet's running averages, are not sent in each step.",
    "Rank 0 of `run` writes its live state at most once a second, 1 to 2.4 ms each time on two cores.",
]
