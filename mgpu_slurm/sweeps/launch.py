"""Starting a sweep from its file, or adding to one that exists."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import optuna

from mgpu_slurm.core import files, layout, records, states
from mgpu_slurm.core.errors import ClusterError, NoStudy, UserError
from mgpu_slurm.core.formatting import counted, program
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.registry import current_state
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.spec import RESOURCE_FLAGS, Resources, Spec, read_spec, resources_from
from mgpu_slurm.slurm.sbatch import MayBeQueued
from mgpu_slurm.submission import submit as submitting
from mgpu_slurm.submission.plan import Plan, Request
from mgpu_slurm.submission.resume_overrides import Change
from mgpu_slurm.sweeps import hparams, optuna_adapter
from mgpu_slurm.sweeps.scheduling import construction
from mgpu_slurm.sweeps.search import space as spaces
from mgpu_slurm.sweeps.search import space_function, sweep_file, sweep_options
from mgpu_slurm.sweeps.search.parameters import Values
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep_file import Sweep
from mgpu_slurm.sweeps.study import recovery, summary, warm_start
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.file_locks import locked

_PROGRESS_KEYS = ("epochs", "max_epochs", "num_epochs", "n_epochs")
"""What jobs call the number of their epochs, which is the progress that most of them report."""


LEAVING_SECONDS = 60.0
"""For so long workers are waited for that have said that they leave."""

_NOTHING = "nothing was started (--dry-run)"

Found: TypeAlias = Sequence[tuple[RunFolder, dict[str, Any]]]
"""Workers and how they stand."""


@dataclass(frozen=True)
class Options:
    """What a call says beside the sweep file."""

    executor: str = "auto"
    cluster: str | None = None
    dry_run: bool = False
    around: str | None = None
    """An earlier study, around whose best trials a grid is searched."""
    new_code: bool = False
    """Whether workers that are started for a sweep that exists take the project's code as it is now."""
    function: Callable[..., Any] | None = None
    """The job function itself, which the sweep file's `job` only names."""


DEFAULT = Options()


@dataclass(frozen=True)
class Started:
    """What has become of a call."""

    folder: RunFolder
    executor: str
    job_id: str | None
    """None where no worker was started."""
    lines: list[str]
    """For people."""
    is_alive: bool = True
    """Whether a worker is at work, or will be."""
    ended: frozenset[int] = frozenset()
    """Trials that had come to their end before."""


def start(
    values: dict[str, Any], changes: dict[str, Any], source: str, options: Options = DEFAULT, note: Note = quiet
) -> Started:
    """Starts the sweep that a file says, or makes one that exists so: more trials, more workers, another budget.

    Args:
        values: of the file.
        changes: laid over these.
        source: names the file in errors.
        note: hears that a cluster which does not answer is waited for.

    Raises:
        UserError: something in the file is wrong, or does not fit the study that there is; nothing has changed.
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


def _create(sweep: Sweep, values: dict[str, Any], options: Options, note: Note) -> Started:
    request = _request(sweep, values, options)
    made_there: list[optuna.Study] = []

    def add(made: Plan, staging: RunFolder) -> None:
        _check_resource(sweep, made.whole_config)
        _check_budget(sweep, made.spec.resources.gpus_per_node)
        _check_classes(sweep)
        known = [] if sweep.warm_start is None else warm_start.known_trials(sweep, sweep.warm_start)
        files.write_whole(staging.sweep, configs.dump_yaml(values))
        if isinstance(sweep.space, str):
            space_function.try_out(staging)
        if options.dry_run:
            return
        staging.trials.mkdir()
        study = studies.create(sweep, staging.journal)
        made_there.append(study)
        warm_start.add(study, known)
        hparams.write_experiment(staging, sweep)
        summary.write(staging, study, sweep)

    if options.dry_run:
        made = submitting.rehearse(request, note, add)
        return Started(made.folder, made.spec.executor, None, _planned(made, sweep) + _rehearsed(made))
    try:
        submission = submitting.submit(request, note, add)
    except BaseException:
        if made_there and not (layout.runs_root() / sweep.study).exists():
            # what lies in a database does not go with the folder
            optuna_adapter.delete_study(made_there[0])
        raise
    made = submission.plan
    return Started(made.folder, made.spec.executor, submission.job_id, _planned(made, sweep))


def _request(sweep: Sweep, values: dict[str, Any], options: Options) -> Request:
    is_command = bool(sweep.command)
    return Request(
        target=options.function or sweep.job,
        command=sweep.command,
        values={} if is_command else spaces.nested(sweep.fixed),
        flags=_flags(values),
        executor=options.executor,
        cluster=options.cluster,
        name=sweep.study,
        stuck_after=sweep.stuck_after,
        workers=sweep.workers if sweep.trials is None else min(sweep.workers, sweep.trials),
        probes=_probes(sweep),
        dry_run=options.dry_run,
    )


def _probes(sweep: Sweep) -> tuple[dict[str, Any], ...]:
    """Values of trials that the job's config has to take; a function's are tried out otherwise."""
    if sweep.command or isinstance(sweep.space, str):
        return ()
    return tuple(map(spaces.nested, sweep.space.probes()))


def _probed(change: Change, sweep: Sweep) -> Change:
    """With what a new code's config has to take."""
    return replace(change, probes=_probes(sweep)) if change.new_code else change


