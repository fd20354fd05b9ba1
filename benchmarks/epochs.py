"""How much training a search needs until one of its trials reaches an accuracy that was fixed beforehand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.measure import interleave, median, ratio
from benchmarks.project import JOBS, Project, project
from benchmarks.report import Row, Section
from benchmarks.sweep.studies import search

SEEDS = 20
WORKERS = 2
EPOCHS = 9
TRIALS = 500
"""Of one search, at most: so many that also the pruners' short trials nearly always reach the accuracy."""
OURS = "asha"
TOLERANCE = 1e-9
"""Of an accuracy that is a fraction."""


@dataclass(frozen=True)
class Task:
    """A job, its space, and the accuracy to reach."""

    name: str
    job: str
    accuracy: float
    space: dict[str, Any]


TASKS = (
    Task(
        "digits",
        "jobs.digits",
        # 356 of 360 test images; 14 of 80 random trials reached it
        356 / 360,
        {
            "lr": {"float": [1e-4, 1e-1], "log": True},
            "width": {"int": [8, 64], "step": 8},
            "dropout": {"float": [0.0, 0.8]},
            "batch_size": {"choice": [16, 32, 64, 128]},
            "weight_decay": {"float": [1e-6, 1e-1], "log": True},
        },
    ),
    Task(
        "spirals",
        f"{JOBS}.spirals",
        # 15 of 300 random trials reached it
        0.95,
        {
            "lr": {"float": [1e-5, 1.0], "log": True},
            "beta": {"float": [0.0, 0.99]},
            "width": {"int": [8, 128], "step": 8},
            "depth": {"int": [1, 4]},
            "batch_size": {"choice": [8, 16, 32, 64]},
            "weight_decay": {"float": [1e-6, 1e-2], "log": True},
        },
    ),
)
_RUNGS = {"min_resource": 1, "max_resource": EPOCHS, "reduction_factor": 3}
METHODS: dict[str, dict[str, Any]] = {
    OURS: {"sampler": "tpe", "pruner": {"name": "asha"} | _RUNGS},
    "tpe with hyperband": {"sampler": "tpe", "pruner": {"name": "hyperband"} | _RUNGS},
    "Optuna's TPE": {"sampler": "optuna.samplers.TPESampler", "pruner": "none"},
    "random search": {"sampler": "random", "pruner": "none"},
}


@dataclass(frozen=True)
class Effort:
    """How many epochs all trials of a search had trained when one of them reached the accuracy."""

    epochs: int
    has_found: bool
    """If not, more epochs would have been needed."""


def run() -> Section:
    rows = []
    with project("jobs") as made:
        for task in TASKS:
            cases = {name: partial(_search, made, task, how, count(1)) for name, how in METHODS.items()}
            rows += _rows(task, interleave(cases, SEEDS, warm_ups=0))
    return Section("epochs", ABOUT, rows, NOTES)


def _rows(task: Task, efforts: dict[str, list[Effort]]) -> Iterator[Row]:
    epochs: dict[str, Sequence[float]] = {name: [each.epochs for each in found] for name, found in efforts.items()}
    for name, found in efforts.items():
        reached = sum(each.has_found for each in found)
        yield Row(f"{task.name}: epochs, {name} ({reached} of {len(found)} seeds)", median(epochs[name]), "", 0)
    for name, others in epochs.items():
        if name != OURS:
            yield Row(f"{task.name}: epochs, {OURS} / {name}", ratio(epochs[OURS], others), "", 2)


def _search(made: Project, task: Task, how: dict[str, Any], seeds: Iterator[int]) -> Effort:
    sampler = {"name": how["sampler"], "seed": next(seeds)}
    folder = search(
        made,
        job=task.job,
        metric="accuracy",
        sampler=sampler,
        pruner=how["pruner"],
        workers=WORKERS,
        trials=TRIALS,
        budget={"target": task.accuracy - TOLERANCE},
        fixed={"epochs": EPOCHS},
        space=task.space,
    )
    return effort(reports(folder), task.accuracy)


def reports(folder: Path) -> list[tuple[str, float]]:
    """Return when each epoch of each trial was done, and the accuracy after it, by time."""
    found: dict[tuple[str, int], tuple[str, float]] = {}
    for path in folder.glob("trials/*/metrics.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            # an epoch that was repeated after a restart counts once
            found.setdefault((path.parent.name, record["progress"]), (record["time"], record["metrics"]["accuracy"]))
    return sorted(found.values())


def effort(done: Sequence[tuple[str, float]], accuracy: float) -> Effort:
    reached = next((place for place, (_, value) in enumerate(done, 1) if value >= accuracy - TOLERANCE), None)
    return Effort(len(done) if reached is None else reached, reached is not None)


ABOUT = (
    f"Real training until an accuracy, which was fixed beforehand, is reported by any trial: the epochs of all trials"
    f" together until then, {SEEDS} seeds, {WORKERS} workers on the local executor, {EPOCHS} epochs a trial. Digits:"
    f" `jobs/digits.py`, five parameters, accuracy {TASKS[0].accuracy:.4f}. Spirals: points of two spirals, six"
    f" parameters, accuracy {TASKS[1].accuracy}. A search ends after {TRIALS} trials; the number of seeds that had"
    " reached the accuracy by then is shown, and the epochs of the others are lower bounds."
)
NOTES = (
    "Digits: about one random trial in six reaches its accuracy, so that any few whole trials find one. `asha` trains"
    " many trials for one epoch before it trains one for nine.",
)
