"""Where the supervisor's ranks run: simulated nodes of this machine, or the nodes of an allocation that is held.

What differs is how ranks are started and called, how signals reach them, and how long the nodes are there.
"""

from __future__ import annotations

import importlib
import os
import shlex
import signal
import subprocess
import sys
import traceback
from collections.abc import Container
from dataclasses import dataclass
from typing import Protocol

from mgpu_slurm.core import interpreter, processes
from mgpu_slurm.core.errors import ClusterError, UserError
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.executors import held_allocation, simulated, supervisors
from mgpu_slurm.executors.held_allocation import Allocation
from mgpu_slurm.job import PARTS, attempt
from mgpu_slurm.job.srun_log import LaunchLog
from mgpu_slurm.request.spec import Spec
from mgpu_slurm.slurm import commands, script, site, steps
from mgpu_slurm.slurm.outage import wait_out
from mgpu_slurm.training import entry


@dataclass(frozen=True)
class Limit:
    """How long an attempt may take."""

    seconds: int
    words: str
    """To go on from `did not end`."""


class Nodes(Protocol):
    """Where attempts run. All but `start` is called in the supervisor, `start` in an attempt's batch step."""

    job_id: str
    names: list[str]
    """Of the attempt's nodes."""
    address: str
    """What the ranks call this machine."""
    ports: range | None
    """On which they reach it; None for any."""
    look_every: float
    """Seconds between two looks for a cancel that comes from another machine."""

    def prepare(self) -> Limit | None:
        """Settles where the next attempt runs, and how long it may; None for as long as it takes.

        Raises:
            UserError: the nodes do not have what the run needs.
            ClusterError: they cannot be asked for.
        """

    def clear(self) -> None:
        """Makes sure that nothing of an attempt that has failed is left.

        Raises:
            ClusterError: nobody can tell.
        """

    def avoid(self, names: Container[str]) -> None:
        """Takes other nodes for the next attempts than these, if there are enough."""

    def start(self, rendezvous: dict[str, str], restarts: int) -> dict[int, str]:
        """Starts the ranks with these variables added; the names of the processes to wait for, by pid."""

    def describe(self, ending: attempt.Ending) -> str:
        """Tells a failure in words where no rank did."""

    def tell(self, signum: signal.Signals, batch_step: int) -> bool:
        """Sends every rank a signal that it may act on; False where there is none, yet.

        Raises:
            ClusterError: they cannot be reached.
        """

    def end_all(self, keep: set[int]) -> None:
        """Ends what is left of an attempt at once, but for these processes of this machine.

        Raises:
            ClusterError: they cannot be reached.
        """

    def told_by_others(self) -> bool:
        """Whether the ranks of an attempt that failed had been told to end, by somebody else than the supervisor."""

    def aborted(self) -> bool:
        """Whether the ranks of an attempt were ended from outside, whatever its exit code."""

    def ran_out_of_memory(self) -> bool:
        """Whether an attempt that failed did so for that."""

    def lost(self) -> tuple[str, str] | None:
        """State and reason of a run whose nodes were taken away; None while they are there."""

    def used_up(self, lead: int | None) -> str:
        """Why another attempt is not worth its start; empty where it is."""


class SimulatedNodes:
    """This machine, as several nodes. Ranks are forked, so that torch is imported once for all."""

    address = simulated.ADDRESS
    ports: range | None = None
    look_every = 3600.0

    def __init__(self, folder: RunFolder, spec: Spec) -> None:
        self._folder = folder
        self._spec = spec
        self._supervisor = os.getpid()
        self.job_id = str(self._supervisor)
        self.names = simulated.node_names(spec)
        # a lock that another thread holds stays locked in a fork for ever; then ranks are started afresh
        self._ranks_can_be_forked = processes.thread_count() == 1
        self._gpus = simulated.visible_gpus() if spec.resources.gpus_per_node else []
        self._processes: list[subprocess.Popen[bytes]] = []

    def prepare(self) -> Limit | None:
        limit = self._spec.resources.time_limit
        return None if limit is None else _asked_limit(limit)

    def clear(self) -> None:
        # the supervisor has ended all that this machine has of it
        pass

    def avoid(self, names: Container[str]) -> None:
        # all of them are this machine
        pass

    def start(self, rendezvous: dict[str, str], restarts: int) -> dict[int, str]:
        os.environ.update(simulated.job_variables(self._spec, self._supervisor, restarts) | rendezvous)
        started = {self._start_rank(rank): f"rank {rank}" for rank in range(self._spec.resources.ranks)}
        if signal.SIGTERM in signal.sigpending():
            # the supervisor looked for ranks to tell when these were not there yet
            attempt.signal_groups(started, signal.SIGTERM)
        return started

    def _start_rank(self, rank: int) -> int:
        variables = simulated.rank_variables(self._spec, rank, self._gpus)
        parent = os.getpid()
        if not self._ranks_can_be_forked:
            command = interpreter.command(
                sys.executable, "mgpu_slurm.job", self._spec.rank_part, str(self._folder.path)
            )

            def enter() -> None:
                processes.die_with_parent(signal.SIGKILL, parent)
                attempt.own_group()

            process = subprocess.Popen(command, env=os.environ | variables, preexec_fn=enter)
            # a dropped Popen is collected by the next one, and its exit code with it
            self._processes.append(process)
            return process.pid
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                processes.die_with_parent(signal.SIGKILL, parent)
                attempt.own_group()
                os.environ.update(variables)
                code = importlib.import_module(PARTS[self._spec.rank_part]).run_rank(self._folder)
            except BaseException:
                # the way out below would swallow it
                traceback.print_exc()
            finally:
                entry.exit_process(code)
        return pid

    def describe(self, ending: attempt.Ending) -> str:
        return attempt.describe_exit(ending)

    def tell(self, signum: signal.Signals, batch_step: int) -> bool:
        """To the processes of the job, as SLURM does, but to none that another one passes it on to."""
        below = processes.children()
        # those that have lost their parent are children of this process
        found = [*below.get(os.getpid(), []), *below.get(batch_step, [])]
        ranks = [pid for pid in found if pid != batch_step]
        processes.tell(signum, ranks, below)
        if self._spec.kind != "run":
            # a worker passes nothing on to the command of its trial
            processes.tell(signum, [child for rank in ranks for child in below.get(rank, [])], below)
        return True

    def end_all(self, keep: set[int]) -> None:
        processes.end_all(str(self._folder.path), keep)

    def told_by_others(self) -> bool:
        return False

    def aborted(self) -> bool:
        return False

    def ran_out_of_memory(self) -> bool:
        # the kernel kills whichever process it likes best, and tells nobody why
        return False

    def lost(self) -> tuple[str, str] | None:
        return None

    def used_up(self, lead: int | None) -> str:
        return ""


