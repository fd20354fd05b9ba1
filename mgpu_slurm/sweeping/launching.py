"""Starting a sweep from its file, or adding to one that exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import optuna

from mgpu_slurm import config as configs
from mgpu_slurm import paths, records, states
from mgpu_slurm.errors import UserError
from mgpu_slurm.launch import plan, registry, runs
from mgpu_slurm.launch import submit as submitting
from mgpu_slurm.launch.changing import NO_CHANGE, Change
from mgpu_slurm.launch.plan import Plan, Request
from mgpu_slurm.paths import RunFolder
from mgpu_slurm.patience import Note, quiet
from mgpu_slurm.sbatch import MayBeQueued
from mgpu_slurm.spec import Resources, Spec, read_spec, resources_from
from mgpu_slurm.sweeping import earlier, hparams, recovery, space_function, summary
from mgpu_slurm.sweeping import file as files
from mgpu_slurm.sweeping import space as spaces
from mgpu_slurm.sweeping import study as studies
from mgpu_slurm.sweeping.file import Sweep
from mgpu_slurm.sweeping.locks import locked
from mgpu_slurm.sweeping.space import Space, Values
from mgpu_slurm.wording import counted, program

_PROGRESS_KEYS = ("epochs", "max_epochs", "num_epochs", "n_epochs")
"""What jobs call the number of their epochs, which is the progress that most of them report."""


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


def sweep(
    file: str | Path | Mapping[str, Any],
    *,
    executor: str = "auto",
    cluster: str | None = None,
    around: str | None = None,
    **changes: Any,
) -> runs.Study:
    """Starts the study that a sweep file says, or adds to it what the file has more, and returns at once.

    Args:
        file: the path of a sweep file, or its values; `job` may then be a function, also one of a notebook. One that
            exists keeps the code that it began with.
        executor: `auto` (SLURM where there is an sbatch, else local), `slurm`, `allocation` or `local`.
        around: an earlier study: a grid around its best trials is searched.
        changes: values in place of the file's: `trials=100, budget={"hours": 4}`.

    Raises:
        UserError: something in the file is wrong, or does not fit the study that there is; nothing has changed.
        ClusterError: the cluster refused or did not answer.
    """
    given, source = (dict(file), "the sweep") if isinstance(file, Mapping) else (files.read(Path(file)), str(file))
    values = configs.merge(given, changes)
    function = values.get("job") if callable(values.get("job")) else None
    if function is not None:
        values["job"] = plan.function_target(function).label
    options = Options(executor, cluster, around=around, function=function)
    return runs.Study(start(configs.to_plain(values), source, options).folder)


def start(values: dict[str, Any], source: str, options: Options = DEFAULT, note: Note = quiet) -> Started:
    """Starts the sweep that a file says, or makes one that exists so: more trials, more workers, another budget.

    Args:
        values: of the file.
        source: names the file in errors.
        note: hears that a cluster which does not answer is waited for.

    Raises:
        UserError: something in the file is wrong, or does not fit the study that there is; nothing has changed.
        ClusterError: the cluster refused or did not answer.
    """
    if options.around is not None:
        values = earlier.around(values, options.around)
    sweep = files.parse(values, source)
    folder = RunFolder(paths.runs_root() / sweep.study)
    if folder.path.exists():
        return _extend(folder, sweep, values, options, note)
    return _create(sweep, values, options, note)


# -- a new one


def _create(sweep: Sweep, values: dict[str, Any], options: Options, note: Note) -> Started:
    request = _request(sweep, values, options)
    made_there: list[optuna.Study] = []

    def add(made: Plan, staging: RunFolder) -> None:
        _check_resource(sweep, sweep.fixed | made.whole_config)
        _check_budget(sweep, made.spec)
        if sweep.sampler.name in files.SAMPLERS:
            # a class of one's own may be nowhere but in the run's code
            studies.sampler_of(sweep.sampler, worker=0)
        known = [] if sweep.warm_start is None else earlier.known_trials(sweep, sweep.warm_start)
        paths.write_whole(staging.sweep, configs.dump_yaml(values))
        if isinstance(sweep.space, str):
            space_function.try_out(staging)
        if options.dry_run:
            return
        staging.trials.mkdir()
        study = studies.create(sweep, staging.journal)
        made_there.append(study)
        earlier.add(study, known)
        hparams.write_experiment(staging, sweep)
        paths.write_json(staging.summary, summary.summarize(study, sweep))

    if options.dry_run:
        made = submitting.rehearse(request, note, add)
        return Started(made.folder, made.spec.executor, None, _planned(made, sweep) + _rehearsed(made))
    try:
        submission = submitting.submit(request, note, add)
    except BaseException:
        if made_there and not (paths.runs_root() / sweep.study).exists():
            # what lies in a database does not go with the folder
            studies.delete(made_there[0])
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
        workers=sweep.workers,
        probes=() if is_command or isinstance(sweep.space, str) else tuple(map(spaces.nested, sweep.space.probes())),
        dry_run=options.dry_run,
    )


def _flags(values: dict[str, Any]) -> dict[str, Any]:
    """A file's resources by sbatch's long names."""
    return {str(name).replace("_", "-"): value for name, value in (values.get("resources") or {}).items()}


def _check_resource(sweep: Sweep, config: dict[str, Any]) -> None:
    """That a trial comes as far as its pruner believes, as far as what all trials share tells."""
    most = sweep.pruner.max_resource
    searched = {parameter.name for parameter in sweep.space.parameters} if isinstance(sweep.space, Space) else set()
    for key in _PROGRESS_KEYS:
        end = config.get(key)
        if key not in searched and isinstance(end, int) and most is not None and most > end:
            raise UserError(
                f"pruner: max_resource {most}: a trial ends at {end} (the job's {key}): lower it, or set"
                f" `fixed: {{{key}: {most}}}`"
            )


def _check_budget(sweep: Sweep, spec: Spec) -> None:
    if sweep.budget.gpu_hours is not None and not spec.resources.gpus_per_node:
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
        old = files.load(folder.sweep)
        _refuse_differences(old, sweep)
        study = studies.load(sweep, folder.journal, worker=0)
        if not options.dry_run:
            recovery.recover(study, folder, sweep, note)
        trials = summary.own_trials(study)
        added = _added(old, sweep, len(trials))
        found = registry.current([folder], note)
        is_alive = any(states.is_alive(state["state"]) for _, state in found)
        left = None if sweep.trials is None else summary.counts(trials, sweep)["WAITING"]
        spec = read_spec(folder)
        change = _change(spec, values)
        _check_budget(sweep, spec)
        _refuse_other_places(spec, options)
        if is_alive:
            _refuse_changes(old, sweep, change)
        starting = _starting(folder, sweep, found, left)
        lines = _standing(old, sweep, len(trials), found)
        if starting and is_alive and spec.executor != "slurm":
            lines.append("starts    no more workers before those at work have ended: they share what there is")
            starting = []
        elif starting:
            lines.append(f"starts    {counted(len(starting), 'worker')}")
        before = frozenset(trial.number for trial in trials if trial.state.is_finished())
        if options.dry_run:
            return Started(folder, spec.executor, None, [*lines, _NOTHING], is_alive, before)
        job_id = None
        with _written(folder, values):
            _add(folder, study, old, sweep, added)
            if starting:
                _make_room(folder, starting)
                job_id = submitting.restart(folder, starting, change, note)
        return Started(folder, spec.executor, job_id, lines, is_alive or bool(starting), before)


def _starting(folder: RunFolder, sweep: Sweep, found: Found, left: int | None) -> list[RunFolder]:
    """Workers to start, those that have ended first.

    Args:
        left: trials that wait; None for as many as the budget holds.
    """
    alive = sum(states.is_alive(state["state"]) for _, state in found)
    wanted = max(0, sweep.workers - alive)
    if left is not None:
        wanted = min(wanted, left)
    ended = [member for member, state in found if not states.is_alive(state["state"])]
    new = [folder.of_task(number) for number in range(len(found), len(found) + max(0, wanted - len(ended)))]
    return [*ended[:wanted], *new]


def _standing(old: Sweep, new: Sweep, trials: int, found: Found) -> list[str]:
    at_work = sum(states.is_alive(state["state"]) for _, state in found)
    lines = [f"study     {new.study}: {counted(trials, 'trial')} so far, {counted(at_work, 'worker')} at work"]
    if old.trials != new.trials:
        known = "as many as the budget holds" if new.trials is None else new.trials
        lines.append(f"trials    {known}; it was {old.trials}")
    return lines


@contextmanager
def _written(folder: RunFolder, values: dict[str, Any]) -> Iterator[None]:
    """The sweep's file with these values, which workers read when they start; an error takes that back."""
    before = folder.sweep.read_text()
    paths.write_whole(folder.sweep, configs.dump_yaml(values))
    try:
        yield
    except MayBeQueued:
        raise
    except BaseException:
        paths.write_whole(folder.sweep, before)
        raise


