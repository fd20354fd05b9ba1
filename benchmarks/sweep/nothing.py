"""What a trial costs that does nothing, in a study that has a thousand trials."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from benchmarks import peers
from benchmarks.measure import median
from benchmarks.project import JOBS, Project, project
from benchmarks.report import Row
from benchmarks.sweep.studies import search, trials_of

ENDED = 1000
"""Trials of a study before those that are measured."""
MEASURED = 50
RAY_TRIALS = 30
TARGET_MS = 30


def rows() -> list[Row]:
    with project() as made:
        seconds = {name: case() for name, case in _cases(made).items()}
    return [
        Row(what, median(seconds[name]).scaled(1000), "ms", 1, TARGET_MS if name == "returns" else None)
        for name, what in _NAMES.items()
    ]


def from_start_to_start(starts: Sequence[float], at_once: int = 1) -> list[float]:
    """What each trial took of the time of those who train: from its start to that of the next one.

    Args:
        at_once: trials that run at the same time.
    """
    ordered = sorted(starts)
    return [(later - start) / at_once for start, later in zip(ordered, ordered[at_once:], strict=False)]


def _cases(made: Project) -> dict[str, Any]:
    return {
        "returns": partial(_ours, made, reports=False),
        "reports": partial(_ours, made, reports=True),
        "optuna": partial(_optuna, made),
        "ray": partial(_ray, made, at_once=1),
        "ray, 2": partial(_ray, made, at_once=2),
    }


def _ours(made: Project, reports: bool) -> list[float]:
    folder = search(
        made,
        job=f"{JOBS}.does_nothing",
        metric="value",
        direction="minimize",
        sampler={"name": "tpe", "seed": 1},
        trials=ENDED + MEASURED + 1,
        workers=1,
        fixed={"reports": reports},
        space={
            "lr": {"float": [1e-4, 1.0], "log": True},
            "momentum": {"float": [0.0, 0.99]},
            "dropout": {"float": [0.0, 0.6]},
            "width": {"int": [16, 128], "step": 16},
            "batch_size": {"choice": [16, 32, 64]},
        },
    )
    starts = [trial.datetime_start.timestamp() for trial in trials_of(folder) if trial.datetime_start]
    return from_start_to_start(starts)[ENDED:]


def _optuna(made: Project) -> list[float]:
    script = [sys.executable, "-m", f"{JOBS}.optuna_does_nothing", str(made.base / "optuna.journal")]
    starts = json.loads(made.call([*script, str(ENDED + MEASURED + 1)]))
    return from_start_to_start(starts)[ENDED:]


def _ray(made: Project, at_once: int) -> list[float]:
    starts = peers.call(made, "ray_does_nothing", trials=RAY_TRIALS, at_once=at_once)
    return from_start_to_start(starts, at_once)


_NAMES = {
    "returns": f"a trial that only returns its value, after {ENDED:,} trials",
    "reports": f"a trial that reports once, after {ENDED:,} trials",
    "optuna": f"plain Optuna: `study.optimize`, a trial that reports once, after {ENDED:,} trials",
    "ray": "Ray Tune, a trial that reports once, max_concurrent_trials=1",
    "ray, 2": "Ray Tune, a trial that reports once, max_concurrent_trials=2: time over trials",
}

ABOUT = (
    "Trials that do nothing: from a worker's taking a trial to its taking the next one, one worker on the local"
    f" executor, TPE over five parameters, the {MEASURED} trials after {ENDED:,} that have ended in the same study."
    f" Plain Optuna {version('optuna')} has the same sampler, space and number of trials on its own journal, in one"
    f" process. Ray Tune {peers.RAY} runs {RAY_TRIALS} function trainables over the same space with its default"
    " random search after `ray.init(num_cpus=2)`; time before its first trial does not count."
)
NOTES = [
    "Ray Tune starts a process for each trial, unless `reuse_actors` is asked for, which is off by default and here. A"
    " worker of this project calls the job function again in the process that it has.",
]
