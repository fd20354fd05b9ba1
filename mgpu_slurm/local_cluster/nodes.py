"""The nodes of a supervisor's ranks: simulated nodes of this machine, or the nodes of a held allocation.

They differ in how ranks are started and named, how signals reach them, and how long the nodes are available.
"""

from __future__ import annotations

import importlib
import os
import shlex
import signal
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass

from mgpu_slurm.core import node_gpus, processes
from mgpu_slurm.core.errors import ClusterError, UserError
from mgpu_slurm.executors import held_allocation, supervisors
from mgpu_slurm.executors.base import HELD_JOB_VARIABLE
from mgpu_slurm.executors.held_allocation import Allocation
from mgpu_slurm.job import PARTS, attempt, rank_process
from mgpu_slurm.job.sampling.node_sampler import ChildRank
from mgpu_slurm.job.srun_watch import LaunchLog
from mgpu_slurm.local_cluster import simulated
from mgpu_slurm.request import rank_command
from mgpu_slurm.request.spec import Spec
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.slurm import commands, script, site, steps
from mgpu_slurm.slurm.commands import wait_out


@dataclass(frozen=True)
class Limit:
    """The time limit of an attempt."""

    seconds: int
    words: str
    """Text that follows `did not end`."""


class Nodes(attempt.Launch):
    """The nodes on which attempts run. A batch step calls the methods of `Launch`, and the supervisor the others."""

    look_every: float
    """Seconds between two checks for a cancel from another machine."""

    @abstractmethod
    def prepare(self, restarts: int) -> Limit | None:
        """Choose the nodes of the next attempt and return its time limit; None for no limit.

        Args:
            restarts: Number of requeues before it.

        Raises:
            UserError: The nodes do not have what the run needs.
            ClusterError: The nodes cannot be queried.
        """

    @abstractmethod
    def clear(self) -> None:
        """Make sure that nothing of a failed attempt is left.

        Raises:
            ClusterError: This cannot be determined.
        """

    @abstractmethod
    def avoid(self, names: Container[str]) -> None:
        """Avoid these nodes in the next attempts, if there are enough others."""

    @abstractmethod
    def tell(self, signum: signal.Signals, batch_step: int) -> bool:
        """Send every rank a signal that it may handle; return False if there are no ranks yet.

        Raises:
            ClusterError: The ranks cannot be reached.
        """

    @abstractmethod
    def end_all(self, keep: set[int]) -> None:
        """Kill everything that is left of an attempt, except these processes of this machine.

        Raises:
            ClusterError: The ranks cannot be reached.
        """

    @abstractmethod
    def was_stopped_from_outside(self) -> bool:
        """Return whether something other than the supervisor terminated the ranks of a failed attempt."""

    @abstractmethod
    def aborted(self) -> bool:
        """Return whether the ranks of an attempt were ended from outside, whatever its exit code."""

    @abstractmethod
    def ran_out_of_memory(self) -> bool:
        """Return whether an attempt failed because it ran out of memory."""

    @abstractmethod
    def lost(self) -> tuple[str, str] | None:
        """Return state and reason of a run whose nodes were taken away; None while they are available."""

    @abstractmethod
    def used_up(self, lead: int | None) -> str:
        """Return why another attempt is not worth starting; empty if it is."""