def _flags(values: dict[str, Any]) -> dict[str, Any]:
    """A file's resources by sbatch's long names."""
    return {str(name).replace("_", "-"): value for name, value in (values.get("resources") or {}).items()}


def _check_classes(sweep: Sweep) -> None:
    """Check that sampler and pruner take their options; a class of one's own may be only in the run's code."""
    if sweep.sampler.name in sweep_options.SAMPLERS or sweep.sampler.name.startswith("optuna."):
        construction.sampler_of(sweep.sampler, worker=0)
    if sweep.pruner.name in sweep_options.PRUNERS or sweep.pruner.name.startswith("optuna."):
        construction.pruner_of(sweep.pruner)


def _check_resource(sweep: Sweep, config: dict[str, Any]) -> None:
    """That a trial comes as far as its pruner believes, as far as the job's config tells."""
    if not isinstance(sweep.space, Space):
        # which may give the epochs too
        return
    most = sweep.pruner.max_resource
    searched = {parameter.name for parameter in sweep.space.parameters}
    for key, end in (sweep.fixed | config).items():
        if key in _PROGRESS_KEYS and key not in searched and isinstance(end, int) and most is not None and most > end:
            raise UserError(
                f"pruner: max_resource {most}: a trial ends at {end} (the job's {key}): lower it, or set"
                f" `fixed: {{{key}: {most}}}`"
            )


def _check_budget(sweep: Sweep, gpus_per_node: int | None) -> None:
    if sweep.budget.gpu_hours is not None and not gpus_per_node:
        raise UserError(
            f"budget: gpu_hours {sweep.budget.gpu_hours:g}: the workers have no GPU, and never use one up: give hours"
        )


def _planned(made: Plan, sweep: Sweep) -> list[str]:
    *first, folder = made.lines()
    return [*first, *sweep.lines(), folder]


def _rehearsed(made: Plan) -> list[str]:
    return [_NOTHING, *(["", made.script.rstrip()] if made.spec.executor == "slurm" else [])]


# -- one that exists


def _extend(folder: RunFolder, sweep: Sweep, values: dict[str, Any], options: Options, note: Note) -> Started:
    if not folder.sweep.exists():
        raise UserError(f"study {sweep.study!r}: {str(folder.path)!r} is a run, and no sweep: call the study otherwise")
    with locked(folder.sweep_lock):
        old = sweep_file.load(folder.sweep)
        _refuse_differences(old, sweep)
        _check_classes(sweep)
        study = studies.load(sweep, folder.journal)
        if not options.dry_run:
            recovery.recover(study, folder, sweep, note)
        trials = summary.own_trials(study)
        _late_points(sweep, study)
        found = _settled(folder, note)
        is_alive = any(states.is_alive(state["state"]) for _, state in found)
        spec = read_spec(folder)
        change = _probed(replace(_change(spec, old, sweep, values), new_code=options.new_code), sweep)
        _check_budget(sweep, change.given.get("gpus-per-node", spec.resources.gpus_per_node))
        _refuse_other_places(spec, options)
        if is_alive:
            _refuse_changes(old, sweep, change)
        starting = _starting(folder, sweep, found, _waiting(study, sweep))
        is_full = is_alive and spec.executor != "slurm"
        lines = _standing(old, sweep, len(trials), found) + _starts(len(starting), is_alive, is_full, options)
        starting = [] if is_full else starting
        before = frozenset(trial.number for trial in trials if trial.state.is_finished())
        if options.dry_run:
            return Started(folder, spec.executor, None, [*lines, _NOTHING], is_alive, before)
        job_id = None
        over = studies.notes(study).get(studies.OVER)

        def undo() -> None:
            if over is not None:
                studies.note(study, studies.OVER, over)
            summary.write(folder, study, old)

        with _written(folder, values, undo):
            _add(folder, study, sweep)
            if starting:
                _make_room(folder, starting)
                job_id = submitting.restart(folder, starting, change, note)
        return Started(folder, spec.executor, job_id, lines, is_alive or bool(starting), before)


