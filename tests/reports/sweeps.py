"""A sweep's folder for tests, made by the functions that make it in earnest; what a worker does is done here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from optuna.study import Study
from optuna.trial import Trial

from mgpu_slurm.core.files import write_json
from mgpu_slurm.metrics.reporter import Reporter
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps import hparams
from mgpu_slurm.sweeps.hparams import End
from mgpu_slurm.sweeps.search import sweep_file
from mgpu_slurm.sweeps.search.parameters import Values
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.claims import Worker
from tests.metrics.event_files import ended_run

SPACE = {
    "lr": {"float": [1e-4, 1.0], "log": True},
    "width": {"int": [16, 128], "step": 16},
    "optimizer": {"choice": ["sgd", "adam"]},
    "momentum": {"float": [0.0, 0.99], "when": {"optimizer": "sgd"}},
    "layers": {"choice": [[8], [8, 8], [16, 8]]},
    "nesterov": {"choice": [True, False], "when": {"optimizer": "sgd"}},
    "clip": {"choice": [None, 1, 0.5]},
    "batch_size": {"choice": [32, 64]},
    "epochs": {"choice": [3]},
}
PRUNER = {"name": "median", "startup_trials": 2}

STATES = {"done": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}


@dataclass
class Sweeping:
    """A sweep in a runs folder."""

    folder: RunFolder
    sweep: Sweep
    study: Study
    values: dict[int, Values] = field(default_factory=dict)
    """By the number of a trial."""
    trials: dict[int, Trial] = field(default_factory=dict)

    def begin(self, function: Any = None) -> int:
        """Takes a trial; its number."""
        trial = studies.take(self.study, self.sweep, Worker(0, 1), self.folder.trials_lock)
        assert trial is not None
        number = trial.number
        values = self.sweep.space.suggest(trial) if isinstance(self.sweep.space, Space) else function(trial)
        self.values[number], self.trials[number] = values, trial
        folder = self.folder.of_trial(number)
        folder.logs.mkdir(parents=True)
        folder.config.write_text(yaml.safe_dump({"seed": 0} | values))
        self.start(number)
        return number

    def start(self, number: int) -> None:
        """As each attempt does."""
        trial = self.trials[number]
        hparams.write_start(self.folder.of_trial(number), self.sweep, self.values[number], trial.distributions)

    def report(
        self, number: int, *losses: float, attempt: int = 1, first: int = 1, steps_each: int = 10, **others: float
    ) -> None:
        reporter = Reporter(self.folder.of_trial(number), attempt)
        if first > 1:
            reporter.resume((first - 1) * steps_each, first - 1)
        for progress, loss in enumerate(losses, first):
            reporter.report(progress, progress * steps_each, {"loss": loss, **others})
        reporter.close(0)

    def end(self, number: int, end: End, result: Mapping[str, float] | None = None) -> None:
        folder = self.folder.of_trial(number)
        record = {"run": folder.run, "state": STATES[end], "ended": records.now()}
        write_json(folder.failure if end == "failed" else folder.result, record)
        hparams.write_end(folder, self.sweep, end, result)

    def run(self, end: End = "done", *losses: float) -> int:
        """A whole trial."""
        number = self.begin()
        self.report(number, *losses)
        self.end(number, end)
        return number


def make_sweep(runs: Path, name: str = "digits", **changes: Any) -> Sweeping:
    """A sweep that has just been made, with two workers."""
    values: dict[str, Any] = {
        "study": name,
        "job": "train:train",
        "metric": "loss",
        "direction": "minimize",
        "sampler": {"name": "random", "seed": 1},
        "pruner": PRUNER,
        "trials": 40,
        "space": SPACE,
    }
    folder = RunFolder(ended_run(runs / name, tasks=2, kind="sweep"))
    records.update_state(folder, kind="sweep")
    folder.sweep.write_text(yaml.safe_dump(values | changes, sort_keys=False))
    made = sweep_file.load(folder.sweep)
    studies.create(made, folder.journal)
    hparams.write_experiment(folder, made)
    return opened(folder.path)


def opened(path: Path) -> Sweeping:
    """A sweep that is there, as a worker has it."""
    folder = RunFolder(path)
    sweep = sweep_file.load(folder.sweep)
    return Sweeping(folder, sweep, studies.load(sweep, folder.journal, Worker(0, 1)))
