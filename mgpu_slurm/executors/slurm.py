"""The executor for jobs in SLURM's queue."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from mgpu_slurm.core import records, states
from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.core.files import is_own
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.core.retry import Note
from mgpu_slurm.executors import slurm_queue, slurm_states
from mgpu_slurm.executors.base import (
    Asked,
    Executor,
    Resolved,
    Shell,
    SlurmView,
    Start,
    State,
    ended_unseen,
)
from mgpu_slurm.executors.slurm_queue import Job
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.spec import Resources, Spec, read_spec, resources_from
from mgpu_slurm.slurm import commands, jobs, site, termination
from mgpu_slurm.slurm.outage import wait_out


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
        resources = resources_from(profile | configs.merge(asked.defaults, asked.flags), "the call")
        resources, how = _with_gpus(resources, asked.is_dry_run, note)
        return Resolved(resources, resources.time_limit, (f"gpus      {how}",))

    @contextmanager
    def start(self, spec: Spec, run: RunFolder, now_at: RunFolder) -> Iterator[Start]:
        yield _QueuedStart()

    def asks_slurm(self, state: State) -> bool:
        return True

    def current(self, folder: RunFolder, state: State, slurm: SlurmView) -> State:
        if (last_known := slurm.last_known(state)) is not None:
            return last_known
        if state["job_id"] is None:
            return state
        facts = slurm.known[folder]
        if facts in slurm_states.NO_WORD:
            if not is_own(folder.group.path):
                # a site may hide the jobs of other users
                return state
            facts = termination.ending(folder, state["job_id"]) or facts
        facts = slurm_states.settled(folder, state, facts)
        is_listed = facts.get("reason") != slurm_states.UNLISTED["reason"]
        if states.is_alive(facts["state"]) and is_listed:
            return state | facts
        if (newer := _newer(folder, state)) is not None:
            return newer
        if not is_listed:
            return state | facts
        if facts == slurm_states.DROPPED and records.attempts_started(folder):
            facts = slurm_states.LOST
        if facts in (slurm_states.LOST, slurm_states.LOST_SO_FAR):
            # the controller answers, but neither it, nor accounting, nor the run's own records know the end
            return state | facts
        if facts["state"] == states.FAILED:
            facts = facts | {"reason": termination.before_the_ranks(folder, state["job_id"]) or facts["reason"]}
        # a run that never started has not recorded its job id itself
        return ended_unseen(folder, {"job_id": state["job_id"]} | facts)

    def shell(self, folder: RunFolder, state: State) -> Shell:
        job_id, nodes = jobs.place_of(state["job_id"])
        return Shell(nodes, job_id)


class _QueuedStart(Start):
    """The jobs to request from SLURM."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def claim(self, folder: RunFolder) -> str | None:
        return None

    def announce(self, folder: RunFolder, tasks: Sequence[int] | None, note: Note) -> None:
        self._jobs = slurm_queue.announce(folder.group, tasks, note)

    def go(self, folder: RunFolder, dependency: str, note: Note) -> str:
        return slurm_queue.submit(folder.group, read_spec(folder.group), self._jobs, dependency, note)

    def may_have_arrived(self, folder: RunFolder) -> bool:
        return slurm_queue.may_have_arrived(folder.group, self._jobs)


def _newer(folder: RunFolder, state: State) -> State | None:
    """Return the new state of a run that ended or restarted while SLURM was asked; None if it did not."""
    again = records.read_state(folder)
    has_moved = again["job_id"] not in (None, state["job_id"]) or again["attempts"] > state["attempts"]
    return again if has_moved or not states.is_alive(again["state"]) else None


def _with_gpus(resources: Resources, is_dry_run: bool, note: Note) -> tuple[Resources, str]:
    """Return the resources with the GPUs per node decided, and the reason."""
    if resources.gpus_per_node is not None:
        return resources, f"{resources.gpus_per_node} per node, as asked"
    if is_dry_run and shutil.which("sinfo") is None:
        return resources, "not known here: there is no sinfo to ask; set gpus-per-node"
    found = wait_out(lambda: site.gpus_per_node(resources.partition), note)
    where = f"partition {resources.partition}" if resources.partition else "the default partition"
    if not found:
        return resources, f"none: the nodes of {where} have none"
    return replace(resources, gpus_per_node=found), f"{found} per node, all that the nodes of {where} have"
