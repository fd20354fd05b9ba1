"""The study of a sweep, and the queue of its trials.

A worker takes a trial that was given back. Else it does what the scheduler says: promote a paused trial, or begin the
next one. Both happen under a lock on a file that all workers share. So no trial is promoted twice, none is taken that
was paused meanwhile, and there are never more trials than the sweep's limit. Parameters are chosen when a trial begins.
A trial that is given back or paused keeps its number, its parameters and its reports.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.pruners import NopPruner
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import locked
from mgpu_slurm.run_folder.sweep_records import SweepOver
from mgpu_slurm.sweeps import optuna_adapter
from mgpu_slurm.sweeps.optuna_adapter import FIXED_PARAMS
from mgpu_slurm.sweeps.scheduling import samplers
from mgpu_slurm.sweeps.scheduling.construction import sampler_of, scheduler_of
from mgpu_slurm.sweeps.scheduling.observations import COPY_OF
from mgpu_slurm.sweeps.scheduling.rung_tpe import RungTpe
from mgpu_slurm.sweeps.scheduling.scheduler import Action, Scheduler
from mgpu_slurm.sweeps.search.parameters import Values, kept
from mgpu_slurm.sweeps.search.perturbation import perturbed
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study.claims import Worker, claim
from mgpu_slurm.sweeps.study.journal import JournalFile
from mgpu_slurm.sweeps.study.snapshots import (
    ORIGIN,
    SECONDS,
    SOURCE,
    UNTIL,
    CopyOf,
    Snapshots,
    is_paused,
    until_of,
)
from mgpu_slurm.sweeps.study.storage import storage_of

OVER = "mgpu:over"
"""Attribute of a study: a `SweepOver`."""

ORIGINS = "mgpu:origins"
"""Attribute of a study: the number of such trials."""


def create(sweep: Sweep, journal: Path, known: Sequence[FrozenTrial] = ()) -> Study:
    """Create the study and queue its enqueued points, before any worker starts.

    Args:
        journal: absolute path of the journal, used unless the sweep names a database.
        known: trials of an earlier study, for the sampler.

    Raises:
        UserError: the database cannot be opened, or has a study of that name.
    """
    optuna_adapter.silence()
    try:
        study = optuna.create_study(
            storage=storage_of(sweep, journal, is_new=True),
            study_name=sweep.study,
            directions=[each.direction for each in sweep.objectives],
        )
    except optuna.exceptions.DuplicatedStudyError:
        raise UserError(f"study {sweep.study!r}: the database already has one of that name: choose another") from None
    for trial in known:
        study.add_trial(trial)
    if known:
        note(study, ORIGINS, len(known))
    queue(study, list(sweep.enqueue))
    return study


def load(sweep: Sweep, journal: Path, worker: Worker | None = None) -> Study:
    """Load the study for a worker, with a sampler that draws differently from every other attempt of any worker.

    Args:
        worker: None if the caller only reads the study or adds to it, and samples nothing: a user's sampler class may
            exist only in the run's code.
    """
    optuna_adapter.silence()
    return optuna.load_study(
        storage=storage_of(sweep, journal),
        study_name=sweep.study,
        sampler=None if worker is None else _sampler(sweep, worker),
        # the scheduler decides
        pruner=NopPruner(),
    )


def _sampler(sweep: Sweep, worker: Worker) -> BaseSampler:
    levels, objectives = sweep.pruner.levels, len(sweep.objectives)
    return sampler_of(
        sweep.sampler, worker.number, worker.attempt, levels, sweep.space, objectives, process=worker.process
    )


def queue(study: Study, points: list[Values]) -> None:
    """Queue trials with these values; parameters that a point leaves out are sampled when the trial begins."""
    for point in points:
        study.enqueue_trial(kept(point))


def queued(study: Study) -> list[Values]:
    """Return all points that were ever queued, in the study's form."""
    trials = [trial for trial in study.get_trials(deepcopy=False) if COPY_OF not in trial.system_attrs]
    return [trial.system_attrs[FIXED_PARAMS] for trial in trials if FIXED_PARAMS in trial.system_attrs]


def begun(study: Study) -> int:
    """Return the number of trials in the study, without those copied from an earlier study."""
    return optuna_adapter.trial_count(study) - int(notes(study).get(ORIGINS, 0))


