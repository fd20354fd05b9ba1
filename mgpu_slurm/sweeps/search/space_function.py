"""A search space that is a user's function: choosing a trial's values, and checking that the job accepts them.

`python -m mgpu_slurm.sweeps.search.space_function FOLDER` tries the function in a separate process, which imports the
user's code.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import Trial

from mgpu_slurm.core import interpreter
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request import config as configs
from mgpu_slurm.request import target
from mgpu_slurm.request.spec import Spec, read_spec
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.submission.project import config_check
from mgpu_slurm.sweeps import optuna_adapter
from mgpu_slurm.sweeps.search import sweep_file, trial_command
from mgpu_slurm.sweeps.search.parameters import Values
from mgpu_slurm.sweeps.search.space import nested
from mgpu_slurm.sweeps.search.sweep import Sweep

DRAWS = 8
"""Number of random trials drawn to check the function."""


def load(name: str, workdir: Path) -> Callable[[Trial], Values]:
    """Return a callable that chooses a trial's parameters by the named function; it passes on the function's errors.

    Args:
        workdir: the job's working directory in its code.

    Raises:
        UserError: there is no such function, or its module cannot be imported.
    """
    function = target.attribute(name, workdir)

    def choose(trial: Trial) -> Values:
        values = function(trial)
        if not isinstance(values, dict):
            raise UserError(f"{name} has returned {values!r}: expected a mapping of parameters")
        plain: Values = configs.to_plain(values)
        return plain

    return choose


def try_out(folder: RunFolder) -> None:
    """Draw some trials, and check that the job accepts them.

    Args:
        folder: the folder of the sweep, with its code, spec and sweep file.

    Raises:
        UserError: the function cannot be imported or fails, or its values do not fit.
    """
    command = interpreter.command(sys.executable, "mgpu_slurm.sweeps.search.space_function", str(folder.path))
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
    if not answer:
        raise UserError("space: the function ended the process that called it, without an error: call it by hand")
    problem = json.loads(answer)
    if problem is not None:
        raise UserError(problem)


def _problem(folder: RunFolder) -> str | None:
    """Return what is wrong with a sweep's space in one line; None if nothing is."""
    spec, sweep = read_spec(folder), sweep_file.load(folder.sweep)
    assert isinstance(sweep.space, str)
    workdir = folder.code / spec.workdir
    optuna_adapter.silence()
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    try:
        takes, choose = _takes(sweep, spec, folder), load(sweep.space, workdir)
        for _ in range(min(DRAWS, sweep.trials or DRAWS)):
            try:
                takes(choose(study.ask()))
            except optuna.TrialPruned:
                # a space function raises it for an invalid combination
                continue
    except UserError as error:
        return f"space {sweep.space}: {error}"
    except Exception as error:
        return f"space {sweep.space}: {target.described_error(error, sweep.space, workdir)}"
    return None


def _takes(sweep: Sweep, spec: Spec, folder: RunFolder) -> Callable[[Values], Any]:
    """Return a callable that raises an error if a trial with the given values would not start."""
    if sweep.command:
        target.use_snapshot(folder.code / spec.workdir)
        return lambda values: trial_command.check_takes(sweep.command, values)
    job = target.job_function(spec, folder)
    seed: Values = {"seed": sweep.seed_values[0]} if sweep.sets_seeds else {}

    def fill(values: Values) -> None:
        if seed.keys() & values.keys():
            raise UserError(
                f"space {sweep.space}: it chooses seed, which `seeds` and `confirm` set: remove one of them"
            )
        job.fill(configs.merge(spec.config, nested(values | seed)), spec.original)

    return fill


if __name__ == "__main__":
    config_check.reply(lambda: _problem(RunFolder(Path(sys.argv[1]))))
