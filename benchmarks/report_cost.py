"""What `run.report` and `run.mean` cost, against an all-reduce and two scalars of TensorBoard in the same processes."""

from __future__ import annotations

import json

from benchmarks.measure import median, ratio
from benchmarks.project import JOBS, project
from benchmarks.report import Row, Section

RANKS = 2
CALLS = 20
ROUNDS = 60
MEAN_TARGET = 1.5
SCALARS = 3
"""Times the two scalars that a report may cost next to an all-reduce."""


def run() -> Section:
    with project() as made:
        words = [f"calls={CALLS}", f"rounds={ROUNDS}"]
        _, folder = made.submit("--ntasks-per-node", str(RANKS), f"{JOBS}.report_blocks", *words)
        made.wait(folder)
        ranks = [json.loads((folder / f"blocks-{rank}.json").read_text()) for rank in range(RANKS)]
    # a block has ended when its last rank has
    seconds = {name: [max(each) for each in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}
    allowed = [once + SCALARS * two for once, two in zip(seconds["all_reduce"], seconds["two_scalars"], strict=True)]
    rows = [
        Row(f"`run.report` / (all_reduce + {SCALARS} x two scalars)", ratio(seconds["report"], allowed), "", 2, 1.0),
        Row("`run.mean` / all_reduce", ratio(seconds["mean"], seconds["all_reduce"]), "", 2, MEAN_TARGET),
        *(Row(words, median(seconds[case]).scaled(1e6), "us", 0) for case, words in _NAMES.items()),
    ]
    return Section("report", _ABOUT, rows, [])


_NAMES = {
    "report": "`run.report` of two metrics",
    "mean": "`run.mean`",
    "all_reduce": "`dist.all_reduce` of two doubles",
    "two_scalars": "two `SummaryWriter.add_scalar`",
}

_ABOUT = (
    "`run.report`, `run.mean`, an all-reduce of two doubles by gloo, and two scalars written by torch's SummaryWriter"
    " on rank 0 take turns, in blocks of calls, on the two CPU ranks of one run. A pair is two blocks of one round,"
    " timed to the end of the slower rank. One thread per rank."
    f" Blocks have {CALLS} calls."
)