def resume(folder: RunFolder, change: Change, note: Note = quiet) -> str:
    """Starts workers for the trials that are left, also where the sweep was given up; the id of their job.

    Raises:
        UserError: nothing is left to do, or workers are at work that leave no room for others.
    """
    for name in change.again.given:
        raise UserError(f"--{name.replace('_', '-')}: of a sweep its file says it: change that, and call `sweep FILE`")
    with locked(folder.sweep_lock):
        sweep = sweep_file.load(folder.sweep)
        study = studies.load(sweep, folder.journal)
        recovery.recover(study, folder, sweep, note)
        found = _settled(folder, note)
        alive = sum(states.is_alive(state["state"]) for _, state in found)
        if alive >= sweep.workers or (alive and read_spec(folder).executor != "slurm"):
            raise UserError(
                f"study {sweep.study} is at work with {counted(alive, 'worker')}: only what has ended can be resumed"
            )
        over = studies.notes(study).get(studies.OVER)
        left, why = _waiting(study, sweep), ""
        if over is not None and over["failed"]:
            # what was wrong may be mended
            studies.note(study, studies.OVER, None)
        elif over is not None:
            left, why = sum(map(studies.was_given_back, summary.own_trials(study))), f" ({over['reason']})"
        # who was killed may have told the study of an end, and not this file
        summary.write(folder, study, sweep)
        starting = _starting(folder, sweep, found, left)
        if not starting:
            raise UserError(
                f"study {sweep.study}: no trial is left{why}: raise trials or budget in its file, and call sweep again"
            )
        _make_room(folder, starting)
        return submitting.restart(folder, starting, _probed(change, sweep), note)


def _settled(folder: RunFolder, note: Note) -> Found:
    """The workers, once those have ended that have said that they leave: they take no trial any more."""
    give_up = time.monotonic() + LEAVING_SECONDS
    while True:
        found = current_state.current([folder], note)
        leaving = [
            state for _, state in found if state.get("leaving") == state["attempts"] and states.is_alive(state["state"])
        ]
        if not leaving or time.monotonic() > give_up:
            return found
        time.sleep(0.2)


def _waiting(study: optuna.Study, sweep: Sweep) -> int | None:
    """How many trials wait for a worker; None for as many as the budget holds."""
    return None if sweep.trials is None else summary.counts(summary.own_trials(study), sweep)["WAITING"]


def _starting(folder: RunFolder, sweep: Sweep, found: Found, left: int | None) -> list[RunFolder]:
    """Workers to start, those that have ended first, and of these who did not complete.

    Args:
        left: trials that wait; None for as many as the budget holds.
    """
    alive = sum(states.is_alive(state["state"]) for _, state in found)
    wanted = max(0, sweep.workers - alive)
    if left is not None:
        wanted = min(wanted, left)
    ended = [(member, state["state"]) for member, state in found if not states.is_alive(state["state"])]
    # sorting keeps their order
    ended.sort(key=lambda each: each[1] == states.COMPLETED)
    new = [folder.of_task(number) for number in range(len(found), len(found) + max(0, wanted - len(ended)))]
    return [*(member for member, _ in ended[:wanted]), *new]


def _standing(old: Sweep, new: Sweep, trials: int, found: Found) -> list[str]:
    at_work = sum(states.is_alive(state["state"]) for _, state in found)
    lines = [f"study     {new.study}: {counted(trials, 'trial')} so far, {counted(at_work, 'worker')} at work"]
    if old.trials != new.trials:
        known = "as many as the budget holds" if new.trials is None else new.trials
        lines.append(f"trials    {known}; it was {old.trials}")
    for name in ("workers", "sampler", "pruner"):
        before, now = getattr(old, name), getattr(new, name)
        if before != now:
            lines.append(f"{name:<9} {getattr(now, 'words', now)}; it was {getattr(before, 'words', before)}")
    return lines


def _starts(workers: int, is_alive: bool, is_full: bool, options: Options) -> list[str]:
    """
    Args:
        workers: that the file has more.
        is_full: whether they have to wait for those at work.
    """
    if not workers:
        return [] if is_alive else ["starts    no worker: no trial is left"]
    if is_full:
        return ["starts    no more workers before those at work have ended: they share what there is"]
    code = "as it is now" if options.new_code else "that of the study (--code new: as it is now)"
    return [f"starts    {counted(workers, 'worker')}", f"code      {code}"]


