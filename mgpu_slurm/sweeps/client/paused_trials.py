"""Checkpoints of paused trials, and the end of those that will never be promoted."""

from __future__ import annotations

from collections.abc import Iterator

from optuna.trial import FrozenTrial, TrialState

from mgpu_slurm.checkpoints import folder as checkpoints
from mgpu_slurm.core import log_lines
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.registry import cleanup
from mgpu_slurm.run_folder.checkpoint_names import checkpoint_key
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps import hparams, optuna_adapter
from mgpu_slurm.sweeps.client.worker_study import WorkerStudy
from mgpu_slurm.sweeps.scheduling.scheduler import EntryState, Snapshot
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import claims as claiming
from mgpu_slurm.sweeps.study import outcomes
from mgpu_slurm.sweeps.study import trial_queue as studies

WORSE = "worse than the other trials"
"""Reason for which the scheduler prunes a trial."""

REPLACED = "replaced by a copy of trial"
"""Reason for which population based training prunes a trial, followed by the number of the copied one."""

NO_ROOM = "its checkpoint had to make room (keep_gb)"

_GIGABYTE = 10**9


def is_schedulers(reason: str) -> bool:
    """Return whether a trial was pruned by the scheduler, and not because of its own value."""
    return reason == WORSE or reason.startswith(REPLACED)


def keep_newest_checkpoint(trial: RunFolder) -> None:
    """Delete a trial's older checkpoints, without the best one if the job keeps that."""
    for run in trial.with_seeds():
        best = run.checkpoints / checkpoints.BEST
        checkpoints.trim(run, keep=1, also=checkpoint_key(best.resolve()) if best.is_symlink() else None)


def size_of_checkpoints(trial: RunFolder) -> int:
    """Return the bytes of a trial's checkpoints."""
    return sum(cleanup.size_of(run.checkpoints) for run in trial.with_seeds())


def delete_checkpoints(trial: RunFolder) -> None:
    """Delete all checkpoints of a trial that has been pruned; what cannot be deleted is left for `clean`."""
    try:
        cleanup.delete_checkpoints(trial)
    except UserError as error:
        log_lines.warn(str(error))


def prune_hopeless(shared: WorkerStudy) -> list[RunFolder]:
    """Prune the paused trials that will never be promoted, or whose checkpoints take too much room; return their
    folders, which the caller has to clear.

    Trials that run, and those that may be promoted now, are never pruned. The caller must hold the lock.
    """
    snapshot = shared.snapshot()
    hopeless = shared.scheduler.hopeless(snapshot)
    pruned = [_prune(shared, shared.snapshots.trial(number), WORSE) for number in hopeless]
    too_large = list(_too_large(shared, snapshot, set(hopeless)))
    return pruned + [_prune(shared, shared.snapshots.trial(number), NO_ROOM) for number in too_large]


def replace_by_copy(shared: WorkerStudy, trial: FrozenTrial, source: int) -> None:
    """Prune a paused trial, to be replaced by a copy of another one; the caller must hold the lock."""
    studies.replace_by_copy(shared.study, trial, source)
    clear(_prune(shared, trial, f"{REPLACED} {source}"), shared.sweep)


def clear(trial: RunFolder, sweep: Sweep) -> None:
    """Delete the checkpoints of a trial that was pruned while it was paused, and show that it has ended."""
    with hparams.may_fail():
        hparams.write_end(trial, sweep, "pruned")
    delete_checkpoints(trial)


def _too_large(shared: WorkerStudy, snapshot: Snapshot, besides: set[int]) -> Iterator[int]:
    """Yield the least promising paused trials, until the checkpoints of the others fit."""
    limit = shared.sweep.pruner.keep_gb
    if limit is None:
        return
    paused = [number for number, entry in snapshot.entries.items() if entry.state is EntryState.PAUSED]
    sizes = {number: _size(shared, number) for number in paused if number not in besides}
    for number in shared.scheduler.least_promising(snapshot):
        if sum(sizes.values()) <= limit * _GIGABYTE:
            return
        if sizes.pop(number, None) is not None:
            yield number


def _size(shared: WorkerStudy, number: int) -> int:
    trial = shared.snapshots.trial(number)
    known: int | None = trial.system_attrs.get(claiming.SIZE)
    # one whose worker died at its rung has not been measured
    return size_of_checkpoints(shared.sweep_folder.of_trial(trial.number)) if known is None else known


def _prune(shared: WorkerStudy, trial: FrozenTrial, reason: str) -> RunFolder:
    """End a paused trial in the study; its checkpoints are deleted later."""
    folder = shared.sweep_folder.of_trial(trial.number)
    progress = max(trial.intermediate_values)
    outcomes.write(folder, outcomes.Pruned(reason, progress))
    if reason != WORSE:
        claiming.blame(shared.study, trial, reason, is_own_fault=False)
    # as `Study.tell` does it
    values = [trial.intermediate_values[progress]] if len(shared.sweep.objectives) == 1 else None
    optuna_adapter.end_trial(shared.study, trial, TrialState.PRUNED, values)
    log_lines.say(f"trial {trial.number} was paused at progress {progress} and is pruned: {reason}")
    return folder