class SimulatedNodes(Nodes):
    """This machine, as several nodes. Ranks are forked, so torch is imported only once."""

    address = simulated.ADDRESS
    look_every = 3600.0

    def __init__(self, folder: RunFolder, spec: Spec) -> None:
        self._folder = folder
        self._spec = spec
        self._supervisor = os.getpid()
        self.job_id = str(self._supervisor)
        self.names = simulated.node_names(spec)
        # else they are new processes
        self._ranks_can_be_forked = spec.container is None and rank_process.can_be_forked()
        self._gpus = node_gpus.of_this_machine() if spec.resources.gpus_per_node else node_gpus.VisibleGpus(())
        self._processes: list[subprocess.Popen[bytes]] = []

    def prepare(self, restarts: int) -> Limit | None:
        self._restarts = restarts
        self._log = _launch_log(self._folder, self._spec)
        limit = self._spec.resources.time_limit
        return None if limit is None else _asked_limit(limit)

    def clear(self) -> None:
        # the supervisor has ended everything of it on this machine
        pass

    def avoid(self, names: Container[str]) -> None:
        # all of them are this machine
        pass

    def start(self, variables: dict[str, str]) -> dict[int, str]:
        os.environ.update(simulated.job_variables(self._spec, self._supervisor, self._restarts) | variables)
        started = {self._start_rank(rank): f"rank {rank}" for rank in range(self._spec.resources.ranks)}
        if signal.SIGTERM in signal.sigpending():
            # the supervisor looked for ranks to signal before these existed
            attempt.signal_groups(started, signal.SIGTERM)
        return started

    def last_words(self) -> str:
        return self._log.last_words()

    def children(self, started: Iterable[int]) -> Mapping[int, ChildRank]:
        found = {}
        # as in `start`
        for rank, pid in enumerate(started):
            variables = simulated.rank_variables(self._spec, rank, self._gpus)
            gpus = variables.get(node_gpus.CUDA) or None
            found[pid] = ChildRank(rank, variables["SLURMD_NODENAME"], gpus)
        return found

    def _start_rank(self, rank: int) -> int:
        variables = simulated.rank_variables(self._spec, rank, self._gpus)
        parent = os.getpid()
        if not self._ranks_can_be_forked:
            command = [*rank_command.words(self._spec, self._folder, sys.executable), str(self._folder.path)]

            def enter() -> None:
                processes.die_with_parent(signal.SIGKILL, parent)
                attempt.own_group()

            process = subprocess.Popen(command, env=os.environ | variables, preexec_fn=enter)
            # kept: the next Popen reaps a dropped one, and its exit code is lost
            self._processes.append(process)
            return process.pid

        def become() -> None:
            processes.die_with_parent(signal.SIGKILL, parent)
            attempt.own_group()
            os.environ.update(variables)

        part = importlib.import_module(PARTS[self._spec.rank_part])
        return rank_process.fork(become, lambda: int(part.run_rank(self._folder)))

    def tell(self, signum: signal.Signals, batch_step: int) -> bool:
        """Send the signal to the job's processes, as SLURM does, except those to which another one forwards it."""
        below = processes.children()
        # orphans are children of this process
        found = [*below.get(os.getpid(), []), *below.get(batch_step, [])]
        ranks = [pid for pid in found if pid != batch_step]
        processes.tell(signum, ranks, below)
        if self._spec.kind != "run":
            # a worker forwards no signal to the command of its trial
            processes.tell(signum, [child for rank in ranks for child in below.get(rank, [])], below)
        return True

    def end_all(self, keep: set[int]) -> None:
        processes.end_all(str(self._folder.path), keep)

    def was_stopped_from_outside(self) -> bool:
        return False

    def aborted(self) -> bool:
        return False

    def ran_out_of_memory(self) -> bool:
        # the kernel chooses which process to kill and does not report why
        return False

    def lost(self) -> tuple[str, str] | None:
        return None

    def used_up(self, lead: int | None) -> str:
        return ""


