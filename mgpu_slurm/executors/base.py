"""The interface of an executor: it decides on a run's resources, starts it, reports its state, and reaches its nodes.

A new executor is a module of this folder with a subclass of `Executor`, a line in `executors.selection`, and a class in
the tests that inherits the contract of `tests/executors/contract.py`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

from mgpu_slurm.core.retry import Note
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import ExecutorName, Spec
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState, StateChange

Living: TypeAlias = Sequence[tuple[RunFolder, RunState]]
"""Runs that have not ended, with their states."""

HELD_JOB_VARIABLE = "SLURM_JOB_ID"
"""Set in the shell of an allocation."""

SUPERVISOR_LOST = "lost: its supervisor process is gone (killed, or the machine rebooted); continue with `resume`"


@dataclass(frozen=True)
class Asked:
    """The resources that a request names, before an executor has decided on the rest."""

    flags: dict[str, Any]
    """Flags of the call, by sbatch's long names."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of the cluster file."""
    workers: int = 1
    """The number of workers that share the executor's resources."""
    is_dry_run: bool = False


@dataclass(frozen=True)
class Resolved:
    """The resources of a run, and how they were decided."""

    resources: Resources
    time_limit: int | None
    """Seconds."""
    notes: tuple[str, ...]
    """Human-readable notes."""
    described: str | None = None
    """A description of where the run executes, if the executor's name is not enough."""


class Start(ABC):
    """A prepared start of a run or group."""

    @abstractmethod
    def claim(self, folder: RunFolder) -> str | None:
        """Record that the run belongs to this start; return its job id, or None if it gets one later.

        Called before the run becomes visible, so that a killed submission leaves no run that waits forever.
        """

    @abstractmethod
    def announce(self, folder: RunFolder, tasks: Sequence[int] | None, note: Note) -> None:
        """Record the coming request, so that the job can be looked for if no answer comes.

        Args:
            tasks: indices in the group; None for a single run.
            note: called when waiting for a cluster that does not answer.
        """

    @abstractmethod
    def go(self, folder: RunFolder, spec: Spec, dependency: str, note: Note) -> str:
        """Start the run; return the job id.

        Args:
            spec: of the run, or of the group it belongs to.
            dependency: in the format of sbatch's `--dependency`.

        Raises:
            MayBeQueued: the cluster did not answer, so it is unknown whether it accepted the job.
            ClusterError: the cluster refused, or did not answer for too long.
        """

    @abstractmethod
    def may_have_arrived(self, folder: RunFolder) -> bool:
        """Return whether the run may start."""


@dataclass(frozen=True)
class SlurmView:
    """SLURM's view of the runs whose jobs it has."""

    known: Mapping[RunFolder, StateChange]
    """What SLURM says of each run."""
    is_silent: bool
    """Whether the controller does not answer."""
    cluster: str | None
    """This cluster's name; None if unknown."""

    def last_known(self, state: RunState) -> RunState | None:
        """Return the last known state of a run that SLURM does not speak for here; None if it does."""
        if is_elsewhere(state, self.cluster) and self.cluster is not None:
            why = f"last known state (its job is on cluster {state.slurm_cluster}, this is {self.cluster})"
        elif is_elsewhere(state, self.cluster) or self.is_silent:
            why = "last known state (SLURM's controller does not answer)"
        else:
            return None
        return replace(state, reason=state.reason or why)


class Executor(ABC):
    """One way to run jobs."""

    name: ClassVar[ExecutorName]

    is_queued: ClassVar[bool] = False
    """Whether runs wait in a queue, so that a command does not follow them at once."""

    is_this_machine: ClassVar[bool] = False
    """Whether it is this machine, and not a cluster that the cluster file describes."""

    @abstractmethod
    def resolve(self, asked: Asked, note: Note) -> Resolved:
        """Decide on all resources of a run.

        Raises:
            UserError: the executor lacks the requested resources.
            ClusterError: SLURM is missing or does not answer.
        """

    @abstractmethod
    def start(self, spec: Spec, run: RunFolder, now_at: RunFolder) -> AbstractContextManager[Start]:
        """Prepare to start a run or group. Leaving the block discards the preparation, unless `go` was called.

        Args:
            run: the folder at the start.
            now_at: the folder's place until then.
        """

    def restart(self, spec: Spec, run: RunFolder) -> AbstractContextManager[Start]:
        """Prepare to restart a run or group that has ended.

        Raises:
            UserError: it cannot start here or now.
        """
        return self.start(spec, run, run)

    def asks_slurm(self, state: RunState) -> bool:
        """Return whether SLURM has to be asked for this run's state."""
        return False

    @abstractmethod
    def current(self, folder: RunFolder, state: RunState, slurm: SlurmView) -> RunState:
        """Return the state of a run that has not ended according to its own record."""

    @abstractmethod
    def cancel(self, folder: RunFolder, living: Living, look_again: Callable[[], Living]) -> bool:
        """Ask the living runs of a run or group to save and end; return whether any could be reached.

        Args:
            living: the runs that have not ended, with their current states.
            look_again: returns them as they are when it is called.

        Raises:
            UserError: the run cannot be reached from this machine.
            ClusterError: SLURM refuses or does not answer.
        """

    @abstractmethod
    def shell(self, folder: RunFolder, state: RunState) -> Shell:
        """Return how to execute a command on the nodes of a running run.

        Raises:
            UserError: the run cannot be reached from this machine.
            ClusterError: SLURM does not answer.
        """


@dataclass(frozen=True)
class Shell:
    """The way onto the nodes of a run."""

    nodes: list[str]
    job_id: str | None
    """The job id for srun; None if the nodes are this machine."""


def is_elsewhere(state: RunState, cluster: str | None) -> bool:
    """Return whether a run's job is on another cluster that shares this one's files.

    On this cluster its id is unknown, or is that of another job.

    Args:
        cluster: this cluster's name; None if unknown.
    """
    return state.slurm_cluster not in (None, cluster)


def job_of(state: RunState) -> str:
    """Return the id of a run's job; only of one that has a job."""
    assert state.job_id is not None
    return state.job_id


def newer(folder: RunFolder, seen: RunState) -> RunState | None:
    """Return the recorded state of a run that has ended or started again since it was seen; None if it has not."""
    now = records.read_state(folder)
    has_restarted = (
        now.attempts > seen.attempts
        # it was resumed
        or now.submitted != seen.submitted
        or now.supervisor != seen.supervisor
        or now.job_id not in (None, seen.job_id)
    )
    return now if has_restarted or not states.is_alive(now.state) else None


def ended_unseen(folder: RunFolder, seen: RunState, end: StateChange) -> RunState:
    """Record and return the end of a run whose job or supervisor did not record it: SLURM forgets jobs.

    Args:
        seen: its state when it was found to have ended; it may have started again meanwhile.
    """
    end = replace(end, ended=end.ended or records.last_sign_of_life(folder))
    # another user's run cannot be changed on disk
    with contextlib.suppress(OSError):
        folder.create_task()
        records.update_state_if(folder, lambda: newer(folder, seen) is None, **end.known())
    return newer(folder, seen) or seen.updated(end)
