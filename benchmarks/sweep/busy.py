"""How much of their time workers train, where some trials take ten times as long as others."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from benchmarks.measure import median
from benchmarks.project import JOBS, Project, project
from benchmarks.report import Row
from benchmarks.sweep.studies import search, trials_of

WORKERS = 4
TRIALS = 40
SHORTEST, LONGEST = 0.3, 3.0
ROUNDS = 5
IDLE_TARGET = 5.0
EPOCHS = 9
SHORTEST_EPOCH, LONGEST_EPOCH = 0.2, 2.0


@dataclass(frozen=True)
class Span:
    """When a trial was taken and when its worker was done with it, in seconds, and how long it trained."""

    worker: int
    start: float
    end: float
    trained: float


def rows() -> list[Row]:
    with project() as made:
        lengths = [_lengths(seed) for seed in range(ROUNDS)]
        spans = [_searched(made, each) for each in lengths]
        pausing = [_idle_with_pauses(made, seed) for seed in range(ROUNDS)]
    idle = {
        "from the first trial's start until the last one is taken": [
            idle_share(each, WORKERS, _first_start(each), _last_start(each)) for each in spans
        ],
        "the same, once all workers have come": [
            idle_share(each, WORKERS, _all_have_come(each), _last_start(each)) for each in spans
        ],
        "from the first trial's start to the last one's end": [
            idle_share(each, WORKERS, _first_start(each), max(span.end for span in each)) for each in spans
        ],
        "computed: batches that wait for their slowest trial": [
            idle_share_of_batches(each, WORKERS) for each in lengths
        ],
        _WITH_PAUSES: pausing,
    }
    targets = {next(iter(idle)): IDLE_TARGET, _WITH_PAUSES: IDLE_TARGET}
    return [
        Row(f"workers' idle time, {when}", median(shares).scaled(100), "%", 1, targets.get(when))
        for when, shares in idle.items()
    ]


_WITH_PAUSES = "with pauses, from the first trial's start until the last one is taken or continued"


def idle_share(spans: Sequence[Span], workers: int, since: float, until: float) -> float:
    """The share of all workers' time between two moments in which none of them trains."""
    trained = sum(max(0.0, min(span.start + span.trained, until) - max(span.start, since)) for span in spans)
    return 1 - trained / (workers * (until - since))


def _first_start(spans: Sequence[Span]) -> float:
    return min(span.start for span in spans)


def _last_start(spans: Sequence[Span]) -> float:
    return max(span.start for span in spans)


def _all_have_come(spans: Sequence[Span]) -> float:
    """When the last worker has taken its first trial."""
    return max(min(span.start for span in spans if span.worker == worker) for worker in {each.worker for each in spans})


def idle_share_of_batches(lengths: Sequence[float], workers: int) -> float:
    """Of the whole time of a launcher that starts one trial per worker once all before them have ended."""
    batches = [lengths[start : start + workers] for start in range(0, len(lengths), workers)]
    return 1 - sum(lengths) / (workers * sum(map(max, batches)))


def _lengths(seed: int) -> list[float]:
    chance = random.Random(seed)
    return [chance.uniform(SHORTEST, LONGEST) for _ in range(TRIALS)]


def _searched(made: Project, lengths: Sequence[float]) -> list[Span]:
    folder = search(
        made,
        job=f"{JOBS}.sleeps",
        metric="value",
        sampler={"name": "tpe", "seed": 1},
        trials=TRIALS,
        workers=WORKERS,
        enqueue=[{"seconds": length} for length in lengths],
        space={"seconds": {"float": [SHORTEST, LONGEST]}},
    )
    found = []
    for trial in trials_of(folder):
        assert trial.datetime_start is not None
        assert trial.datetime_complete is not None
        start, end = trial.datetime_start.timestamp(), trial.datetime_complete.timestamp()
        found.append(Span(_worker_of(folder, trial.number), start, end, trial.params["seconds"]))
    return found


def _idle_with_pauses(made: Project, seed: int) -> float:
    chance = random.Random(seed)
    lengths = [chance.uniform(SHORTEST_EPOCH, LONGEST_EPOCH) for _ in range(TRIALS)]
    folder = search(
        made,
        job=f"{JOBS}.sleeps_in_epochs",
        metric="value",
        sampler={"name": "tpe", "seed": 1},
        pruner={"name": "asha", "min_resource": 1, "max_resource": EPOCHS, "reduction_factor": 3},
        trials=TRIALS,
        workers=WORKERS,
        fixed={"epochs": EPOCHS},
        enqueue=[{"seconds": length} for length in lengths],
        space={"seconds": {"float": [SHORTEST_EPOCH, LONGEST_EPOCH]}},
    )
    starts, spans = [], []
    for number, length in enumerate(lengths):
        trial = folder / "trials" / str(number)
        starts += [when for event, when in _events(trial / "attempts.jsonl") if event == "started"]
        ends = [when for _, when in _events(trial / "metrics.jsonl")]
        spans += [Span(0, end - length, end, length) for end in ends]
    return idle_share(spans, WORKERS, min(starts), max(starts))


def _events(path: Path) -> list[tuple[str, float]]:
    records = map(json.loads, path.read_text().splitlines())
    return [(each.get("event", ""), datetime.fromisoformat(each["time"]).timestamp()) for each in records]


def _worker_of(folder: Path, trial: int) -> int:
    begun = (folder / "trials" / str(trial) / "attempts.jsonl").read_text().splitlines()[0]
    return int(json.loads(begun)["worker"])


ABOUT = (
    f"Idle workers: {ROUNDS} sweeps of {TRIALS} trials that sleep for {SHORTEST:g} to {LONGEST:g} s, lengths"
    f" drawn from a seed per sweep, {WORKERS} workers on the local executor. Workers that come later than the first"
    " count as idle until then, unless it says otherwise; at least 95% busy is at most 5% idle. What batches would lose"
    " is computed from the same lengths in the order of the sweep file, for a launcher that costs nothing itself. With"
    f" pauses: as many trials of up to {EPOCHS} epochs under `asha`, which sleep for {SHORTEST_EPOCH:g} to"
    f" {LONGEST_EPOCH:g} s in each; what they need to save, pause and load counts as idle."
)
NOTES: list[str] = []
