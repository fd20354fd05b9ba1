"""The confirmation of a sweep: its best trials are trained again with several other seeds, by the same workers.

It is a study of its own, in a folder next to the sweep's, whose workers are those of the sweep. Trial for trial it has
the values of the best ones, and all are trained with the same seeds, so that they can be compared seed by seed.
"""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace

from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from mgpu_slurm.core import files, log_lines
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import program
from mgpu_slurm.registry.sweep_state import confirmation_folder, confirmed_by, is_confirmation
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.config import Config
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder import layout, records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.sweep_records import confirmation_of
from mgpu_slurm.sweeps import hparams
from mgpu_slurm.sweeps.search import sweep_file
from mgpu_slurm.sweeps.search.parameters import Values, kept
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.search.sweep_options import Budget
from mgpu_slurm.sweeps.study import summary
from mgpu_slurm.sweeps.study import trial_queue as studies

_OWN_KEYS = ("confirm", "warm_start", "seeds", "trials", "enqueue", "sampler", "pruner", "budget", "fixed", "study")
"""Keys of the sweep's file that a confirmation does not take over as they are."""


def refuse_as_sweep(folder: RunFolder) -> None:
    """Raise UserError if the folder is a confirmation: only the workers of its sweep train its trials."""
    if is_confirmation(folder):
        study = confirmed_by(folder).run
        raise UserError(f"study {folder.run} confirms study {study}, whose workers train it: name {study} instead")


def check(folder: RunFolder, sweep: Sweep) -> None:
    """Check that a sweep can have the confirmation that its file describes.

    Raises:
        UserError: another run has its name, or it has begun with other seeds.
    """
    own = confirmation_folder(folder)
    if sweep.confirm is None:
        return
    trained = (configs.read_yaml(path) for path in folder.trials.glob("*/config.yaml"))
    config = next(trained, None)
    if config is not None and "seed" not in config:
        raise UserError("confirm: the job's config has no `seed`: start a study whose job has `seed: int = 0`")
    if not own.path.exists():
        return
    if not folder.path.exists() and is_confirmation(own):
        raise UserError(f"confirm: study {own.run} is left of an earlier study: `{program()} clean {own.run}` first")
    if not is_confirmation(own):
        raise UserError(f"confirm: the confirmation would be study {own.run}, which exists: choose another study name")
    seeds = sweep_file.load(own.sweep).seed_values
    if seeds != sweep.confirm_seeds:
        raise UserError(
            f"confirm: study {own.run} has begun with seeds {seeds[0]} to {seeds[-1]}: keep their number, or delete it"
        )


def prepare(folder: RunFolder, sweep: Sweep, trials: Sequence[FrozenTrial]) -> RunFolder | None:
    """Create the confirmation of a sweep, or add trials to it that have become the best since.

    The caller must hold the sweep's lock, and all trials must have ended.

    Args:
        folder: the folder of the sweep.
        trials: all trials of the sweep.

    Returns:
        Its folder; None if there is nothing to confirm.
    """
    own = confirmation_folder(folder)
    points = summary.best_points(trials, sweep)
    if not own.path.exists():
        if not points:
            return None
        _create(folder, own, _file(folder, sweep, points))
    if confirmed_by(own) != folder:
        log_lines.warn(f"nothing is confirmed: {own.run} is another run, which was created meanwhile")
        return None
    with files.locked(own.sweep_lock), files.locked(own.trials_lock):
        _update(folder, sweep, own, points)
    return own


def _update(folder: RunFolder, sweep: Sweep, own: RunFolder, points: Sequence[Values]) -> None:
    known = sweep_file.load(own.sweep)
    points = [*known.enqueue, *(point for point in points if point not in known.enqueue)]
    study = studies.load(known, own.journal)
    # before the number of trials is raised: none of them is drawn at random
    studies.queue(study, points[len(studies.queued(study)) :])
    values = _file(folder, sweep, points)
    if values != configs.read_yaml(own.sweep):
        files.write_whole(own.sweep, configs.dump_yaml(values))
        if studies.why_over(study) is not None:
            # its budget may have been raised: the first worker checks whether it is still spent
            studies.set_over(study, None)
    # workers may have been added to the sweep
    records.update_state(own, tasks=records.read_state(folder).tasks)


