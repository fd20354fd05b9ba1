"""The executor for jobs in SLURM's queue.

What only a submission needs is imported there: `status` loads this module too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.core.files import is_own, name_of_owner
from mgpu_slurm.core.retry import Note
from mgpu_slurm.executors import slurm_states
from mgpu_slurm.executors.base import (
    Asked,
    Executor,
    Living,
    Resolved,
    Shell,
    SlurmView,
    Start,
    ended_unseen,
    job_of,
    newer,
)
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.resources import Resources, resources_from
from mgpu_slurm.request.spec import Spec
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.slurm import commands, job_identity, jobs, site
from mgpu_slurm.slurm.commands import wait_out

if TYPE_CHECKING:
    from mgpu_slurm.executors.slurm_queue import Job


class SlurmExecutor(Executor):
    """Runs on the cluster of this login node."""

    name = "slurm"
    is_queued = True

    def resolve(self, asked: Asked, note: Note) -> Resolved:
        if shutil.which("sbatch") is None and not asked.is_dry_run:
            raise ClusterError(
                "--executor slurm: there is no sbatch on PATH: log in to the cluster, or use --executor local"
            )
        profile = commands.flags_of_profile(os.environ)
        resources = resources_from(profile | configs.merge(asked.defaults, asked.flags), "resources")
        resources, how = _with_gpus(resources, asked.is_dry_run, note)
        return Resolved(resources, resources.time_limit, (f"gpus      {how}",))

    @contextmanager
    def start(self, spec: Spec, run: RunFolder, now_at: RunFolder) -> Iterator[Start]:
        yield _QueuedStart()

    def asks_slurm(self, state: RunState) -> bool:
        return True

    def current(self, folder: RunFolder, state: RunState, slurm: SlurmView) -> RunState:
        if (last_known := slurm.last_known(state)) is not None:
            return last_known
        if state.job_id is None:
            return state
        told = slurm.known[folder]
        if told in slurm_states.UNCERTAIN:
            if not is_own(folder.group.path):
                # a site may hide the jobs of other users
                return state
            told = slurm_states.ending(folder, state.job_id) or told
        settled = slurm_states.settled(folder, state, told)
        now = state.updated(settled)
        is_listed = settled.reason != slurm_states.UNLISTED.reason
        if states.is_alive(now.state) and is_listed:
            return now
        if (recorded := newer(folder, state)) is not None:
            return recorded
        if not is_listed:
            return now
        if settled == slurm_states.DROPPED and records.attempts_started(folder):
            settled = slurm_states.LOST
        if settled in (slurm_states.LOST, slurm_states.LOST_SO_FAR):
            # the controller answers, but neither it, nor accounting, nor the run's own records know the end
            return state.updated(settled)
        if now.state == states.FAILED:
            settled = replace(settled, reason=slurm_states.before_the_ranks(folder, state.job_id) or settled.reason)
        # a run that never started has not recorded its job id itself
        return ended_unseen(folder, state, replace(settled, job_id=state.job_id))

    def cancel(self, folder: RunFolder, living: Living, look_again: Callable[[], Living]) -> bool:
        if any(state.job_id is None for _, state in living):
            from mgpu_slurm.executors import slurm_queue

            slurm_queue.look_for_jobs(folder.group)
            living = look_again()
        started = [member for member, state in living if state.attempts]
        # their jobs may be about to requeue; an operator who cancels them may lack write access
        with contextlib.suppress(OSError):
            for member in started:
                member.cancel_request.touch()
        told = _job_ids(living)
        try:
            _scancel(folder, told)
        except ClusterError:
            with contextlib.suppress(OSError):
                for member in started:
                    member.cancel_request.unlink(missing_ok=True)
            raise
        # jobs that have not started end at once, and only SLURM reports that, for some minutes
        left = look_again()
        _scancel(folder, _job_ids(left) - told)
        unknown = [state.run for _, state in left if state.job_id is None]
        if unknown:
            raise ClusterError(f"run {unknown[0]}: SLURM does not know its job yet: try again in a minute")
        return True

    def shell(self, folder: RunFolder, state: RunState) -> Shell:
        job_id, nodes = jobs.place_of(job_of(state))
        return Shell(nodes, job_id)


class _QueuedStart(Start):
    """The jobs to request from SLURM."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def claim(self, folder: RunFolder) -> str | None:
        return None

    def announce(self, folder: RunFolder, tasks: Sequence[int] | None, note: Note) -> None:
        from mgpu_slurm.executors import slurm_queue

        self._jobs = slurm_queue.announce(folder.group, tasks, note)

    def go(self, folder: RunFolder, spec: Spec, dependency: str, note: Note) -> str:
        from mgpu_slurm.executors import slurm_queue

        return slurm_queue.submit(folder.group, spec, self._jobs, dependency, note)

    def may_have_arrived(self, folder: RunFolder) -> bool:
        from mgpu_slurm.executors import slurm_queue

        return slurm_queue.may_have_arrived(folder.group, self._jobs)


def _job_ids(runs: Living) -> set[str]:
    return {state.job_id for _, state in runs if state.job_id is not None}


def _scancel(folder: RunFolder, job_ids: set[str]) -> None:
    # one request per array: each request is a load on the controller
    ids = sorted(job_ids) if folder.task is not None else commands.whole_jobs(sorted(job_ids))
    job_identity.check(folder, ids)
    try:
        if ids:
            commands.run(commands.scancel_command(ids))
    except ClusterError as error:
        if "permission denied" not in str(error):
            raise
        owner = name_of_owner(folder.group.path)
        raise ClusterError(f"run {folder.run} belongs to {owner}: SLURM does not let you cancel it") from None


def _with_gpus(resources: Resources, is_dry_run: bool, note: Note) -> tuple[Resources, str]:
    """Return the resources with the GPUs per node decided, and the reason."""
    if resources.gpus_per_node is not None:
        return resources, f"{resources.gpus_as_requested} per node, as requested"
    if is_dry_run and shutil.which("sinfo") is None:
        return resources, "unknown: no sinfo on PATH; set gpus-per-node"
    found = wait_out(lambda: site.gpus_per_node(resources.partition), note)
    where = f"partition {resources.partition}" if resources.partition else "the default partition"
    if not found:
        return resources, f"none: the nodes of {where} have no GPUs"
    return replace(resources, gpus_per_node=found), f"{found} per node, all that the nodes of {where} have"
