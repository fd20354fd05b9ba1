"""Start runs and sweeps from Python, and find those that there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, overload

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.handles import Group as Group
from mgpu_slurm.handles import Handle as Handle
from mgpu_slurm.handles import Study as Study
from mgpu_slurm.registry import lookup, sweep_state
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.parallelism import Parallelism, Precision, Strategy
from mgpu_slurm.request.spec import RestartPolicy
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.submission import plan
from mgpu_slurm.submission import submit as submitting
from mgpu_slurm.submission.plan import Request

Target: TypeAlias = str | Callable[..., Any] | Sequence[str] | None


@overload
def submit(target: Target = ..., config: Any = ..., *, seeds: None = ..., **options: Any) -> Handle: ...


@overload
def submit(target: Target = ..., config: Any = ..., *, seeds: int | str, **options: Any) -> Group: ...


def submit(
    target: Target = None,
    config: Any = None,
    *,
    executor: str = "auto",
    cluster: str | None = None,
    name: str | None = None,
    signal: str | None = None,
    max_requeues: int | None = None,
    retries: int | None = None,
    stuck_after: float | None = None,
    strategy: Strategy | None = None,
    shard: int | None = None,
    tensor: int | None = None,
    pipeline: int | None = None,
    precision: Precision | None = None,
    compile: bool | None = None,
    profile: str | None = None,
    stage: Sequence[str] = (),
    container: str | None = None,
    mounts: Sequence[str] = (),
    notify: str | None = None,
    sinks: Sequence[str] = (),
    seeds: int | str | None = None,
    after: Sequence[str] = (),
    after_any: Sequence[str] = (),
    **resources: Any,
) -> Handle | Group:
    """Submit a job function or a command, and return immediately.

    Args:
        target: a function `train(run, config)`, which may be defined in a notebook, or its import path, such as
            `jobs.digits:train`; or a command as a sequence of words.
        config: an instance of the function's dataclass, or a mapping of the values that differ from its defaults.
        executor: `auto` (SLURM if there is an sbatch, else local), `slurm`, `allocation` or `local`.
        retries: maximum consecutive restarts after any failure; by default 3, after failures of the cluster only.
        stuck_after: minutes without progress on a rank after which an attempt is stopped; 30 by default, 0 disables.
        strategy: how ranks share the model: `ddp` (the default), `zero2`, `fsdp`, `hsdp`, or `single` or `dp`.
        shard: number of ranks that hold one copy of a sharded model; by default all, with `hsdp` those of a node.
        tensor: number of ranks that compute each layer together, as in `run.wrap(plan=...)`.
        pipeline: number of stages that hold consecutive layers, as in `run.pipeline`.
        precision: the precision in which models compute: `fp32` (the default), `tf32`, `bf16`, `fp16` or `fp8`.
        compile: compile models by `torch.compile`.
        profile: steps to record with torch's profiler, such as `10-13`, and the ranks, as in `10-13@0,8`.
        stage: data sets to copy to the disk of each node before the ranks start, for `mgpu_slurm.staged`.
        container: the image that ranks run in; by default as in `mgpu.yaml`, `none` for none.
        mounts: folders that it sees besides the project and the runs, as `SOURCE[:TARGET][:ro]`.
        notify: a web hook, which gets a JSON POST when the run has ended.
        sinks: trackers to which reports are sent, `mlflow[=URI]` and `wandb[=PROJECT]`; by default as in `mgpu.yaml`.
        seeds: number of runs, one per seed; `"100%10"` runs at most 10 at a time. A `Group` is then returned.
        after: names of runs that must complete first.
        after_any: names of runs that must end first, whatever their outcome.
        resources: sbatch's long options with underscores: `nodes=2, gpus_per_node=4, time="1:00:00"`.

    Raises:
        UserError: an argument is invalid; nothing was started.
        ClusterError: the cluster refused or did not answer; nothing was started.
    """
    values = configs.to_plain(config) if config is not None else {}
    if not isinstance(values, dict):
        raise UserError(f"config: expected a dataclass or a mapping, got {type(config).__name__}")
    words = tuple(target) if isinstance(target, Sequence) and not isinstance(target, str) else ()
    request = Request(
        target=None if words or isinstance(target, (list, tuple)) else target,  # type: ignore[arg-type]
        command=words,
        values=values,
        flags=resources,
        executor=executor,
        cluster=cluster,
        name=name,
        restart=RestartPolicy(signal, max_requeues, retries, stuck_after),
        parallelism=Parallelism(strategy, shard, tensor, pipeline, precision, compile),
        profile=profile,
        stage=tuple(stage),
        container=container,
        mounts=tuple(mounts),
        notify=notify,
        sinks=tuple(sinks),
        seeds=None if seeds is None else str(seeds),
        after=tuple(after),
        after_any=tuple(after_any),
    )
    return _seen(submitting.submit(request).plan.folder)


def sweep(
    file: str | Path | Mapping[str, Any],
    *,
    executor: str = "auto",
    cluster: str | None = None,
    around: str | None = None,
    sinks: Sequence[str] = (),
    **changes: Any,
) -> Study:
    """Start the study that a sweep file describes, or extend it by what the file adds, and return immediately.

    Args:
        file: the path of a sweep file, or its values; `job` may then be a function, also one defined in a notebook. An
            existing study keeps the code it was started with.
        executor: as in `submit`.
        around: name of an earlier study; search a grid around its best trials.
        sinks: trackers of a new study, as in `submit`.
        changes: override the file's values; mappings are merged key by key: `trials=100, budget={"hours": 4}`.

    Raises:
        UserError: the file is invalid, or does not fit the existing study; nothing has changed.
        ClusterError: the cluster refused or did not answer.
    """
    from mgpu_slurm.sweeps import launch
    from mgpu_slurm.sweeps.search import sweep_file

    values = dict(file) if isinstance(file, Mapping) else configs.read_yaml(Path(file))
    source = "the sweep" if isinstance(file, Mapping) else str(file)
    function = None
    for given in (values, changes):
        job = given.get("job")
        if callable(job):
            function, given["job"] = job, plan.function_target(job).label
    options = launch.Options(executor, cluster, around=around, sinks=tuple(sinks), function=function)
    plain, laid_over = sweep_file.plain(values, source), sweep_file.plain(changes, source)
    return Study(launch.start(plain, laid_over, source, options).folder)


def _seen(folder: RunFolder) -> Handle | Group:
    if sweep_state.is_sweep(folder):
        return Study(folder)
    return Group(folder) if lookup.is_group(folder) else Handle(folder)


def runs() -> list[Handle]:
    """Return all runs of this user, newest first; the runs of groups are listed one by one."""
    return [Handle(folder) for folder, _ in lookup.all_states()]


def submitted() -> list[Handle | Group]:
    """Return all runs and groups of this user, newest first."""
    return [_seen(folder) for folder in lookup.all_groups()]


def find(name: str) -> Handle | Group:
    """Return the run, group or sweep with this name, prefix or job id; `<group>/<index>` is one run of a group.

    Raises:
        UserError: none or several match.
    """
    return _seen(lookup.find(name))


def find_run(name: str) -> Handle:
    """Return the run of that name.

    Raises:
        UserError: the name is that of a group or a sweep.
    """
    found = find(name)
    if isinstance(found, Study):
        raise UserError(
            f"{found.name} is a sweep: for `logs`, and `export` of weights, name a trial, such as"
            f" {found.name}/trials/0; else one of its workers, such as {found.name}/0"
        )
    if isinstance(found, Group):
        raise UserError(f"{found.name} is a group of {len(found.runs)} runs: name one of them, such as {found.name}/0")
    return found
