"""Start a sweep from its file, or extend an existing one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import optuna

from mgpu_slurm.core import files
from mgpu_slurm.core.errors import ClusterError, NoStudy, UserError
from mgpu_slurm.core.files import locked
from mgpu_slurm.core.formatting import counted
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.registry import cleanup, sweep_state
from mgpu_slurm.registry.sweep_state import confirmation_folder, is_confirmation
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.config import Config
from mgpu_slurm.request.spec import RestartPolicy, read_spec
from mgpu_slurm.run_folder import layout, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.sweep_records import SweepOver
from mgpu_slurm.slurm.sbatch import MayBeQueued
from mgpu_slurm.submission import submit as submitting
from mgpu_slurm.submission.plan import Plan, Request
from mgpu_slurm.submission.resume_overrides import Change, applied
from mgpu_slurm.sweeps import confirmation, hparams, optuna_adapter, start_lines, warm_start
from mgpu_slurm.sweeps.search import space as spaces
from mgpu_slurm.sweeps.search import space_function, sweep_file
from mgpu_slurm.sweeps.search.parameters import Values, kept
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import recovery, summary
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.sweep_checks import (
    change_of,
    check_budget,
    check_classes,
    check_resource,
    check_shares,
    refuse_changes,
    refuse_differences,
    refuse_other_places,
)
from mgpu_slurm.sweeps.worker_starts import make_room, settled, waiting_trials, workers_to_start

_NOTHING = "nothing was started (--dry-run)"

_NOT_OF_WORKERS = {
    "stuck_after": "set `stuck_after` in the sweep's file and run `sweep FILE`",
    "retries": "set `max_retries` in the sweep's file and run `sweep FILE`",
    "max_requeues": "workers are requeued until nothing is left to do: remove the option",
}
"""Options of a resume that do not apply to the workers of a sweep, with the reason."""

_DECIDE_THE_END = ("budget", "sampler", "pruner", "confirm", "workers", "trials_per_worker")


@dataclass(frozen=True)
class Options:
    """Options of a call in addition to the sweep file."""

    executor: str = "auto"
    cluster: str | None = None
    dry_run: bool = False
    around: str | None = None
    """An earlier study: search a grid around its best trials."""
    new_code: bool = False
    """Whether new workers of an existing sweep use the current code."""
    sinks: tuple[str, ...] = ()
    """Trackers of a new sweep."""
    function: Callable[..., Any] | None = None
    """The job function, which the sweep file's `job` only names."""


DEFAULT = Options()


@dataclass(frozen=True)
class Started:
    """The result of a call."""

    folder: RunFolder
    executor: str
    job_id: str | None
    """None if no worker was started."""
    lines: list[str]
    """Output for people."""
    is_alive: bool = True
    """Whether a worker is running, or will be."""
    ended: frozenset[int] = frozenset()
    """Trials that had ended before the call."""


def start(values: Config, changes: Config, source: str, options: Options = DEFAULT, note: Note = quiet) -> Started:
    """Start the sweep that a file describes, or extend an existing one: more trials, more workers, another budget.

    Args:
        values: the values of the file.
        changes: values that override those of the file.
        source: names the file in errors.
        note: called with a message when the call waits for a cluster that does not answer.

    Raises:
        UserError: the file is invalid, or does not fit the existing study; nothing has changed.
        ClusterError: the cluster refused or did not answer.
    """
    if options.around is not None:
        values = warm_start.around(values, options.around)
    values = sweep_file.laid_over(values, changes)
    sweep = sweep_file.parse(values, source)
    folder = RunFolder(layout.runs_root() / sweep.study)
    if folder.path.exists():
        return _extend(folder, sweep, values, options, note)
    return _create(sweep, values, options, note)


# -- a new one


def _create(sweep: Sweep, values: Config, options: Options, note: Note) -> Started:
    request = _request(sweep, options)
    made_there: list[optuna.Study] = []

    def add(made: Plan, staging: RunFolder) -> None:
        check_resource(sweep, made.whole_config)
        confirmation.check(made.folder, sweep)
        check_budget(sweep, made.spec.resources.gpus_per_node)
        check_shares(sweep, made.spec.resources)
        check_classes(sweep)
        known = [] if sweep.warm_start is None else warm_start.known_trials(sweep, sweep.warm_start)
        files.write_whole(staging.sweep, configs.dump_yaml(values))
        if isinstance(sweep.space, str):
            space_function.try_out(staging)
        if options.dry_run:
            return
        staging.trials.mkdir()
        study = studies.create(sweep, staging.journal, known)
        made_there.append(study)
        hparams.write_experiment(staging, sweep)
        summary.write(staging, study, sweep)

    if options.dry_run:
        with _naming_seeds(sweep):
            made = submitting.rehearse(request, note, add)
        script = ["", made.script.rstrip()] if made.spec.is_queued else []
        return _started(made, sweep, None, [_NOTHING, *script])
    try:
        with _naming_seeds(sweep):
            submission = submitting.submit(request, note, add)
    except BaseException:
        if made_there and not (layout.runs_root() / sweep.study).exists():
            # a study in a database is not deleted with the folder
            optuna_adapter.delete_study(made_there[0])
        raise
    return _started(submission.plan, sweep, submission.job_id)


