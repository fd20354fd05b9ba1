"""The sweep of `does_nothing` by plain Optuna: `JOURNAL TRIALS`. Prints when each trial started."""

from __future__ import annotations

import json
import sys

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend


def train(trial: optuna.Trial) -> float:
    lr = trial.suggest_float("lr", 1e-4, 1.0, log=True)
    momentum = trial.suggest_float("momentum", 0.0, 0.99)
    dropout = trial.suggest_float("dropout", 0.0, 0.6)
    width = trial.suggest_int("width", 16, 128, step=16)
    trial.suggest_categorical("batch_size", [16, 32, 64])
    value = (momentum - 0.5) ** 2 + dropout + abs(lr - 0.1) + width / 128
    trial.report(value, 1)
    return value


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(sys.argv[1])), sampler=optuna.samplers.TPESampler(seed=1)
    )
    study.optimize(train, n_trials=int(sys.argv[2]))
    print(json.dumps([trial.datetime_start.timestamp() for trial in study.trials if trial.datetime_start]))