def take(
    study: Study,
    sweep: Sweep,
    worker: Worker,
    lock: Path,
    snapshots: Snapshots | None = None,
    is_over: bool = False,
    prepare: Callable[[FrozenTrial, FrozenTrial], int] = lambda replaced, source: 0,
) -> Trial | None:
    """Take a trial for this worker; return None if there is none.

    Args:
        lock: a file that all workers share.
        snapshots: reads the study for the scheduler; None to read all of it.
        is_over: whether the budget is spent, so that no trial begins any more.
        prepare: called before a copy is created, with the trial that it replaces and the one that it copies; returns
            the progress from which the copy continues.
    """
    scheduler = scheduler_of(sweep.pruner, sweep.direction)
    snapshots = snapshots or Snapshots(study, scheduler)
    # the sampler may have cached older states of the trials
    optuna_adapter.forget_cached_trials(study)
    with locked(lock):
        given_back = _take_waiting(study, worker, lambda trial: was_given_back(trial, sweep))
        if given_back is not None:
            return Trial(study, given_back)
        job = scheduler.next_job(snapshots.take(_limit(study, sweep), is_over))
        if job is None:
            return None
        if job.action is Action.PROMOTE:
            assert job.number is not None
            return Trial(study, _promote(study, worker, snapshots.trial(job.number)))
        if job.action is Action.CLONE:
            assert job.number is not None
            assert job.source is not None
            replaced, source = snapshots.trial(job.number), snapshots.trial(job.source)
            return Trial(study, _begin_copy(study, sweep, worker, replaced, source, prepare(replaced, source)))
        queued = _take_waiting(study, worker, _was_queued, scheduler)
        number = begun(study)
        known = _point(sweep, number)
        trial = Trial(study, _begin(study, worker, scheduler, number, known) if queued is None else queued)
        if isinstance(study.sampler, RungTpe) and study.sampler.repeats_no_point and not known:
            # drawn under the lock, so that no two workers draw the same point
            _ = trial.relative_params
    # another sampler draws later, which may take long
    return trial


def take_doubted(study: Study, sweep: Sweep, worker: Worker, lock: Path) -> Trial | None:
    """Take a trial that has failed on another worker, to show whether it fails here too; None if there is none.

    Args:
        lock: as for `take`.
    """

    def is_doubted(trial: FrozenTrial) -> bool:
        doubt = samplers.doubt_of(trial)
        return doubt is not None and doubt.worker != worker.number and was_given_back(trial, sweep)

    optuna_adapter.forget_cached_trials(study)
    with locked(lock):
        found = _take_waiting(study, worker, is_doubted)
    return None if found is None else Trial(study, found)


def all_tried(study: Study) -> bool:
    """Return whether each point of a finite space has been tried by a sampler that repeats none."""
    return isinstance(study.sampler, RungTpe) and study.sampler.has_tried_all(study)


def _limit(study: Study, sweep: Sweep) -> int | None:
    """Return how many trials may begin in all."""
    return begun(study) if all_tried(study) else sweep.trials


@contextmanager
def synced_once(study: Study) -> Iterator[None]:
    """Make writes visible to others at once, but durable only at the end: a journal is synced to disk once.

    A database still commits each call to disk.
    """
    backend = optuna_adapter.journal_of(study)
    with backend.synced_once() if isinstance(backend, JournalFile) else nullcontext():
        yield


def _point(sweep: Sweep, number: int) -> Values:
    """Return the grid point of the trial with this number; without a grid, no values."""
    if sweep.sampler.name != "grid":
        return {}
    assert isinstance(sweep.space, Space)
    return sweep.space.grid()[number]


def _begin(study: Study, worker: Worker, scheduler: Scheduler, number: int, known: Values) -> int:
    """Create a trial that the worker owns from the start, and return its id.

    Args:
        number: its number among the study's own trials.
    """
    attributes: dict[str, object] = {worker.claim: worker.attempt}
    if first := scheduler.first_rung(number):
        attributes[UNTIL] = first
    if known:
        # as for a queued trial
        attributes[FIXED_PARAMS] = kept(known)
    template = create_trial(state=TrialState.RUNNING, system_attrs=attributes)
    return optuna_adapter.create_trial(study, template)