@contextmanager
def _naming_seeds(sweep: Sweep) -> Iterator[None]:
    """Say in the error about a job without `seed` what in the file needs it."""
    try:
        yield
    except UserError as error:
        if not (sweep.sets_seeds and "unknown key 'seed'" in str(error)):
            raise
        key = "seeds" if sweep.seeds > 1 else "confirm"
        raise UserError(f"{key}: the job's config has no `seed`: add `seed: int = 0` to it") from None


def _request(sweep: Sweep, options: Options) -> Request:
    return Request(
        target=options.function or sweep.job,
        command=sweep.command,
        values={} if sweep.command else spaces.nested(sweep.fixed),
        flags=sweep.flags,
        executor=options.executor,
        cluster=options.cluster,
        name=sweep.study,
        restart=RestartPolicy(stuck_after=sweep.stuck_after),
        parallelism=sweep.parallelism,
        stage=sweep.stage,
        container=sweep.container,
        mounts=sweep.mounts,
        sinks=options.sinks,
        workers=sweep.workers_for(sweep.most_at_once),
        probes=_probes(sweep),
        dry_run=options.dry_run,
    )


def _probes(sweep: Sweep) -> tuple[Config, ...]:
    """Return values of trials that the job's config must accept; those of a space function are tried elsewhere."""
    if sweep.command or isinstance(sweep.space, str):
        return ()
    seed: Values = {"seed": sweep.seed_values[0]} if sweep.sets_seeds else {}
    return tuple(spaces.nested(each | seed) for each in sweep.space.probes())


def _probed(change: Change, sweep: Sweep) -> Change:
    """Return the change with the values that the config of new code must accept."""
    return replace(change, probes=_probes(sweep)) if change.new_code else change


def _started(made: Plan, sweep: Sweep, job_id: str | None, more: Sequence[str] = ()) -> Started:
    *first, folder = made.lines()
    return Started(made.folder, made.spec.executor, job_id, [*first, *sweep.lines(), folder, *more])


# -- an existing one


def _extend(folder: RunFolder, sweep: Sweep, values: Config, options: Options, note: Note) -> Started:
    confirmation.refuse_as_sweep(folder)
    if not folder.sweep.exists():
        raise UserError(f"study {sweep.study!r}: {str(folder.path)!r} is a run, not a sweep: choose another name")
    with locked(folder.sweep_lock):
        old = sweep_file.load(folder.sweep)
        refuse_differences(old, sweep)
        confirmation.check(folder, sweep)
        check_classes(sweep)
        study = studies.load(sweep, folder.journal)
        if not options.dry_run:
            recovery.recover(study, folder, sweep, note)
        trials = summary.own_trials(study)
        _late_points(sweep, study)
        found = settled(folder, note)
        is_alive = any(states.is_alive(state.state) for _, state in found)
        spec = read_spec(folder)
        change = _probed(replace(change_of(spec, old, sweep), new_code=options.new_code), sweep)
        gpus = (sweep if "gpus-per-node" in change.given else spec).resources.gpus_per_node
        check_budget(sweep, gpus)
        check_shares(sweep, replace(spec.resources, gpus_per_node=gpus))
        refuse_other_places(spec, options.executor, options.cluster, options.sinks)
        if is_alive:
            refuse_changes(old, sweep, change)
        over = studies.why_over(study)
        # with other settings, some of the budget may be left: the first worker checks that
        spent = over if all(getattr(old, name) == getattr(sweep, name) for name in _DECIDE_THE_END) else None
        left = _left(study, sweep, spent)
        starting = workers_to_start(folder, sweep, found, _and_to_confirm(left, folder, sweep, study))
        is_full = is_alive and not spec.is_queued
        lines = start_lines.standing(old, sweep, change, len(trials), found)
        lines += start_lines.starts(len(starting), is_alive, is_full, spent, options.new_code)
        starting = [] if is_full else starting
        before = frozenset(trial.number for trial in trials if trial.state.is_finished())
        if options.dry_run:
            return Started(folder, spec.executor, None, [*lines, _NOTHING], is_alive, before)
        job_id = None

        def undo() -> None:
            if over is not None:
                studies.set_over(study, over)
            summary.write(folder, study, old)

        with _written(folder, values, undo):
            _add(folder, study, sweep, stays_over=spent is not None and not spent.failed)
            if starting:
                make_room(folder, starting)
                job_id = submitting.restart(folder, starting, change, note)
            elif change and not is_alive:
                # for the workers of a later call, to which this file is the old one
                with applied(folder, change):
                    pass
        return Started(folder, spec.executor, job_id, lines, is_alive or bool(starting), before)