def left(folder: RunFolder, sweep: Sweep, trials: Sequence[FrozenTrial]) -> int:
    """Return how many trials are still to be trained again, also if the confirmation has failed.

    Args:
        trials: all trials of the sweep.
    """
    own = confirmation_folder(folder)
    if sweep.confirm is None:
        return 0
    points = summary.best_points(trials, sweep)
    if not is_confirmation(own):
        return len(points)
    known = sweep_file.load(own.sweep)
    study = studies.load(known, own.journal)
    over = studies.why_over(study)
    if over is not None and not over.failed and known.budget == _budget(sweep):
        return 0
    return sum(point not in known.enqueue for point in points) + sum(
        not trial.state.is_finished() for trial in study.get_trials(deepcopy=False)
    )


def allow_again(folder: RunFolder) -> None:
    """Let the confirmation of a sweep continue after a failure, whose cause may be fixed."""
    own = confirmation_folder(folder)
    if not is_confirmation(own):
        return
    study = studies.load(sweep_file.load(own.sweep), own.journal)
    over = studies.why_over(study)
    if over is not None and over.failed:
        studies.set_over(study, None)


def _file(folder: RunFolder, sweep: Sweep, points: Sequence[Values]) -> Config:
    """Return the sweep file of the confirmation."""
    assert sweep.confirm is not None
    taken_over = {key: value for key, value in configs.read_yaml(folder.sweep).items() if key not in _OWN_KEYS}
    limits = asdict(_budget(sweep))
    return {
        "study": confirmation_of(sweep.study),
        **taken_over,
        # all of its trials are enqueued
        "sampler": "random",
        "fixed": {**sweep.fixed, "seed": sweep.confirm_seeds[0]},
        "seeds": sweep.confirm.seeds,
        "trials": len(points),
        "enqueue": list(points),
        "budget": {name: limit for name, limit in limits.items() if limit is not None},
    }


def _budget(sweep: Sweep) -> Budget:
    return Budget(hours=sweep.budget.hours, gpu_hours=sweep.budget.gpu_hours)


def _create(folder: RunFolder, own: RunFolder, values: Config) -> None:
    spec = replace(read_spec(folder), run=own.run)
    staging = RunFolder(own.path.with_name(f"{layout.STAGING_PREFIX}{own.run}"))
    # of a worker that was killed meanwhile
    shutil.rmtree(staging.path, ignore_errors=True)
    staging.create(spec.readable_by)
    files.write_whole(staging.sweep, configs.dump_yaml(values))
    spec.write(staging)
    state = records.read_state(folder)
    files.write_json(staging.state, replace(state, run=own.run).to_json())
    for path in (folder.tasks, folder.code):
        (staging.path / path.name).symlink_to(f"../{folder.path.name}/{path.name}")
    staging.trials.mkdir()
    sweep = sweep_file.load(staging.sweep)
    study = _study(sweep, staging)
    hparams.write_experiment(staging, sweep)
    summary.write(staging, study, sweep)
    staging.path.rename(own.path)


def _study(sweep: Sweep, staging: RunFolder) -> Study:
    try:
        return studies.create(sweep, staging.journal)
    except UserError:
        study = studies.load(sweep, staging.journal)
        if studies.queued(study) != [kept(point) for point in sweep.enqueue]:
            raise
        # a worker was killed after it had created it in the database
        return study


# -- inside the budget


def seconds_needed(trials: Sequence[FrozenTrial], sweep: Sweep) -> tuple[float, float]:
    """Return about how long the confirmation takes: on the clock, and summed over all that train at the same time.

    It is unknown, and 0, before a trial of the sweep is complete.
    """
    lengths = [summary.length(trial) or 0.0 for trial in trials if trial.state == TrialState.COMPLETE]
    if sweep.confirm is None or not lengths:
        return 0.0, 0.0
    top = min(sweep.confirm.top, len(lengths))
    each = statistics.fmean(lengths) / sweep.seeds * sweep.confirm.seeds
    rounds = math.ceil(top / (sweep.workers * sweep.trials_per_worker))
    return rounds * each, top * each
