"""Checks of a sweep file against the job and against an existing sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import program
from mgpu_slurm.request.config import Config
from mgpu_slurm.request.resources import RESOURCE_FLAGS, Resources
from mgpu_slurm.request.spec import RestartPolicy, Spec
from mgpu_slurm.submission.resume_overrides import Change
from mgpu_slurm.sweeps.scheduling import construction
from mgpu_slurm.sweeps.search import space as spaces
from mgpu_slurm.sweeps.search import sweep_options
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.search.sweep_options import Pruner

_PROGRESS_KEYS = ("epochs", "max_epochs", "num_epochs", "n_epochs")
"""Usual config keys for the number of epochs, which is the progress that most jobs report."""


_TASKS = "ntasks-per-node"


def check_classes(sweep: Sweep) -> None:
    """Check that sampler and pruner accept their options; a user's class may exist only in the run's code."""
    if sweep.sampler.name in sweep_options.SAMPLERS or sweep.sampler.name.startswith("optuna."):
        construction.sampler_of(sweep.sampler, worker=0, objectives=len(sweep.objectives))
    if sweep.pruner.name in sweep_options.PRUNERS or sweep.pruner.name.startswith("optuna."):
        construction.scheduler_of(sweep.pruner, sweep.direction)


def check_resource(sweep: Sweep, config: Config) -> None:
    """Check that a trial can reach the pruner's max_resource, if the job's config sets its length, and is compared."""
    interval, most = sweep.pruner.interval, sweep.pruner.max_resource
    if interval is not None and most is not None and interval >= most:
        raise UserError(
            f"pruner: interval {interval}: members would never be compared: expected less than max_resource {most}"
        )
    if not isinstance(sweep.space, Space):
        # a space function may set the epochs too
        return
    searched = {parameter.name for parameter in sweep.space.parameters}
    for key, end in (sweep.fixed | config).items():
        if key in _PROGRESS_KEYS and key not in searched and isinstance(end, int) and most is not None and most > end:
            raise UserError(
                f"pruner: max_resource {most}: a trial ends at {end} (the job's {key}): lower it, or set"
                f" `fixed: {{{key}: {most}}}`"
            )


def check_budget(sweep: Sweep, gpus_per_node: int | None) -> None:
    """Check that the workers have GPUs if there is a budget of GPU-hours."""
    if sweep.budget.gpu_hours is not None and not gpus_per_node:
        raise UserError(f"budget: gpu_hours {sweep.budget.gpu_hours:g}: the workers have no GPU: set hours instead")


def check_shares(sweep: Sweep, resources: Resources) -> None:
    """Check that the resources of a worker can be divided among the trials that it trains at the same time."""
    count, gpus = sweep.trials_per_worker, resources.gpus_per_node or 1
    if count == 1:
        return
    if max(resources.nodes, sweep.resources.nodes) > 1:
        raise UserError(f"trials_per_worker {count}: they share one node: remove resources.nodes")
    if count % gpus:
        raise UserError(
            f"trials_per_worker {count}: {gpus} GPUs cannot be divided equally among {count} trials: choose a multiple"
            f" of {gpus}, or fewer GPUs for each of more workers"
        )


_SAME = (
    *("job", "command", "metric", "constraints", "fixed", "seeds", "storage", "warm_start", "stage", "container"),
    "mounts",
)


def refuse_differences(old: Sweep, new: Sweep) -> None:
    """Check that a new file keeps the study's trials comparable.

    Raises:
        UserError: the new file describes a different study.
    """
    told = []
    if isinstance(old.space, Space) and isinstance(new.space, Space):
        told += [f"space: {words}" for words in spaces.differences(old.space, new.space)]
    elif old.space != new.space:
        told.append("space: only one of them is a function")
    if (old.sampler.name == "grid") != (new.sampler.name == "grid"):
        told.append(f"sampler was {old.sampler.name} and is {new.sampler.name}")
    if old.pruner != new.pruner and (old.pruner.pauses or new.pruner.pauses) and _steps(old) != _steps(new):
        told.append(f"pruner was {old.pruner.words} and is {new.pruner.words}")
    for name in _SAME:
        before, now = _told(old, name), _told(new, name)
        if before != now:
            told.append(f"{name} was {before} and is {now}")
    if old.parallelism != new.parallelism:
        told.append(f"strategy was {old.parallelism.words} and is {new.parallelism.words}")
    if told:
        raise UserError(
            f"study {new.study!r} exists, and this file differs from it: {'; '.join(told)}:"
            " undo the change, or choose another name for the new study (study=NAME)"
        )


def _told(sweep: Sweep, name: str) -> object:
    if name == "metric":
        return "; ".join(map(str, sweep.objectives))
    return ", ".join(map(str, sweep.constraints)) or "none" if name == "constraints" else getattr(sweep, name)


def _steps(sweep: Sweep) -> Pruner:
    """Return what paused trials depend on: the rungs, and which trials are compared."""
    return replace(sweep.pruner, keep_gb=None)


def refuse_other_places(spec: Spec, executor: str, cluster: str | None, sinks: Sequence[str] = ()) -> None:
    """Check that the call names the executor and cluster of the study, if it names any, and no trackers."""
    if sinks:
        raise UserError(
            f"--sink {sinks[0]}: the study's trackers stay as they are: send its trials with"
            f" `{program()} export {spec.run} --to {sinks[0]}`"
        )
    if executor not in ("auto", spec.executor):
        raise UserError(f"--executor {executor}: the study runs on {spec.executor} and cannot move: remove the option")
    if cluster not in (None, spec.cluster):
        raise UserError(f"--cluster {cluster}: the study runs on {spec.cluster} and cannot move: remove the option")


def refuse_changes(old: Sweep, new: Sweep, change: Change) -> None:
    """Check that nothing changes which running workers would not adopt.

    Raises:
        UserError: the file changes such a setting.
    """
    settings = ("sampler", "pruner", "trials_per_worker", "stuck_after")
    told = [name for name in settings if getattr(old, name) != getattr(new, name)]
    # the number of trials of a worker changes its number of tasks
    implied = {_TASKS} if "trials_per_worker" in told else set()
    if change.given.keys() - implied or change.new_code:
        told.append("resources or code")
    if told:
        raise UserError(
            f"{' and '.join(told)}: no change is possible while workers are running: `{program()} cancel"
            f" {new.study}` first, or undo the change"
        )


def change_of(spec: Spec, old: Sweep, new: Sweep) -> Change:
    """Return what the file changes for new workers; what a resume has changed stays, unless the file changes it.

    Raises:
        UserError: the file no longer sets a resource that it set before, and its new value is unknown.
    """
    before, now = (
        {name: each.resources.value_of(name) for name in RESOURCE_FLAGS} | each.resources.sbatch for each in (old, new)
    )
    for name, value in before.items():
        is_implied = name == "ntasks_per_node" and old.trials_per_worker > 1
        if value is not None and now.get(name) is None and not is_implied:
            flag = name.replace("_", "-")
            raise UserError(f"resources: {flag} was {value} and is missing now: set resources.{flag}={value}")
    changed = [name for name in new.flags if new.resources.value_of(name) != old.resources.value_of(name)]
    stuck_after = None if new.stuck_after == old.stuck_after else new.stuck_after
    flags = {name: new.flags[name] for name in changed}
    if old.trials_per_worker > 1 == new.trials_per_worker and _TASKS not in new.flags:
        # as for a new sweep: one rank for each GPU
        flags[_TASKS] = new.resources.gpus_per_node or spec.resources.gpus_per_node or 1
    return Change(flags=flags, restart=RestartPolicy(stuck_after=stuck_after))