def resume(folder: RunFolder, change: Change, note: Note = quiet) -> str:
    """Start workers for the remaining trials, even if the sweep was abandoned, and return the id of their job.

    Raises:
        UserError: nothing is left to do, or running workers leave no room for others.
    """
    folder = sweep_state.confirmed_by(folder)
    if change.profile is not None:
        raise UserError("--profile: a sweep's trials are not recorded: submit the job as a run")
    for name in change.restart.given.keys() & _NOT_OF_WORKERS.keys():
        raise UserError(f"--{name.replace('_', '-')}: {_NOT_OF_WORKERS[name]}")
    for name in change.parallelism.given:
        raise UserError(f"--{name}: it is the same for all trials of a study: start another one (study=NAME)")
    with locked(folder.sweep_lock):
        sweep = sweep_file.load(folder.sweep)
        study = studies.load(sweep, folder.journal)
        recovery.recover(study, folder, sweep, note)
        found = settled(folder, note)
        alive = sum(states.is_alive(state.state) for _, state in found)
        if alive >= sweep.workers or (alive and not read_spec(folder).is_queued):
            raise UserError(
                f"study {sweep.study} is running with {counted(alive, 'worker')}: only workers that have ended can be"
                " resumed"
            )
        over = studies.why_over(study)
        if over is not None and over.failed:
            # the problem may be fixed
            studies.set_over(study, None)
        confirmation.allow_again(folder)
        left = _left(study, sweep, over)
        why = "" if over is None or over.failed else f" ({over.reason})"
        # a worker that was killed may have recorded an end in the study, but not in this file
        summary.write(folder, study, sweep)
        starting = workers_to_start(folder, sweep, found, _and_to_confirm(left, folder, sweep, study))
        if not starting:
            raise UserError(
                f"study {sweep.study}: no trial is left{why}: raise trials or budget in its file and run sweep again"
            )
        make_room(folder, starting)
        return submitting.restart(folder, starting, _probed(change, sweep), note)


def _left(study: optuna.Study, sweep: Sweep, over: SweepOver | None) -> int | None:
    """Return how many trials are waiting for workers; None for as many as the budget allows.

    Args:
        over: why the sweep is over; after a failure, whose cause may be fixed, all trials are left.
    """
    if over is None or over.failed:
        return waiting_trials(study, sweep, is_over=False)
    given_back = sum(studies.was_given_back(trial, sweep) for trial in summary.own_trials(study))
    return given_back + summary.promotable(study, sweep, is_over=True)


def _and_to_confirm(left: int | None, folder: RunFolder, sweep: Sweep, study: optuna.Study) -> int | None:
    """Return the number of waiting trials with those of the confirmation; None for as many as the budget allows."""
    return None if left is None else left + confirmation.left(folder, sweep, summary.own_trials(study))


@contextmanager
def _written(folder: RunFolder, values: Config, undo: Callable[[], None]) -> Iterator[None]:
    """Write these values to the sweep file, which workers read when they start; restore it after an error.

    Args:
        undo: reverts the other changes.
    """
    before = folder.sweep.read_text()
    files.write_whole(folder.sweep, configs.dump_yaml(values))
    try:
        yield
    except MayBeQueued:
        raise
    except BaseException:
        files.write_whole(folder.sweep, before)
        undo()
        raise


def _add(folder: RunFolder, study: optuna.Study, sweep: Sweep, stays_over: bool) -> None:
    with locked(folder.trials_lock):
        # no trial starts meanwhile
        studies.queue(study, _late_points(sweep, study))
    if studies.why_over(study) is not None and not stays_over:
        # the first worker checks whether it still is over
        studies.set_over(study, None)
    confirmation.allow_again(folder)
    summary.write(folder, study, sweep)


def _late_points(sweep: Sweep, study: optuna.Study) -> list[Values]:
    """Return the enqueued points that the study does not have yet.

    Raises:
        UserError: there is no room for them, or the study has different ones.
    """
    if sweep.sampler.name == "grid":
        return []
    there = studies.queued(study)
    if [kept(point) for point in sweep.enqueue[: len(there)]] != there:
        raise UserError(f"enqueue: the study's points {json.dumps(there)} must stay first: add new ones after them")
    late = list(sweep.enqueue[len(there) :])
    if late and sweep.pruner.name == "pbt":
        raise UserError(f"enqueue: {counted(len(late), 'more point')}: the population has begun: remove them")
    begun = studies.begun(study)
    if late and sweep.trials is not None and begun + len(late) > sweep.trials:
        raise UserError(f"enqueue: {counted(len(late), 'more point')}: raise trials to {begun + len(late)}")
    return late


def forget(folder: RunFolder) -> None:
    """Delete what a sweep has outside of its folder: its confirmation, and its study if a database keeps it.

    Raises:
        ClusterError: the database does not answer.
    """
    own = confirmation_folder(folder)
    if is_confirmation(own) and not is_confirmation(folder):
        forget(own)
        cleanup.delete(own)
    sweep = sweep_file.load(folder.sweep)
    if sweep.storage is None:
        return
    try:
        optuna_adapter.delete_study(studies.load(sweep, folder.journal))
    except NoStudy:
        # another process was faster, or was killed after deleting the study and before deleting the folder
        return
    except ClusterError as error:
        raise ClusterError(f"{error}; deleting {str(folder.path)!r} by hand leaves the study in the database") from None
