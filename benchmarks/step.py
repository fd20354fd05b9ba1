"""What the primitives of `run` cost per step, against a hand-written DDP loop in the same processes."""

from __future__ import annotations

import json

from benchmarks.measure import difference, median, ratio
from benchmarks.project import JOBS, Project, project
from benchmarks.report import Row, Section

RATIO_TARGET = 1.01
RANKS = 2

Blocks = dict[str, list[float]]
"""Seconds per step, by loop; item i of every list is of the same round."""

LARGE = {"width": 1024, "batch_size": 256, "steps": 40, "rounds": 40}
TINY = {"width": 16, "batch_size": 16, "steps": 200, "rounds": 60}


def run() -> Section:
    with project() as made:
        large, tiny = _blocks(made, LARGE), _blocks(made, TINY)
    return Section("step", _ABOUT, [*_large_rows(large), *_tiny_rows(tiny)], _NOTES)


def _blocks(made: Project, config: dict[str, int]) -> Blocks:
    words = [f"{key}={value}" for key, value in config.items()]
    _, folder = made.submit("--ntasks-per-node", str(RANKS), f"{JOBS}.step_blocks", *words)
    made.wait(folder)
    ranks: list[Blocks] = [json.loads((folder / f"blocks-{rank}.json").read_text()) for rank in range(RANKS)]
    # a block has ended when its last rank has
    return {name: [max(seconds) for seconds in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}


def _large_rows(seconds: Blocks) -> list[Row]:
    return [
        Row("`run` / hand-written DDP", ratio(seconds["run"], seconds["plain"]), "", 4, RATIO_TARGET),
        Row("`run` / DDP with `run.wrap`'s options", ratio(seconds["run"], seconds["same"]), "", 4, RATIO_TARGET),
        Row("DDP with its gradients in one order / without", ratio(seconds["ordered"], seconds["same"]), "", 4),
        *(Row(f"{name}, a step", median(seconds[case]).scaled(1e3), "ms", 2) for case, name in _NAMES.items()),
    ]


def _tiny_rows(seconds: Blocks) -> list[Row]:
    cost = difference(seconds["run"], seconds["plain"]).scaled(1e6)
    cost_of_same = difference(seconds["run"], seconds["same"]).scaled(1e6)
    return [
        Row("tiny model: `run` - hand-written DDP, a step", cost, "us", 0),
        Row("tiny model: `run` - DDP with `run.wrap`'s options", cost_of_same, "us", 0),
        Row(
            "tiny model: DDP with its gradients in one order - without",
            difference(seconds["ordered"], seconds["same"]).scaled(1e6),
            "us",
            0,
        ),
        *(
            Row(f"tiny model: {name}, a step", median(seconds[case]).scaled(1e6), "us", 0)
            for case, name in _NAMES.items()
        ),
    ]


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
    " of one round, timed to the end of the slower rank. One thread per rank."
    f" Blocks have {LARGE['steps']} steps, {TINY['steps']} with the tiny model."
)
_NOTES = [
    "`run.wrap` sets `gradient_as_bucket_view=True`, which spares a copy of the gradients, and"
    " `forward_sync_buffers=False`, which changes nothing here: the model has no buffers.",
    "Rank 0 of `run` writes its live state at most once a second, 1 to 2.4 ms each time on two cores. Blocks last about"
    " that long, so that it does so as often per step as in a run of its own.",
]
