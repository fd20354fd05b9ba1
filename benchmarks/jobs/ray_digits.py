"""The digits by Ray Tune's ASHA, options as JSON. Prints when each epoch was done, and the accuracy after it."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator

from benchmarks.jobs import digits_plain
from jobs.digits import Config


class Reports(tune.Callback):
    """Collects what trials report."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []

    def on_trial_result(self, *_: Any, result: dict[str, Any], **__: Any) -> None:
        self.found.append((result["time"], result["accuracy"]))


class Found(tune.Stopper):
    """Ends the search with the first trial that has reached the accuracy."""

    def __init__(self, accuracy: float) -> None:
        self._accuracy = accuracy
        self._has_found = False

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        self._has_found = self._has_found or result["accuracy"] >= self._accuracy
        return self._has_found

    def stop_all(self) -> bool:
        return self._has_found


def train(values: dict[str, Any]) -> None:
    digits_plain.train(Config(**values), lambda accuracy: tune.report({"accuracy": accuracy, "time": time.time()}))


def domain(said: dict[str, Any]) -> Any:
    """A parameter of a sweep file, as Ray Tune takes it."""
    if "choice" in said:
        return tune.choice(said["choice"])
    if "int" in said:
        low, high = said["int"]
        return tune.choice(list(range(low, high + 1, said["step"])))
    return (tune.loguniform if said.get("log") else tune.uniform)(*said["float"])


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    space = {name: domain(said) for name, said in options["space"].items()}
    reports = Reports()
    ray.init(num_cpus=options["workers"], log_to_driver=False, _temp_dir=options["folder"])
    tune.Tuner(
        train,
        param_space=space | {"epochs": options["epochs"]},
        tune_config=tune.TuneConfig(
            num_samples=-1,
            time_budget_s=options["seconds"],
            search_alg=BasicVariantGenerator(random_state=options["seed"], max_concurrent=options["workers"]),
            scheduler=ASHAScheduler(
                metric="accuracy", mode="max", max_t=options["epochs"], grace_period=1, reduction_factor=3
            ),
        ),
        run_config=tune.RunConfig(
            storage_path=options["folder"],
            verbose=0,
            callbacks=[reports],
            stop=Found(options["accuracy"]),
        ),
    ).fit()
    ray.shutdown()
    print(json.dumps(reports.found))
