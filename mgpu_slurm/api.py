"""Runs, groups and sweeps, as the command line and notebooks see them: states, results and operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, overload

from mgpu_slurm.core import files
from mgpu_slurm.core.errors import RunFailed, UserError
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.registry import cleanup, current_state, index, lookup, reach, sweep_state, watch
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.parallelism import Parallelism, Precision, Strategy
from mgpu_slurm.request.spec import RestartPolicy
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.submission import plan
from mgpu_slurm.submission import submit as submitting
from mgpu_slurm.submission.plan import Request
from mgpu_slurm.submission.resume_overrides import NO_CHANGE, Change


class _Submitted:
    """The common base of a run and a group of runs."""

    def __init__(self, folder: RunFolder) -> None:
        self.files = folder

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.state}>"

    def _repr_html_(self) -> str:
        """Return what Jupyter shows: the table of `status`, and a small curve."""
        from mgpu_slurm.reports.live import notebook

        return notebook.html(self.files, current_state.current([self.files]))

    @property
    def name(self) -> str:
        return self.files.run

    @property
    def folder(self) -> Path:
        return self.files.path

    @property
    def all_current(self) -> list[RunState]:
        """The current state of each run."""
        return [state for _, state in current_state.current([self.files])]

    @property
    def all_facts(self) -> list[dict[str, Any]]:
        """Everything that `status` shows, one entry per run, as in `state.json`."""
        return [state.to_json() for state in self.all_current]

    @property
    def state(self) -> str:
        """The state. For several runs: that of one that is alive, else of one that did not complete, if any."""
        return self._as_one(self.all_current)

    def _as_one(self, found: Sequence[RunState]) -> str:
        """Return one state for all runs."""
        return states.overall([state.state for state in found])

    def wait(self, timeout: float | None = None, note: Note = quiet) -> str:
        """Wait until everything has ended, and return the state.

        Args:
            timeout: in seconds; None to wait forever.
            note: called with a message when a cluster does not answer.

        Raises:
            TimeoutError: it has not ended within that time.
        """
        return watch.wait(self.files, self._as_one, timeout, note)

    def cancel(self) -> bool:
        """Ask the runs that are alive to save and end; return False if all had already ended."""
        return reach.cancel(self.files)

    def resume(self, change: Change = NO_CHANGE, note: Note = quiet) -> str:
        """Resume what has ended and did not complete, from its newest checkpoint, and return the id of the job.

        Args:
            change: options of the run to override.
            note: called with a message while waiting for a cluster that does not answer.

        Raises:
            UserError: there is nothing to resume, the change does not fit, or the run belongs to another user.
        """
        index.check_may_change(self.files, "resume")
        found = current_state.current([self.files])
        ended = [folder for folder, facts in found if not states.is_alive(facts.state)]
        unfinished = [folder for folder, facts in found if folder in ended and facts.state != states.COMPLETED]
        if not ended:
            raise UserError(f"run {self.name} is {self.state}: only a run that has ended can be resumed")
        if not unfinished:
            raise UserError(f"run {self.name} has already completed: submit a new run")
        return submitting.restart(self.files, unfinished, change, note)

    def delete(self, only_checkpoints: bool = False) -> None:
        """Delete it, or only its checkpoints, from disk.

        Raises:
            UserError: it is still alive, part of a group, or belongs to another user.
        """
        self.check_deletable()
        cleanup.delete(self.files, only_checkpoints)

    def check_deletable(self) -> None:
        """Check that it may be deleted.

        Raises:
            UserError: it is still alive, or belongs to another user.
        """
        index.check_may_change(self.files, "delete")
        cleanup.check_has_ended(self.files, self.state)


class Handle(_Submitted):
    """A handle on one run, which any process can make at any time."""

    @property
    def current(self) -> RunState:
        """The run's current state."""
        return current_state.state(self.files)

    @property
    def facts(self) -> dict[str, Any]:
        """Everything that `status` shows for the run, as in `state.json`."""
        return self.current.to_json()

    def result(self) -> dict[str, float]:
        """Wait for the end, and return the job function's result as numbers by name.

        Raises:
            RunFailed: the run did not complete; reports the first cause.
        """
        state = self.wait()
        if state != states.COMPLETED:
            raise RunFailed(f"run {self.name} is {state}: {self.current.reason}")
        record = files.read_json(self.files.result) or {"result": {}}
        result: dict[str, float] = record["result"]
        return result

    def logs(self, rank: int = 0) -> str:
        """Return everything that a rank has printed, over all attempts."""
        attempts = range(1, records.attempts_started(self.files) + 1)
        texts = (path.read_bytes() for path in lookup.logs_of_rank(self.files, rank, attempts))
        return b"".join(texts).decode(errors="replace")


class Group(_Submitted):
    """A handle on runs that were submitted together, one per seed."""

    @property
    def runs(self) -> list[Handle]:
        return [Handle(folder) for folder in lookup.members(self.files)]

    def results(self) -> list[dict[str, float]]:
        """Wait for all runs, and return their results in order.

        Raises:
            RunFailed: a run did not complete; reports the first cause of the first such run.
        """
        self.wait()
        return [run.result() for run in self.runs]


class Study(Group):
    """A handle on a sweep: its workers and trials."""

    def _as_one(self, found: Sequence[RunState]) -> str:
        return sweep_state.overall(found, sweep_state.summary_of(self.files, found))

    def results(self) -> list[dict[str, float]]:
        """Wait for the sweep, and return the results of all complete trials, ordered by trial number.

        Raises:
            RunFailed: the sweep did not complete; reports why.
        """
        state = self.wait()
        if state != states.COMPLETED:
            reason = sweep_state.state_of(self.files, self.all_current).reason
            raise RunFailed(f"study {self.name} is {state}: {reason}")
        trials = sorted(sweep_state.trials(self.files), key=lambda trial: int(trial.path.name))
        records = [files.read_json(trial.result) for trial in trials]
        return [record["result"] for record in records if record is not None and record["state"] == "COMPLETE"]

    def resume(self, change: Change = NO_CHANGE, note: Note = quiet) -> str:
        """Start workers for the remaining trials, even if the sweep was abandoned. Return the id of their job.

        Raises:
            UserError: no trial remains, all workers are running, or the sweep belongs to another user.
        """
        from mgpu_slurm.sweeps import launch

        index.check_may_change(self.files, "resume")
        return launch.resume(self.files, change, note)

    def delete(self, only_checkpoints: bool = False) -> None:
        self.check_deletable()
        if not only_checkpoints:
            from mgpu_slurm.sweeps import launch

            launch.forget(self.files)
        super().delete(only_checkpoints)

    @property
    def trials(self) -> dict[str, int]:
        """The number of trials in each of Optuna's states. Asks SLURM which workers are alive."""
        return sweep_state.summary_of(self.files, self.all_current).trials

    @property
    def best(self) -> dict[str, Any] | None:
        """The best trial so far, with `number`, `value`, `params` and more; None until one is complete and feasible.

        With several metrics, that with the best value of the first one; see `front`.
        """
        best = sweep_state.summary_of(self.files).best
        return None if best is None else best.to_json()

    @property
    def front(self) -> list[dict[str, Any]]:
        """With several metrics, the complete trials that no other beats in all of them, as `best` has them."""
        return [trial.to_json() for trial in sweep_state.summary_of(self.files).front]


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