def _add(folder: RunFolder, study: optuna.Study, old: Sweep, sweep: Sweep, added: list[Values]) -> None:
    with locked(folder.trials_lock):
        # none begins meanwhile
        _added(old, sweep, studies.begun(study))
        studies.queue(study, added)
    if studies.notes(study).get(studies.OVER) is not None:
        # the first worker looks whether it still is
        studies.note(study, studies.OVER, None)
    paths.write_json(folder.summary, summary.summarize(study, sweep))


def _added(old: Sweep, new: Sweep, trials: int) -> list[Values]:
    """Known points that the study did not start with."""
    if new.enqueue[: len(old.enqueue)] != old.enqueue:
        raise UserError("enqueue: the points of before have to stay as they are: add others behind them")
    late = list(new.enqueue[len(old.enqueue) :])
    if new.trials is not None and trials + len(late) > new.trials:
        raise UserError(f"enqueue: {counted(len(late), 'point')} more: raise trials to {trials + len(late)}")
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
        told.append("resources")
    if told:
        raise UserError(
            f"{' and '.join(told)}: another one than that of the workers which are at work: `{program()} cancel"
            f" {new.study}` first, or take it back"
        )


def _change(spec: Spec, values: dict[str, Any]) -> Change:
    """What workers get that they did not have before."""
    given = _flags(values)
    asked = resources_from(given, "resources")
    names = [name for name in given if name != "sbatch"]
    changed = [name for name in names if _of(asked, name) != _of(spec.resources, name)]
    return Change(flags={name: given[name] for name in changed}) if changed else NO_CHANGE


def _of(resources: Resources, flag: str) -> Any:
    return getattr(resources, flag.replace("-", "_"))


def reopen(folder: RunFolder) -> None:
    """Lets a sweep that was given up go on: what was wrong may be mended."""
    sweep = files.load(folder.sweep)
    study = studies.load(sweep, folder.journal, worker=0)
    if (studies.notes(study).get(studies.OVER) or {}).get("failed"):
        studies.note(study, studies.OVER, None)


def forget(folder: RunFolder) -> None:
    """Deletes a study where it is kept in a database; one of its folder goes with that."""
    sweep = files.load(folder.sweep)
    if sweep.storage is not None:
        studies.delete(studies.load(sweep, folder.journal, worker=0))
