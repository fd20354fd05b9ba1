"""The supervisors of runs that need no queue, on this machine or in an allocation: start one, and reach it later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from mgpu_slurm.core import interpreter, processes, records, states
from mgpu_slurm.core.errors import ClusterError, UserError
from mgpu_slurm.core.formatting import program
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.executors import held_allocation
from mgpu_slurm.executors.base import Start
from mgpu_slurm.request.spec import Spec
from mgpu_slurm.slurm import steps
from mgpu_slurm.slurm.commands import scrubbed_environment

PATIENCE_WITH_COORDINATOR = 30.0
"""Seconds that a group's coordinator gets to end once nothing is left for it to do; it may be asking SLURM."""


class Supervisor(Start):
    """A supervisor process that has not been given a run yet."""

    def __init__(self, process: subprocess.Popen[str], job_id: str) -> None:
        self._process = process
        self._job_id = job_id
        self._is_told = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def claim(self, folder: RunFolder) -> str:
        own = [self.pid, processes.started_at(self.pid)]
        records.update_state(folder, sync=True, job_id=self._job_id, supervisor=own, host=os.uname().nodename)
        return self._job_id

    def announce(self, folder: RunFolder, tasks: Sequence[int] | None, note: Note) -> None:
        """Nothing: it starts at once, or the submission fails."""

    def go(self, folder: RunFolder, dependency: str = "", note: Note = quiet) -> str:
        """Let it run the folder's spec; it waits for other runs by itself."""
        assert self._process.stdin is not None
        self._is_told = True
        # a supervisor that died says so by its silence
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"go {folder.path}\n")
            self._process.stdin.flush()
        return self._job_id

    def may_have_arrived(self, folder: RunFolder) -> bool:
        return self._is_told


@contextmanager
def supervisor(spec: Spec, run: RunFolder, now_at: RunFolder, held: str | None = None) -> Iterator[Supervisor]:
    """Start the supervisor of a run, or the coordinator of a group.

    It is started early, because it imports torch meanwhile, and ends with the block unless it was told to go.

    Args:
        run: the run's folder when it starts.
        now_at: where that folder is until then.
        held: the job of the allocation that it runs in; None on this machine.
    """
    with open(now_at.launch_log(log_name(spec.executor, run)), "a") as log, _sigterm_waits():
        process = subprocess.Popen(
            interpreter.command(sys.executable, *_program(spec)),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
            # libraries read their variables on import, which happens here; and /proc shows the environment that a
            # process was started with, which forks inherit, so all processes of the run carry its mark
            env=scrubbed_environment(os.environ) | _early(spec, held) | {processes.RUN_VARIABLE: str(run.path)},
        )
    assert process.stdin is not None
    try:
        # one on this machine is known by its process
        yield Supervisor(process, held or str(process.pid))
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()


@contextmanager
def _sigterm_waits() -> Iterator[None]:
    """A process that is started meanwhile hears a cancel once it can, also one that comes while Python starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def await_coordinator(group: RunFolder) -> None:
    """Wait until the coordinator of a group has ended, so that there is one at a time.

    Two would not know of each other's runs, nor of what those have of the machine. One on another machine does not
    count, for nobody can tell whether it lives: it starts nothing that has ended.

    Raises:
        UserError: it is at work.
    """
    state = records.read_state(group)
    give_up = time.monotonic() + PATIENCE_WITH_COORDINATOR
    while state["tasks"] is not None and is_here(state) and is_supervised(state):
        is_at_work = any(states.is_alive(each["state"]) for _, each in records.read_states(group))
        if is_at_work or time.monotonic() > give_up:
            raise UserError(
                f"group {group.run} is at work, and starts its runs itself: `{program()} wait {group.run}` for its end,"
                f" or `{program()} cancel {group.run}` first"
            )
        # its last run has ended a moment before; or all were cancelled one by one, and it still waits for other runs
        cancel(group, state)
        time.sleep(0.02)


def _program(spec: Spec) -> list[str]:
    if spec.tasks is not None:
        return ["mgpu_slurm.job", "coordinator"]
    ranks_of_function = 0 if spec.target.is_command else spec.resources.ranks
    return ["mgpu_slurm.job", "supervisor", spec.executor, str(ranks_of_function)]


def log_name(executor: str, run: RunFolder) -> str:
    """Of the supervisor's log; those of a group's runs lie beside each other."""
    return executor if run.task is None else f"{executor}-{run.task}"


def _early(spec: Spec, held: str | None) -> dict[str, str]:
    """For the supervisor: the allocation's job, or for ranks that are forked from it, what decides on the number of
    threads and whatever else libraries ask for on import."""
    if held is not None:
        return {held_allocation.JOB_VARIABLE: held}
    cpus = spec.resources.cpus_per_task
    return ({"SLURM_CPUS_PER_TASK": str(cpus)} if cpus else {}) | spec.environment


def is_here(state: dict[str, Any]) -> bool:
    """Whether a run's supervisor is, or was, a process of this machine."""
    return bool(state.get("host") == os.uname().nodename)


def is_supervised(state: dict[str, Any]) -> bool:
    """Whether the supervisor that a run's state names is alive. On another host nobody can tell: it counts as alive."""
    if not is_here(state):
        return True
    pid, start = state.get("supervisor") or (0, None)
    return start is not None and processes.is_alive(pid, start)


def started_nodes(folder: RunFolder) -> list[str]:
    """Return the nodes on which the supervisor of a run has started its ranks last.

    Raises:
        UserError: it has not yet.
    """
    started = [event for event in records.events(folder) if event["event"] == "started"]
    if not started:
        raise UserError(f"run {folder.run} has not started its ranks yet: try again in a moment")
    nodes: list[str] = started[-1]["nodes"]
    return nodes


def cancel(folder: RunFolder, state: dict[str, Any]) -> bool:
    """Asks the supervisor to end its run, which saves first; False where there is none any more.

    Raises:
        UserError: it is a process of another machine, and so are the ranks.
    """
    if not is_here(state):
        return _cancel_elsewhere(folder, state)
    if not is_supervised(state):
        return False
    with suppress(ProcessLookupError):
        os.kill(state["supervisor"][0], signal.SIGTERM)
        return True
    return False


def _cancel_elsewhere(folder: RunFolder, state: dict[str, Any]) -> bool:
    if state["executor"] != "allocation":
        host = state.get("host", "another machine")
        raise UserError(f"run {state['run']} is a local run of {host}: cancel it there")
    # its supervisor finds the wish in the shared folder, which may take a while; scancel reaches its ranks at once
    folder.cancel_wish.touch()
    with suppress(ClusterError):
        steps.signal_ranks(state["job_id"], state["run"], "TERM")
    return True
