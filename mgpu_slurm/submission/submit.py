"""Submit a run: execute the plan in a folder that is hidden until it is complete.

A refused request leaves no folder behind; a killed submission leaves a working run, or a hidden folder that the next
submission removes.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from mgpu_slurm.core import files
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.executors.base import Start
from mgpu_slurm.executors.selection import EXECUTORS
from mgpu_slurm.registry import current_state, dependencies, index
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.rank_command import PACKAGE
from mgpu_slurm.request.spec import Spec, read_spec
from mgpu_slurm.run_folder import layout, records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.slurm import site
from mgpu_slurm.submission import containers, missing, plan, resume_overrides
from mgpu_slurm.submission.plan import Plan, Request
from mgpu_slurm.submission.project import environment, job_config, snapshot
from mgpu_slurm.submission.resume_overrides import NO_CHANGE, Change
from mgpu_slurm.trackers import destinations

STALE_STAGING_SECONDS = 3600


Addition: TypeAlias = Callable[[Plan, RunFolder], None]
"""A function that adds files to the folder of a run that is being created; the plan is complete."""


def nothing(made: Plan, staging: RunFolder) -> None:
    pass


@dataclass(frozen=True)
class Submission:
    """A submitted run: its plan and job id."""

    plan: Plan
    job_id: str


def submit(request: Request, note: Note = quiet, add: Addition = nothing) -> Submission:
    """Submit a run; return as soon as its executor has accepted it.

    Args:
        note: called when waiting for a cluster that does not answer.
        add: adds files to the folder, before it becomes visible.

    Raises:
        UserError: something in the call or a file is wrong; no run folder is left.
        MayBeQueued: the cluster did not answer, and may have accepted the job; the run stays.
        ClusterError: the cluster refused or did not answer; no run folder is left.
    """
    cwd, runs = Path.cwd(), layout.runs_root()
    made = plan.make(request, cwd, runs, note)
    index.make_writable(runs)
    if not os.environ.get(layout.RUNS_VARIABLE):
        why = "who could replace your runs in it: set MGPU_RUNS to your own folder, or to this one if you trust them"
        files.refuse_foreign_owner(runs, why)
    if index.is_open_to_replacement(runs):
        note(
            f"warning: others can replace runs in {runs}, and so what `status` shows of them:"
            f" `chmod +t {runs}` leaves each run to its owner"
        )
    _remove_stale_staging(runs)
    executor = EXECUTORS[made.spec.executor]
    dependency = dependencies.sbatch_option(made.spec.after) if executor.is_queued else ""
    with _staged(made, runs) as staging, executor.start(made.spec, made.folder, staging) as start:
        made = _complete(made, request, staging, cwd)
        add(made, staging)
        index.remember_root(runs)
        # before the run becomes visible: one that was never requested would wait forever
        start.claim(staging)
        start.announce(staging, None if made.spec.tasks is None else range(made.spec.tasks), note)
        _show(staging, made)
        try:
            return Submission(made, start.go(made.folder, made.spec, dependency, note))
        finally:
            if not start.may_have_arrived(made.folder):
                shutil.rmtree(made.folder.path, ignore_errors=True)


def _show(staging: RunFolder, made: Plan) -> None:
    """Rename the folder to its final name, which makes it visible."""
    try:
        staging.path.rename(made.folder.path)
    except OSError:
        if not made.folder.path.exists():
            raise
        raise UserError(
            f"{made.spec.run!r} was created by another process at the same time: choose another name"
        ) from None


def rehearse(request: Request, note: Note = quiet, add: Addition = nothing) -> Plan:
    """Return the plan of a submission, complete and checked, without starting or leaving anything."""
    cwd, runs = Path.cwd(), layout.runs_root()
    made = plan.make(request, cwd, runs, note)
    with tempfile.TemporaryDirectory(prefix="mgpu-") as folder, _staged(made, Path(folder)) as staging:
        made = _complete(made, request, staging, cwd)
        add(made, staging)
        return made


def restart(asked: RunFolder, folders: Sequence[RunFolder], change: Change = NO_CHANGE, note: Note = quiet) -> str:
    """Restart runs that have ended, as their next attempt; return the job id.

    Args:
        asked: the run or group.
        folders: the run, or those runs of the group to start.
        note: called when waiting for a cluster that does not answer.

    Raises:
        UserError: a run is alive, or the change does not fit, or a dependency has failed.
        MayBeQueued: the cluster did not answer, and may have accepted the job; the runs stay pending.
        ClusterError: the cluster refused; the runs keep their ended state.
    """
    with _locked(asked.group):
        # a run that never arrived in SLURM's queue may have none
        before = [(folder, files.read_json(folder.state)) for folder in folders]
        # the end of a run that never arrived in SLURM's queue is not on disk
        now = dict(current_state.current([asked]))
        for folder in folders:
            if states.is_alive(now[folder].state):
                raise UserError(f"run {folder.run} is being resumed by another process")
        if change:
            _check_shares_with_none_alive(asked, now)
        _check_has_none_elsewhere(asked.group)
        starts: list[Start] = []
        try:
            return _restart(asked, folders, change, starts, note)
        except BaseException:
            if not any(start.may_have_arrived(asked) for start in starts):
                for folder, state in before:
                    if state is None:
                        folder.state.unlink(missing_ok=True)
                    else:
                        files.write_json(folder.state, state)
            raise


def _check_shares_with_none_alive(asked: RunFolder, now: dict[RunFolder, RunState]) -> None:
    alive = [folder for folder, state in now.items() if states.is_alive(state.state)]
    if alive:
        raise UserError(
            f"run {alive[0].run} is {now[alive[0]].state}, and group {asked.run} shares its resources and code:"
            " resume the group with changes once all have ended, or without changes now"
        )


def _check_has_none_elsewhere(group: RunFolder) -> None:
    """Raise an error if the group has a job on another cluster: it may use only one at a time."""
    cluster = records.read_state(group).slurm_cluster
    if cluster is None or cluster == site.cluster_name():
        return
    found = [state for _, state in records.read_states(group)]
    current_state.check_are_of_this_cluster(state for state in found if states.is_alive(state.state))


def _restart(asked: RunFolder, folders: Sequence[RunFolder], change: Change, starts: list[Start], note: Note) -> str:
    """Start the runs, adding the start to `starts`; return the job id."""
    with resume_overrides.applied(asked, change) as spec, EXECUTORS[spec.executor].restart(spec, asked) as start:
        starts.append(start)
        job_id = start.claim(asked)
        # a group's runs belong to the coordinator until they have their own supervisors
        own, cluster = records.read_state(asked), _slurm_cluster(spec)
        now_with = {"supervisor": own.supervisor, "host": own.host, "slurm_cluster": cluster}
        if asked.group not in folders:
            records.update_state(asked.group, slurm_cluster=cluster)
        for folder in {asked, *folders}:
            # it was meant for the previous attempt
            folder.cancel_request.unlink(missing_ok=True)
        for folder in folders:
            folder.create_task()
            records.note_unseen_end(folder)
            before = records.read_state(folder)
            records.record_event(folder, "resumed", state=before.state, reason=before.reason)
            _reset_state(folder, job_id if folder == asked else None, now_with)
        tasks = [folder.task for folder in folders if folder.task is not None]
        dependency = dependencies.sbatch_option(dependencies.left(asked, spec.after)) if spec.is_queued else ""
        start.announce(asked, tasks or None, note)
        try:
            return start.go(asked, read_spec(asked.group), dependency, note)
        except BaseException as stopped:
            if not start.may_have_arrived(asked):
                raise
            problem = stopped
    # the job may still start, so the changes for it stay
    raise problem


def _reset_state(folder: RunFolder, job_id: str | None, now_with: dict[str, Any]) -> None:
    records.update_state(
        folder,
        state="PENDING",
        reason="",
        job_id=job_id,
        submitted=records.now(),
        started=None,
        ended=None,
        **now_with,
    )


def _slurm_cluster(spec: Spec) -> str | None:
    return None if spec.nodes_are_simulated else site.cluster_name()


@contextmanager
def _locked(folder: RunFolder) -> Iterator[None]:
    """Lock the run against other restarts on this machine, if the file system supports locks."""
    descriptor = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _staged(made: Plan, runs: Path) -> Iterator[RunFolder]:
    """Create a hidden folder next to the runs, and remove it afterwards unless it was renamed into a run."""
    files.set_umask_for(made.spec.readable_by)
    # two processes may create a sweep of the same name at the same moment
    staging = RunFolder(runs / f"{layout.STAGING_PREFIX}{made.spec.run}-{secrets.token_hex(4)}")
    staging.create(made.spec.readable_by)
    try:
        yield staging
    finally:
        shutil.rmtree(staging.path, ignore_errors=True)


def _remove_stale_staging(runs: Path) -> None:
    """Remove the folders of killed submissions."""
    for path in runs.glob(f"{layout.STAGING_PREFIX}*"):
        # another submission may rename or remove its own meanwhile
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > STALE_STAGING_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _complete(made: Plan, request: Request, staging: RunFolder, cwd: Path) -> Plan:
    """Check the container, take the snapshot, complete the config, and write the run's files."""
    checked = containers.check(made.spec, made.folder)
    taken = snapshot.take(
        Path(made.spec.project),
        staging.code,
        made.snapshot_limit,
        layout.runs_root(),
        made.spec.workdir,
        destinations.database_files(made.spec.sinks),
    )
    spec, notes = missing.resolve_command(made.spec, staging.code)
    made = replace(made, spec=spec)
    facts = environment.describe(taken)
    missing.check_torch(made.spec, facts.packages)
    given = request.target if callable(request.target) else None
    values = [configs.merge(request.values, probe) for probe in request.probes] or [request.values]
    made = made.with_config(job_config.complete(made.spec, values, staging, cwd, request.check, given))
    if spec.container is not None:
        (staging.package / PACKAGE.name).mkdir(parents=True)
    notes += [f"container {checked.words}"] if checked is not None else []
    notes += missing.notes_on_torch(made.spec, facts.packages)
    notes += [*missing.notes_on_config(request.values, made.whole_config, made.spec, staging.code)]
    made = replace(made, notes=(*made.notes, *notes))
    if made.spec.kind == "run":
        made.spec.check_seeds()
    made.spec.write(staging)
    files.write_json(staging.environment, facts.to_json())
    resources = made.spec.resources
    records.update_state(
        staging,
        run=made.spec.run,
        kind=made.spec.kind,
        executor=made.spec.executor,
        slurm_cluster=_slurm_cluster(made.spec),
        nodes=resources.nodes,
        ranks=resources.ranks,
        submitted=made.spec.submitted,
        tasks=made.spec.tasks,
    )
    return made