class HeldNodes:
    """Nodes of an allocation that the user holds. Ranks are a step of it, and srun is the process to wait for."""

    # the shell that holds the allocation stands on a login node or on the first node: ranks learn from SLURM where
    address = os.uname().nodename
    look_every = 2.0

    def __init__(self, folder: RunFolder, spec: Spec, job_id: str) -> None:
        self._folder = folder
        self._spec = spec
        self.job_id = job_id
        self.names: list[str] = []
        self.ports: range | None = None
        self._options: list[str] = []
        self._avoided: Container[str] = ()
        self._processes: list[subprocess.Popen[bytes]] = []

    def prepare(self) -> Limit | None:
        found = self._held()
        resources = self._spec.resources
        busy = wait_out(lambda: steps.busy(self.job_id))
        # those come last of all
        busy |= {node.name: sys.maxsize for node in found.nodes if node.name in self._avoided}
        nodes = held_allocation.choose(found, resources, busy)
        self.names = [node.name for node in nodes]
        # a login node may be behind a firewall that srun itself has to get through
        self.ports = wait_out(site.srun_ports)
        self._options = held_allocation.srun_options(found, nodes, resources, self._spec.run)
        self._log = LaunchLog(self._folder.launch_log(supervisors.log_name(self._spec.executor, self._folder)))
        limit = found.limit(resources)
        if limit is None or limit == resources.time_limit:
            return None if limit is None else _asked_limit(limit)
        return Limit(limit, f"before the end of its allocation {self.job_id}; continue with `resume` inside a new one")

    def clear(self) -> None:
        steps.end(self.job_id, self._spec.run)

    def avoid(self, names: Container[str]) -> None:
        self._avoided = names

    def _held(self) -> Allocation:
        return wait_out(lambda: held_allocation.held({held_allocation.JOB_VARIABLE: self.job_id}))

    def start(self, rendezvous: dict[str, str], restarts: int) -> dict[int, str]:
        srun = [*script.ranks_command(self._spec, self._options), str(self._folder.path)]
        lines = [*script.preparation(self._spec), f"exec {shlex.join(srun)}"]
        parent = os.getpid()

        def enter() -> None:
            attempt.own_group()
            # to srun that is an order to end the step at once
            processes.die_with_parent(signal.SIGTERM, parent)

        process = subprocess.Popen(
            ["bash", "-c", "\n".join(lines)],
            stdin=subprocess.DEVNULL,
            env=commands.scrubbed_environment(os.environ) | {"SLURM_RESTART_COUNT": str(restarts)} | rendezvous,
            preexec_fn=enter,
        )
        # a dropped Popen is collected by the next one, and its exit code with it
        self._processes.append(process)
        return {process.pid: "srun"}

    def describe(self, ending: attempt.Ending) -> str:
        return self._log.describe(ending)

    def tell(self, signum: signal.Signals, batch_step: int) -> bool:
        return self._signal_step(signum)

    def end_all(self, keep: set[int]) -> None:
        self._signal_step(signal.SIGKILL)
        processes.end_all(str(self._folder.path), keep)

    def _signal_step(self, signum: signal.Signals) -> bool:
        """By scancel: srun passes on some signals only, and kills the ranks where it gets a SIGTERM."""
        return steps.signal_ranks(self.job_id, self._spec.run, signum.name.removeprefix("SIG"))

    def told_by_others(self) -> bool:
        # a cancel on another machine reaches the ranks by scancel, and the supervisor maybe later by the shared folder
        return self._log.begins_with_sigterm()

    def aborted(self) -> bool:
        return self._log.tells_of_an_abort()

    def ran_out_of_memory(self) -> bool:
        return self._log.tells_of_too_little_memory()

    def lost(self) -> tuple[str, str] | None:
        return held_allocation.lost(self.job_id)

    def used_up(self, lead: int | None) -> str:
        try:
            left = self._held().seconds_left
        except UserError:
            left = 0
        except ClusterError as silent:
            return f"{silent}; `resume` goes on"
        if left is None or left > 2 * (lead or 0):
            return ""
        return f"its allocation {self.job_id} is used up; continue with `resume` inside a new one"


def _asked_limit(seconds: int) -> Limit:
    return Limit(seconds, f"within the time limit of {seconds} s")
