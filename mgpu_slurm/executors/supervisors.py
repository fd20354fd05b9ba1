"""The supervisors of runs without a queue, on this machine or in an allocation: start one, and reach it later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from mgpu_slurm.core import interpreter, processes
from mgpu_slurm.core.errors import ClusterError, UserError
from mgpu_slurm.core.formatting import program
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.executors.base import HELD_JOB_VARIABLE, Living, Start
from mgpu_slurm.request.spec import Spec
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.slurm import steps
from mgpu_slurm.slurm.commands import scrubbed_environment

PATIENCE_WITH_COORDINATOR = 30.0
"""Seconds for a group's coordinator to end once it has nothing left to do; it may be asking SLURM."""


class Supervisor(Start):
    """A supervisor process that has no run yet."""

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
        """Do nothing: the run starts at once, or the submission fails."""

    def go(self, folder: RunFolder, spec: Spec, dependency: str = "", note: Note = quiet) -> str:
        """Let the supervisor run the folder's own spec; it waits for other runs by itself."""
        assert self._process.stdin is not None
        self._is_told = True
        # a dead supervisor is noticed because it does nothing
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"go {folder.path}\n")
            self._process.stdin.flush()
        return self._job_id

    def may_have_arrived(self, folder: RunFolder) -> bool:
        return self._is_told


@contextmanager
def supervisor(spec: Spec, run: RunFolder, now_at: RunFolder, held: str | None = None) -> Iterator[Supervisor]:
    """Start the supervisor of a run, or the coordinator of a group.

    It starts early, to import torch meanwhile, and ends with the block unless `go` was called.

    Args:
        run: the run's folder at the start.
        now_at: the folder's place until then.
        held: the job id of its allocation; None on this machine.
    """
    with open(now_at.launch_log(log_name(spec.executor, run)), "a") as log, _sigterm_waits():
        process = subprocess.Popen(
            interpreter.command(sys.executable, *_program(spec)),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
            # libraries read their variables on import, which happens in this process; and /proc shows the environment
            # a process was started with, which forks inherit, so all processes of the run can be recognized
            env=scrubbed_environment(os.environ) | _early(spec, held) | {processes.RUN_VARIABLE: str(run.path)},
        )
    assert process.stdin is not None
    try:
        # on this machine the job id is the process id
        yield Supervisor(process, held or str(process.pid))
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()


@contextmanager
def _sigterm_waits() -> Iterator[None]:
    """Block SIGTERM, so that a process started meanwhile receives a cancel even while Python starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def await_coordinator(group: RunFolder) -> None:
    """Wait until the coordinator of a group has ended, so that there is only one at a time.

    Two would not know each other's runs, nor the resources those use. One on another machine does not count, because
    it is unknown whether it is alive; it starts nothing that has ended.

    Raises:
        UserError: it still has running runs.
    """
    state = records.read_state(group)
    give_up = time.monotonic() + PATIENCE_WITH_COORDINATOR
    while state.tasks is not None and is_here(state) and is_supervised(state):
        is_at_work = any(states.is_alive(each.state) for _, each in records.read_states(group))
        if is_at_work or time.monotonic() > give_up:
            raise UserError(
                f"group {group.run} is running and starts its runs itself: `{program()} wait {group.run}`,"
                f" or `{program()} cancel {group.run}` first"
            )
        # its last run ended a moment ago; or all were cancelled one by one, and it still waits for other runs
        _cancel(group, state)
        time.sleep(0.02)


def _program(spec: Spec) -> list[str]:
    if spec.tasks is not None:
        return ["mgpu_slurm.job", "coordinator"]
    ranks_of_function = 0 if spec.target.is_command else spec.resources.ranks
    return ["mgpu_slurm.job", "supervisor", spec.executor, str(ranks_of_function)]


def log_name(executor: str, run: RunFolder) -> str:
    """Return the name of the supervisor's log; those of a group's runs are in the same folder."""
    return executor if run.task is None else f"{executor}-{run.task}"


def _early(spec: Spec, held: str | None) -> dict[str, str]:
    """Return variables for the supervisor: the allocation's job id, or, for ranks forked from it, those that libraries
    read on import, such as the number of threads."""
    if held is not None:
        return {HELD_JOB_VARIABLE: held}
    cpus = spec.resources.cpus_per_task
    return ({"SLURM_CPUS_PER_TASK": str(cpus)} if cpus else {}) | spec.environment


def is_here(state: RunState) -> bool:
    """Return whether a run's supervisor is, or was, a process of this machine."""
    return bool(state.host == os.uname().nodename)


def is_supervised(state: RunState) -> bool:
    """Return whether the supervisor in a run's state is alive. On another host this is unknown: it counts as alive."""
    if not is_here(state):
        return True
    return bool(state.supervisor) and processes.is_alive(*_identity(state))


def _identity(state: RunState) -> tuple[int, int]:
    """Return the process id and start time of the supervisor in a run's state."""
    assert state.supervisor is not None
    pid, started_at = state.supervisor
    return pid, started_at


def started_nodes(folder: RunFolder) -> list[str]:
    """Return the nodes on which the supervisor of a run last started its ranks.

    Raises:
        UserError: it has not started them yet.
    """
    started = [event for event in records.events(folder) if event.event == "started"]
    if not started:
        raise UserError(f"run {folder.run} has not started its ranks yet: try again in a moment")
    return list(started[-1].nodes)


def cancel_all(folder: RunFolder, living: Living) -> bool:
    """Ask the supervisors of the living runs of a run or group to end them; return whether any could be reached.

    Raises:
        UserError: the supervisors and the ranks are on another machine.
    """
    if folder.task is None and any(_is_waiting(member, state) for member, state in living):
        # the coordinator then starts no more runs, and waits for no dependency
        _cancel(folder, records.read_state(folder))
    reached = [_cancel_member(member, state) for member, state in living]
    return any(reached)


def _cancel_member(folder: RunFolder, state: RunState) -> bool:
    """Cancel a run, even one of a group that has not started yet."""
    if _is_waiting(folder, state):
        # a supervisor that is started for it meanwhile finds the request
        folder.create_task()
        folder.cancel_request.touch()
        state = records.read_state(folder)
    if _is_waiting(folder, state):
        records.cancel_unstarted(folder, "cancelled")
        return True
    return _cancel(folder, state)


def _is_waiting(folder: RunFolder, state: RunState) -> bool:
    """Return whether a run waits for its group's coordinator to start it."""
    return folder.task is not None and state.job_id is None


def _cancel(folder: RunFolder, state: RunState) -> bool:
    """Ask the supervisor to end its run, which saves first; return False if there is no supervisor any more.

    Raises:
        UserError: the supervisor and the ranks are on another machine.
    """
    if not is_here(state):
        return _cancel_elsewhere(folder, state)
    if not is_supervised(state):
        return False
    with suppress(ProcessLookupError):
        os.kill(_identity(state)[0], signal.SIGTERM)
        return True
    return False


def _cancel_elsewhere(folder: RunFolder, state: RunState) -> bool:
    if state.executor != "allocation":
        raise UserError(f"run {state.run} is a local run on {state.host or 'another machine'}: cancel it there")
    # its supervisor finds the request in the shared folder, which may take a while; scancel reaches the ranks at once
    folder.cancel_request.touch()
    if state.job_id is not None:
        with suppress(ClusterError):
            steps.signal_ranks(state.job_id, state.run, "TERM")
    return True
