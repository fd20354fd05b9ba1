"""What an executor is: it decides on a run's resources, starts it, knows how it is, and reaches it.

A new executor is a module of this folder with a subclass of `Executor`, a line in `executors.selection`, and a class in
the tests that takes the contract of `tests/executors/contract.py`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mgpu_slurm.core import records, states
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.core.retry import Note
from mgpu_slurm.request.spec import ExecutorName, Resources, Spec

State = dict[str, Any]

SILENT = "last known state (SLURM's controller does not answer)"
_ELSEWHERE = "last known state (its job is on cluster {}, and this is {})"
SUPERVISOR_LOST = "lost: its supervisor process is gone (killed, or the machine rebooted); continue with `resume`"


@dataclass(frozen=True)
class Asked:
    """The resources that a request names, before an executor has decided on the rest."""

    flags: dict[str, Any]
    """Of the call, by sbatch's long names."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Of the cluster file."""
    workers: int = 1
    """That share what the executor has."""
    is_dry_run: bool = False


@dataclass(frozen=True)
class Resolved:
    """The resources of a run, and how they came about."""

    resources: Resources
    time_limit: int | None
    """Seconds."""
    notes: tuple[str, ...]
    """For people."""
    described: str | None = None
    """What the run is to run on, if there is more to say than the executor's name."""


class Start(ABC):
    """A start of a run or group that has not been told to go yet."""

    @abstractmethod
    def claim(self, folder: RunFolder) -> str | None:
        """Write down that the run is this start's; return its job id, or None if it gets one later.

        It comes before the run can be seen: a submission that is killed then leaves no run that waits forever.
        """

    @abstractmethod
    def announce(self, folder: RunFolder, tasks: Sequence[int] | None, note: Note) -> None:
        """Write down what is going to be asked for, so that it can be looked for if no answer comes.

        Args:
            tasks: indices in the group; None for a run of its own.
            note: hears that a cluster which does not answer is waited for.
        """

    @abstractmethod
    def go(self, folder: RunFolder, dependency: str, note: Note) -> str:
        """Start the run; return the job id.

        Args:
            dependency: what it waits for, as sbatch takes it.

        Raises:
            MayBeQueued: the cluster did not answer, and nobody can tell whether it has taken the job.
            ClusterError: it refused, or did not answer for too long.
        """

    @abstractmethod
    def may_have_arrived(self, folder: RunFolder) -> bool:
        """Return whether the run may start."""


@dataclass(frozen=True)
class SlurmView:
    """What SLURM says of runs whose jobs it has."""

    known: dict[RunFolder, State] | None
    """None if the controller does not answer."""
    cluster: str | None
    """This cluster's name; None if it cannot be found out."""

    def is_elsewhere(self, state: State) -> bool:
        return is_elsewhere(state, self.cluster)

    def unasked(self, state: State) -> State:
        """Return the state of a run whose job is another cluster's."""
        here = SILENT if self.cluster is None else _ELSEWHERE.format(state["slurm_cluster"], self.cluster)
        return state | {"reason": state["reason"] or here}


class Executor(ABC):
    """One way to run jobs."""

    name: ClassVar[ExecutorName]

    is_queued: ClassVar[bool] = False
    """Whether a run waits until there is room for it, so that a command does not follow it at once."""

    is_this_machine: ClassVar[bool] = False
    """Whether it is none of the clusters that the cluster file describes."""

    @abstractmethod
    def resolve(self, asked: Asked, note: Note) -> Resolved:
        """Decide on all resources of a run.

        Raises:
            UserError: the executor does not have what is asked for.
            ClusterError: SLURM is not there, or does not answer.
        """

    @abstractmethod
    def start(self, spec: Spec, run: RunFolder, now_at: RunFolder) -> AbstractContextManager[Start]:
        """Prepare to start a run or group. Leaving the block ends what was prepared, unless it was told to go.

        Args:
            run: the folder when it starts.
            now_at: where that folder is until then.
        """

    def start_again(self, spec: Spec, run: RunFolder) -> AbstractContextManager[Start]:
        """Prepare to start what has ended.

        Raises:
            UserError: it cannot start here or now.
        """
        return self.start(spec, run, run)

    def asks_slurm(self, state: State) -> bool:
        """Return whether SLURM has to be asked how this run is."""
        return False

    @abstractmethod
    def current(self, folder: RunFolder, state: State, slurm: SlurmView) -> State:
        """Return how a run is that has not ended as far as its own record knows."""

    @abstractmethod
    def shell(self, folder: RunFolder, state: State) -> Shell:
        """Return how a command gets onto the nodes of a run that is running.

        Raises:
            UserError: the run cannot be reached from this machine.
            ClusterError: SLURM does not answer.
        """


@dataclass(frozen=True)
class Shell:
    """The way onto the nodes of a run."""

    nodes: list[str]
    job_id: str | None
    """As srun takes it; None if the nodes are this machine."""


def is_elsewhere(state: State, cluster: str | None) -> bool:
    """Return whether a run's job is another cluster's, which shares this one's files: here its id is nobody's, or
    another job's.

    Args:
        cluster: this one's name; None if it cannot be found out.
    """
    return state["slurm_cluster"] not in (None, cluster)


def ended_unseen(folder: RunFolder, facts: State) -> State:
    """Write down how a run ended whose job or supervisor did not: SLURM forgets. Return its state."""
    # it may have written its last word between the two looks, or have gone on as another job
    again = records.read_state(folder)
    if not states.is_alive(again["state"]) or again["job_id"] not in (None, facts.get("job_id", again["job_id"])):
        return again
    facts = {"ended": records.last_sign_of_life(folder)} | facts
    # a run of somebody else's stays as it is on disk
    with contextlib.suppress(OSError):
        folder.create_task()
        records.update_state(folder, sync=True, **facts)
    return again | facts
