"""The Pareto front in TensorBoard: a metric of each trial that is on it, or was."""

from __future__ import annotations

from optuna.study import Study

from mgpu_slurm.core.files import locked, read_json, write_json
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps import hparams
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import summary


def mark(folder: RunFolder, study: Study, sweep: Sweep) -> None:
    """Mark the trials that are on the front now, and those that no longer are.

    Args:
        folder: the folder of the sweep.
    """
    known_file = folder.tensorboard / "front.json"
    # read under the lock, so that the last of several workers marks the whole front
    with locked(folder.tensorboard / "front.lock"):
        known: list[int] = read_json(known_file) or []
        front = [trial.number for trial in summary.front_of(summary.own_trials(study), sweep)]
        for number in sorted({*front} ^ {*known}):
            hparams.write_metric(folder.of_trial(number), hparams.FRONT, float(number in front))
        write_json(known_file, sorted(front), sync=False)