@contextmanager
def _written(folder: RunFolder, values: dict[str, Any], undo: Callable[[], None]) -> Iterator[None]:
    """The sweep's file with these values, which workers read when they start; an error takes that back.

    Args:
        undo: takes back what else was done.
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


def _add(folder: RunFolder, study: optuna.Study, sweep: Sweep) -> None:
    with locked(folder.trials_lock):
        # none begins meanwhile
        studies.queue(study, _late_points(sweep, study))
    if studies.notes(study).get(studies.OVER) is not None:
        # the first worker looks whether it still is
        studies.note(study, studies.OVER, None)
    summary.write(folder, study, sweep)


def _late_points(sweep: Sweep, study: optuna.Study) -> list[Values]:
    """Known points that the study does not have yet.

    Raises:
        UserError: there is no room for them, or the study has others.
    """
    if sweep.sampler.name == "grid":
        return []
    there = studies.queued(study)
    if [studies.kept(point) for point in sweep.enqueue[: len(there)]] != there:
        raise UserError(
            f"enqueue: the points of before have to stay as they are, {json.dumps(there)}: add others behind them"
        )
    late = list(sweep.enqueue[len(there) :])
    begun = studies.begun(study)
    if late and sweep.trials is not None and begun + len(late) > sweep.trials:
        raise UserError(f"enqueue: {counted(len(late), 'point')} more: raise trials to {begun + len(late)}")
    return late


def _refuse_differences(old: Sweep, new: Sweep) -> None:
    """Trials of one study have to compare.

    Raises:
        UserError: the new file says something that makes them another study's.
    """
    told = []
    if isinstance(old.space, Space) and isinstance(new.space, Space):
        told += [f"space: {words}" for words in spaces.differences(old.space, new.space)]
    elif old.space != new.space:
        told.append("space: one is a function")
    if (old.sampler.name == "grid") != (new.sampler.name == "grid"):
        told.append(f"sampler was {old.sampler.name} and is {new.sampler.name}")
    for name in ("job", "command", "metric", "direction", "fixed", "storage", "warm_start"):
        before, now = getattr(old, name), getattr(new, name)
        if before != now:
            told.append(f"{name} was {before} and is {now}")
    if told:
        raise UserError(
            f"study {new.study!r} exists, and this file says something else: {'; '.join(told)}:"
            " take that back, or call the new one otherwise (study=NAME)"
        )


def _make_room(folder: RunFolder, starting: Sequence[RunFolder]) -> None:
    """Lets the sweep have more workers; as long as nobody starts them, they count as cancelled."""
    spec = read_spec(folder)
    assert spec.tasks is not None
    tasks = max(spec.tasks, 1 + max(member.task or 0 for member in starting))
    for task in range(spec.tasks, tasks):
        records.cancel_unstarted(folder.of_task(task), "not started")
    replace(spec, tasks=tasks, at_once=None if spec.at_once is None else tasks).write(folder)
    records.update_state(folder, tasks=tasks)


def _refuse_other_places(spec: Spec, options: Options) -> None:
    if options.executor not in ("auto", spec.executor):
        raise UserError(f"--executor {options.executor}: the study runs on {spec.executor}, and goes on there")
    if options.cluster not in (None, spec.cluster):
        raise UserError(f"--cluster {options.cluster}: the study runs on {spec.cluster}, and goes on there")


def _refuse_changes(old: Sweep, new: Sweep, change: Change) -> None:
    """What workers that are at work would not follow.

    Raises:
        UserError: the file says something else of it.
    """
    told = [name for name in ("sampler", "pruner") if getattr(old, name) != getattr(new, name)]
    if change:
        told.append("resources or code")
    if told:
        raise UserError(
            f"{' and '.join(told)}: another one than that of the workers which are at work: `{program()} cancel"
            f" {new.study}` first, or take it back"
        )


def _change(spec: Spec, old: Sweep, new: Sweep, values: dict[str, Any]) -> Change:
    """What workers get that they did not have before.

    Raises:
        UserError: the file does not say any more what it said before, and nobody knows what is to be instead.
    """
    before, now = (
        {name: _of(each.resources, name) for name in RESOURCE_FLAGS} | each.resources.sbatch for each in (old, new)
    )
    for name, value in before.items():
        if value is not None and now.get(name) is None:
            flag = name.replace("_", "-")
            raise UserError(
                f"resources: {flag} was {value}, and now nothing is said of it: say resources.{flag}={value}"
            )
    given = _flags(values)
    asked = resources_from(given, "resources")
    changed = [name for name in given if _of(asked, name) != _of(spec.resources, name)]
    if "sbatch" in changed and not set(asked.sbatch.items()) - set(spec.resources.sbatch.items()):
        # the cluster's file has given more
        changed.remove("sbatch")
    return Change(flags={name: given[name] for name in changed})


def _of(resources: Resources, flag: str) -> Any:
    return getattr(resources, flag.replace("-", "_"))


def forget(folder: RunFolder) -> None:
    """Deletes a study where it is kept in a database; one of its folder goes with that.

    Raises:
        ClusterError: the database does not answer.
    """
    sweep = sweep_file.load(folder.sweep)
    if sweep.storage is None:
        return
    try:
        optuna_adapter.delete_study(studies.load(sweep, folder.journal))
    except NoStudy:
        # somebody was faster, or was killed between that and its folder
        return
    except ClusterError as error:
        raise ClusterError(f"{error}; deleting {str(folder.path)!r} by hand leaves the study there") from None