class HeldNodes(Nodes):
    """Nodes of an allocation that the user holds. The ranks are one step of it; srun is the process to wait for."""

    # the shell that holds the allocation runs on a login node or on the first node: SLURM tells ranks which
    address = os.uname().nodename
    look_every = 2.0

    def __init__(self, folder: RunFolder, spec: Spec, job_id: str) -> None:
        self._folder = folder
        self._spec = spec
        self.job_id = job_id
        self.names: list[str] = []
        self._options: list[str] = []
        self._avoided: Container[str] = ()
        self._processes: list[subprocess.Popen[bytes]] = []

    def prepare(self, restarts: int) -> Limit | None:
        self._restarts = restarts
        found = self._held()
        resources = self._spec.resources
        busy = wait_out(lambda: steps.busy(self.job_id))
        # avoided nodes come last
        busy |= {node.name: sys.maxsize for node in found.nodes if node.name in self._avoided}
        nodes = held_allocation.choose(found, resources, busy)
        self.names = [node.name for node in nodes]
        # a login node may be behind a firewall, which srun has to pass as well
        self.ports = wait_out(site.srun_ports)
        self._options = held_allocation.srun_options(found, nodes, resources, self._spec.run)
        self._log = _launch_log(self._folder, self._spec)
        limit = found.limit(resources)
        if limit is None or limit == resources.time_limit:
            return None if limit is None else _asked_limit(limit)
        return Limit(limit, f"before the end of its allocation {self.job_id}; continue with `resume` inside a new one")

    def clear(self) -> None:
        steps.end(self.job_id, self._spec.run)

    def avoid(self, names: Container[str]) -> None:
        self._avoided = names

    def _held(self) -> Allocation:
        return wait_out(lambda: held_allocation.held({HELD_JOB_VARIABLE: self.job_id}))

    def start(self, variables: dict[str, str]) -> dict[int, str]:
        srun = [*script.ranks_command(self._spec, self._folder, self._options), str(self._folder.path)]
        lines = [*script.preparation(self._spec), f"exec {shlex.join(srun)}"]
        parent = os.getpid()

        def enter() -> None:
            attempt.own_group()
            # makes srun end the step at once
            processes.die_with_parent(signal.SIGTERM, parent)

        process = subprocess.Popen(
            ["bash", "-c", "\n".join(lines)],
            stdin=subprocess.DEVNULL,
            env=commands.scrubbed_environment(os.environ) | {"SLURM_RESTART_COUNT": str(self._restarts)} | variables,
            preexec_fn=enter,
        )
        # kept: the next Popen reaps a dropped one, and its exit code is lost
        self._processes.append(process)
        return {process.pid: "srun"}

    def describe(self, ending: attempt.Ending, followers: Collection[int]) -> str:
        return self._log.describe(ending, followers)

    def last_words(self) -> str:
        return self._log.last_words()

    def tell(self, signum: signal.Signals, batch_step: int) -> bool:
        return self._signal_step(signum)

    def end_all(self, keep: set[int]) -> None:
        self._signal_step(signal.SIGKILL)
        processes.end_all(str(self._folder.path), keep)

    def _signal_step(self, signum: signal.Signals) -> bool:
        """Signal the ranks with scancel: srun forwards only some signals, and kills the ranks on SIGTERM."""
        return steps.signal_ranks(self.job_id, self._spec.run, signum.name.removeprefix("SIG"))

    def was_stopped_from_outside(self) -> bool:
        # a cancel on another machine reaches the ranks through scancel, and the supervisor through the shared folder,
        # perhaps later
        return self._log.begins_with_sigterm()

    def aborted(self) -> bool:
        return self._log.reports_abort()

    def ran_out_of_memory(self) -> bool:
        return self._log.reports_out_of_memory()

    def lost(self) -> tuple[str, str] | None:
        return held_allocation.lost(self.job_id)

    def used_up(self, lead: int | None) -> str:
        try:
            left = self._held().seconds_left
        except UserError:
            left = 0
        except ClusterError as silent:
            return f"{silent}; `resume` continues"
        if left is None or left > 2 * (lead or 0):
            return ""
        return f"its allocation {self.job_id} is used up; continue with `resume` inside a new one"


def _launch_log(folder: RunFolder, spec: Spec) -> LaunchLog:
    return LaunchLog(folder.launch_log(supervisors.log_name(spec.executor, folder)))


def _asked_limit(seconds: int) -> Limit:
    return Limit(seconds, f"within the time limit of {seconds} s")
