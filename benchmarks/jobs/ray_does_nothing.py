"""The sweep of `does_nothing` by Ray Tune, options as JSON. Prints when each trial started."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import ray
from ray import tune


class Starts(tune.Callback):
    """Notes when trials start."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_trial_start(self, *_: Any, **__: Any) -> None:
        self.times.append(time.time())


def train(config: dict[str, Any]) -> None:
    value = (config["momentum"] - 0.5) ** 2 + config["dropout"] + abs(config["lr"] - 0.1) + config["width"] / 128
    tune.report({"value": value})


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    starts = Starts()
    ray.init(num_cpus=2, log_to_driver=False, _temp_dir=options["folder"])
    tune.Tuner(
        train,
        param_space={
            "lr": tune.loguniform(1e-4, 1.0),
            "momentum": tune.uniform(0.0, 0.99),
            "dropout": tune.uniform(0.0, 0.6),
            "width": tune.choice(list(range(16, 129, 16))),
            "batch_size": tune.choice([16, 32, 64]),
        },
        tune_config=tune.TuneConfig(num_samples=options["trials"], max_concurrent_trials=options["at_once"]),
        run_config=tune.RunConfig(storage_path=options["folder"], verbose=0, callbacks=[starts]),
    ).fit()
    ray.shutdown()
    print(json.dumps(starts.times))
