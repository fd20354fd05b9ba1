"""How soon a search finds a network that reads digits well: this project's samplers and pruner, and Ray Tune's ASHA."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks import peers
from benchmarks.measure import interleave, median, ratio
from benchmarks.project import Project, project
from benchmarks.report import Row
from benchmarks.sweep.studies import search

SWEEP = Path(__file__).parents[2] / "sweeps" / "digits_hyperband.yaml"
"""Whose space it is."""
EPOCHS = 3
ACCURACY = 0.99
SEEDS = 5
WORKERS = 2
SECONDS = 60.0
"""Of the whole command; what has not been found then counts as found at that moment."""
OURS, RAY = "tpe with hyperband", "Ray Tune, random search with ASHA"

Report = tuple[float, float]
"""When an epoch was done, by the system's clock, and the accuracy after it."""


@dataclass(frozen=True)
class Search:
    """How soon it came to the accuracy."""

    seconds: float
    """From the start of the command."""
    epochs: float
    """That were trained until then, of all trials together."""
    to_first: float
    """Seconds from the start of the command to the end of the first epoch."""
    has_found: bool


def rows() -> list[Row]:
    with project("jobs") as made:
        searches = interleave(_cases(made), SEEDS, warm_ups=0)
    return [
        *(_found_row(name, found) for name, found in searches.items()),
        *(
            Row(f"{name}: epochs trained until then, of all trials", median([each.epochs for each in found]), "", 0)
            for name, found in searches.items()
        ),
        *(
            Row(f"{name}: from the command to the first epoch's end", median([each.to_first for each in found]), "s", 1)
            for name, found in searches.items()
        ),
        *(
            Row(
                f"time to accuracy {ACCURACY}, {OURS} / {name}", ratio(_seconds(searches[OURS]), _seconds(found)), "", 2
            )
            for name, found in searches.items()
            if name != OURS
        ),
    ]


def _found_row(name: str, found: Sequence[Search]) -> Row:
    count = sum(each.has_found for each in found)
    what = f"time to accuracy {ACCURACY}, {name} (found with {count} of {len(found)} seeds)"
    return Row(what, median(_seconds(found)), "s", 1)


def _seconds(found: Sequence[Search]) -> list[float]:
    return [each.seconds for each in found]


def outcome(reports: Sequence[Report], start: float) -> Search:
    """What came of a search that began at that time, by all that its trials have reported."""
    limit = start + SECONDS
    found = min((when for when, accuracy in reports if accuracy >= ACCURACY and when <= limit), default=None)
    end = limit if found is None else found
    epochs = [when for when, _ in reports if when <= end]
    return Search(end - start, len(epochs), min(epochs, default=end) - start, found is not None)


def _cases(made: Project) -> dict[str, Callable[[], Search]]:
    hyperband = {"name": "hyperband", "min_resource": 1, "max_resource": EPOCHS, "reduction_factor": 3}
    searches: dict[str, Callable[[int], list[Report]]] = {
        OURS: partial(_ours, made, "tpe", hyperband),
        "tpe without a pruner": partial(_ours, made, "tpe", "none"),
        "random search": partial(_ours, made, "random", "none"),
        RAY: partial(_ray, made),
    }
    return {name: partial(_searched, case, itertools.count()) for name, case in searches.items()}


def _searched(search_with: Callable[[int], list[Report]], seeds: Iterator[int]) -> Search:
    start = time.time()
    return outcome(search_with(next(seeds)), start)


def _ours(made: Project, sampler: str, pruner: Any, seed: int) -> list[Report]:
    values = yaml.safe_load(SWEEP.read_text())
    folder = search(
        made,
        job=values["job"],
        metric=values["metric"],
        sampler={"name": sampler, "seed": seed},
        pruner=pruner,
        workers=WORKERS,
        # from the first worker's start, a little after that of the command
        budget={"hours": SECONDS / 3600, "target": ACCURACY},
        fixed={"epochs": EPOCHS},
        space=values["space"],
    )
    records = [
        json.loads(line) for path in folder.glob("trials/*/metrics.jsonl") for line in path.read_text().splitlines()
    ]
    return [(datetime.fromisoformat(each["time"]).timestamp(), each["metrics"]["accuracy"]) for each in records]


def _ray(made: Project, seed: int) -> list[Report]:
    space = yaml.safe_load(SWEEP.read_text())["space"]
    options = {"epochs": EPOCHS, "accuracy": ACCURACY, "seconds": SECONDS, "workers": WORKERS}
    return [(when, accuracy) for when, accuracy in peers.call(made, "ray_digits", space=space, seed=seed, **options)]


ABOUT = (
    f"Time to accuracy: from the start of the command until any trial reports {ACCURACY} on the test digits, over"
    f" the space of `sweeps/{SWEEP.name}` without its known point, {EPOCHS} epochs a trial, {WORKERS} workers of one"
    f" thread, {SEEDS} seeds, real training throughout. The budget is the wall time, {SECONDS:g} s for all: a search"
    " that has not found it then counts as having found it at that moment. Ray Tune trains the same network on the same"
    " data in a plain loop, under its ASHA scheduler."
)
NOTES = [
    "Epochs trained tell what a search needs without what trials and starting cost; they are a lower bound where"
    " nothing was found. TPE draws its first ten trials at random; with Hyperband it learns from the trials of all"
    " brackets.",
]
