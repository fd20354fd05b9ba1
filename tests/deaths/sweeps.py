"""Sweeps whose workers are killed, and what has to be true when they have ended."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.scheduling.construction import scheduler_of
from mgpu_slurm.sweeps.scheduling.halving import Promotion
from mgpu_slurm.sweeps.scheduling.scheduler import EntryState
from mgpu_slurm.sweeps.study.snapshots import Snapshots
from tests.deaths import workers
from tests.deaths.workers import Death
from tests.sweeps.sweeps import make, study_of, sweep_of

SCHEDULERS: dict[str, dict[str, Any]] = {
    "asha": {"trials": 7, "pruner": {"name": "asha", "min_resource": 1, "max_resource": 9, "reduction_factor": 2}},
    "pbt": {
        "trials": None,
        "pruner": {"name": "pbt", "population": 4, "interval": 3, "max_resource": 9, "perturb": ["x"]},
    },
}

NewStorage = Callable[[], str | None]
"""Returns the URL of an empty database; None for a journal."""


class Deaths:
    """Sweeps with one scheduler on one kind of storage, each in a new folder."""

    def __init__(self, base: Path, scheduler: str, new_storage: NewStorage = lambda: None) -> None:
        self._base = base
        self._values = SCHEDULERS[scheduler]
        self._new_storage = new_storage
        self._count = 0

    def _make(self) -> RunFolder:
        self._count += 1
        shutil.rmtree(self._base / str(self._count - 1), ignore_errors=True)
        storage = self._new_storage()
        sampler = {"name": "random", "seed": 1}
        given: dict[str, Any] = {"sampler": sampler, "workers": 3, "storage": storage, "max_retries": 99}
        return make(self._base / str(self._count), **given, **self._values)

    def writes(self) -> int:
        """Return how many writes one worker makes."""
        return workers.writes_of(self._make())

    def one(self, death: Death) -> list[str]:
        """Kill a worker that is alone, and let another one end the sweep; return what is wrong."""
        folder = self._make()
        first = workers.run(folder, 0, 1, death)
        first.join()
        other = workers.run(folder, 1, 1)
        other.join()
        told = [] if first.exitcode == -signal.SIGKILL else [f"the first worker ended with {first.exitcode}"]
        return told + _problems(folder, [other.exitcode])

    def many(self, seed: int, most: int) -> list[str]:
        """Kill three workers at once, each several times, and return what is wrong.

        Args:
            most: the last write at which one is killed. Each may make fewer, so that none is killed: then the sweep is
                repeated with earlier deaths.
        """
        draw = random.Random(seed)
        while True:
            codes, problems = self._many(draw, most)
            if problems or -signal.SIGKILL in codes or most == 1:
                return problems + ([] if -signal.SIGKILL in codes else ["no worker was killed"])
            most = max(1, most // 2)

    def _many(self, draw: random.Random, most: int) -> tuple[list[int | None], list[str]]:
        """Return the exit codes of all workers, and what is wrong."""
        folder = self._make()
        codes: list[int | None] = []
        for attempt in range(1, 5):
            hows = ["before", "after"] if sweep_of(folder).storage else ["before", "after", "torn"]
            deaths = [None if attempt == 4 else Death(draw.randint(1, most), draw.choice(hows)) for _ in range(3)]
            started = [workers.run(folder, number, attempt, death) for number, death in enumerate(deaths)]
            for process in started:
                process.join()
            codes += [process.exitcode for process in started]
        return codes, _problems(folder, [code for code in codes if code != -signal.SIGKILL])


def _problems(folder: RunFolder, codes: list[int | None]) -> list[str]:
    """
    Args:
        codes: the exit codes of the workers that were not killed.
    """
    sweep, study = sweep_of(folder), study_of(folder)
    scheduler = scheduler_of(sweep.pruner, sweep.direction)
    found = Snapshots(study, scheduler).take(sweep.trials).entries
    told = workers.violations(folder)
    told += [f"a worker ended with exit code {code}" for code in codes if code]
    busy = (EntryState.RUNNING, EntryState.GIVEN_BACK)
    told += [f"trial {entry.number} is stuck: {entry.state.value}" for entry in found.values() if entry.state in busy]
    told += [f"trial {entry.number} failed" for entry in found.values() if entry.state is EntryState.FAILED]
    if not any(entry.state is EntryState.COMPLETE for entry in found.values()):
        told.append("no trial is complete")
    if isinstance(scheduler, Promotion):
        told += _promotion_problems(scheduler, sweep.trials, found)
    else:
        told += _copy_problems(sweep.pruner.population, found)
    for trial in study.trials:
        for progress, value in trial.intermediate_values.items():
            # a copy has the values of its source up to its checkpoint in its history, but not in the study
            if value != workers.value_of(trial.params["x"], progress):
                told.append(f"trial {trial.number} has another value at {progress}")
    return told


def _promotion_problems(scheduler: Promotion, trials: int | None, found: dict[int, Any]) -> list[str]:
    told = [] if len(found) == trials else [f"{len(found)} of {trials} trials have begun"]
    for rung in range(len(scheduler.rungs) - 1):
        there = [entry for entry in found.values() if rung in entry.values]
        promoted = sum(entry.until > rung for entry in there)
        if promoted > max(1, len(there) // scheduler.factor):
            told.append(f"{promoted} of {len(there)} trials were promoted out of rung {rung}")
    return told


def _copy_problems(population: int, found: dict[int, Any]) -> list[str]:
    told = []
    members = [entry for entry in found.values() if entry.replaces is None]
    if len(members) != population:
        told.append(f"{len(members)} of {population} members have begun")
    replaced = [entry.number for entry in found.values() if entry.source is not None]
    copies = [entry.replaces for entry in found.values() if entry.replaces is not None]
    # a replaced trial has no copy if all others have ended before another worker came
    if len({*copies}) < len(copies) or not {*copies} <= {*replaced}:
        told.append(f"trials {replaced} were replaced, and copies replace {copies}")
    return told
