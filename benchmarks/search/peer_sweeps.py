"""Simulated sweeps of Ray Tune and Syne Tune: their own schedulers and samplers, called as their tuners do.

`python -m benchmarks.search.peer_sweeps METHOD` reads cases as JSON, and prints their regrets; in the environment of
`benchmarks.peers`.
"""

from __future__ import annotations

import json
import logging
import math
import random
import sys
import warnings
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.search.clock import FACTOR, RESOURCE, START, Simulation
from benchmarks.search.problems import CONTINUOUS, Family, Point

RAY, BOHB = "Ray Tune's ASHA with Optuna", "Syne Tune's BOHB"


def _point(config: dict[str, Any]) -> Point:
    others = [float(config[f"p{place}"]) for place in range(1, CONTINUOUS)]
    return (math.log10(config["lr"]) / 4 + 1, *others, float(config["choice"]))


class RaySweep(Simulation):
    """A sweep by Ray Tune's `ASHAScheduler` and `OptunaSearch`."""

    def __init__(self, family: Family, seed: int, workers: int, whole_trials: int) -> None:
        from ray import tune
        from ray.tune.schedulers import ASHAScheduler
        from ray.tune.search.optuna import OptunaSearch

        super().__init__(family, seed, workers, whole_trials)
        others = {f"p{place}": tune.uniform(0.0, 1.0) for place in range(1, CONTINUOUS)}
        space = {"lr": tune.loguniform(1e-4, 1.0)} | others | {"choice": tune.choice([0, 1, 2])}
        self._search = OptunaSearch(space, metric="loss", mode="min", seed=seed)
        self._scheduler: Any = ASHAScheduler(
            metric="loss", mode="min", max_t=RESOURCE, grace_period=1, reduction_factor=FACTOR
        )

    def take(self, now: float) -> None:
        number = len(self.points)
        config = self._search.suggest(str(number))
        self._scheduler.on_trial_add(None, _trial(number))
        self.points[number] = _point(config)
        self.train(now + START, number)

    def reported(self, now: float, number: int, epoch: int, value: float) -> None:
        result = {"training_iteration": epoch, "loss": value}
        decision = self._scheduler.on_trial_result(None, _trial(number), result)
        self._search.on_trial_result(str(number), result)
        if decision == "CONTINUE":
            self.train(now, number, epoch)
            return
        # whether it was stopped or is complete, the tuner reports it as complete with its last result
        self._search.on_trial_complete(str(number), result)
        self.take(now)


def _trial(number: int) -> Any:
    return SimpleNamespace(trial_id=str(number))


class BohbSweep(Simulation):
    """A sweep by Syne Tune's `BOHB`: asynchronous successive halving with kernel density estimators."""

    def __init__(self, family: Family, seed: int, workers: int, whole_trials: int) -> None:
        from syne_tune import config_space
        from syne_tune.optimizer.baselines import BOHB as Scheduler

        super().__init__(family, seed, workers, whole_trials)
        others = {f"p{place}": config_space.uniform(0.0, 1.0) for place in range(1, CONTINUOUS)}
        space = {"lr": config_space.loguniform(1e-4, 1.0)} | others | {"choice": config_space.choice([0, 1, 2])}
        self._scheduler: Any = Scheduler(
            space, metric="loss", time_attr="epoch", max_t=RESOURCE, reduction_factor=FACTOR, random_seed=seed
        )
        self._trials: dict[int, Any] = {}

    def take(self, now: float) -> None:
        from syne_tune.backend.trial_status import Trial

        number = len(self.points)
        config = self._scheduler.suggest().config
        self._trials[number] = Trial(number, config, datetime.now())
        self._scheduler.on_trial_add(self._trials[number])
        self.points[number] = _point(config)
        self.train(now + START, number)

    def reported(self, now: float, number: int, epoch: int, value: float) -> None:
        decision = self._scheduler.on_trial_result(self._trials[number], {"epoch": epoch, "loss": value})
        if decision == "CONTINUE":
            self.train(now, number, epoch)
        else:
            self.take(now)


METHODS: dict[str, type[Simulation]] = {RAY: RaySweep, BOHB: BohbSweep}


def main(method: str) -> None:
    import optuna

    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    found = []
    for family, seed, workers, whole_trials in json.load(sys.stdin):
        # both also use the global generators
        random.seed(seed)
        np.random.seed(seed)
        found.append(METHODS[method](family, seed, workers, whole_trials).regrets())
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