def _begin_copy(
    study: Study, sweep: Sweep, worker: Worker, replaced: FrozenTrial, source: FrozenTrial, progress: int
) -> int:
    """Create a copy of a trial, with changed values, in the place of another one, and return its id.

    Args:
        progress: that of the checkpoint from which it continues.
    """
    assert isinstance(sweep.space, Space)
    draw = random.Random(f"{sweep.sampler.seed} {replaced.number}")
    attributes = {
        worker.claim: worker.attempt,
        UNTIL: next(rung for rung, at in enumerate(sweep.pruner.rungs) if at > progress),
        COPY_OF: asdict(CopyOf(source.number, replaced.number, progress)),
        FIXED_PARAMS: perturbed(sweep.space, source.params, sweep.pruner.perturb, draw),
    }
    template = create_trial(state=TrialState.RUNNING, system_attrs=attributes)
    return optuna_adapter.create_trial(study, template)


def replace_by_copy(study: Study, trial: FrozenTrial, source: int) -> None:
    """Note of which trial a copy is to replace this one, which is pruned next; the caller must hold the lock."""
    optuna_adapter.set_trial_attribute(study, trial, SOURCE, source)


def _promote(study: Study, worker: Worker, trial: FrozenTrial) -> int:
    """Take a paused trial, let it run to the next rung, and return its id; the caller must hold the lock.

    It is taken first: if this worker dies in between, it is found at its rung, and paused as before.
    """
    claim(study, worker, trial)
    grant(study, trial)
    return optuna_adapter.id_of(trial)


def grant(study: Study, trial: FrozenTrial) -> None:
    """Let a trial run to the next rung; the caller must hold the lock."""
    if trial.system_attrs.get(SOURCE) is not None:
        # a worker died before it could prune this trial
        optuna_adapter.set_trial_attribute(study, trial, SOURCE, None)
    optuna_adapter.set_trial_attribute(study, trial, UNTIL, until_of(trial) + 1)


def _take_waiting(
    study: Study, worker: Worker, is_wanted: Callable[[FrozenTrial], bool], scheduler: Scheduler | None = None
) -> int | None:
    """Take a waiting trial, and return its id; None if there is none. The caller must hold the lock.

    Args:
        is_wanted: selects the trials.
        scheduler: given for trials that begin now.
    """
    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    for trial in _by_turn(list(filter(is_wanted, waiting)), worker):
        with suppress(UpdateFinishedTrialError):
            if scheduler is not None and (first := scheduler.first_rung(own_number(study, trial))):
                optuna_adapter.set_trial_attribute(study, trial, UNTIL, first)
            if claim(study, worker, trial):
                return optuna_adapter.id_of(trial)
    return None


def _by_turn(trials: list[FrozenTrial], worker: Worker) -> Iterator[FrozenTrial]:
    """Yield the trials. Each worker starts at a different one, to avoid competition for the same."""
    start = (worker.number + worker.process) % len(trials) if trials else 0
    yield from trials[start:]
    yield from trials[:start]


def own_number(study: Study, trial: FrozenTrial) -> int:
    """Return a trial's number among the study's own trials, from 0."""
    if not notes(study).get(ORIGINS):
        return trial.number
    earlier = study.get_trials(deepcopy=False)[: trial.number]
    return sum(ORIGIN not in each.system_attrs for each in earlier)


def _was_queued(trial: FrozenTrial) -> bool:
    return SECONDS not in trial.system_attrs


def was_given_back(trial: FrozenTrial, sweep: Sweep) -> bool:
    """Return whether the trial was begun before and waits to be resumed by the next worker."""
    has_begun = trial.state == TrialState.WAITING and not _was_queued(trial)
    return has_begun and not is_paused(trial, sweep.pruner)


def note(study: Study, key: str, value: Any) -> None:
    """Set an attribute of the study, which every worker sees before its next trial."""
    optuna_adapter.set_study_attribute(study, key, value)


def why_over(study: Study) -> SweepOver | None:
    """Return why no more trials start; None if they do."""
    found = notes(study).get(OVER)
    return found and SweepOver.from_json(found)


def set_over(study: Study, over: SweepOver | None) -> None:
    note(study, OVER, None if over is None else over.to_json())


def notes(study: Study) -> dict[str, Any]:
    return optuna_adapter.study_attributes(study)
