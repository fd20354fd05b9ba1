"""The submission's side of the local executor: starting the supervisor of a run, and reaching it later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from mgpu_slurm import processes, records
from mgpu_slurm.errors import UserError
from mgpu_slurm.paths import RunFolder
from mgpu_slurm.slurm import scrubbed_environment
from mgpu_slurm.spec import Spec


class Supervisor:
    """A supervisor process that has not been given a run yet."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, question: str) -> str:
        """The answer to a question of `check`, as JSON; empty where the target took its process down."""
        self._say(f"ask {question}")
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def claim(self, folder: RunFolder, **changes: Any) -> str:
        """Writes down that it is the run's, with other changes of its state; returns the job id, its process id.

        Comes before the run can be seen: a submission that is killed then leaves no run that pends for ever.
        """
        pid = self._process.pid
        start = processes.started_at(pid)
        changes |= {"job_id": str(pid), "supervisor": [pid, start], "host": os.uname().nodename}
        records.update_state(folder, sync=True, **changes)
        return str(pid)

    def go(self, folder: RunFolder) -> None:
        """Lets it run the folder's spec."""
        self._say(f"go {folder.path}")

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        # a supervisor that died says so by its silence
        with suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


@contextmanager
def supervisor(spec: Spec, run: RunFolder, now_at: RunFolder) -> Iterator[Supervisor | None]:
    """The supervisor of a local run, or the coordinator of a local group; None for another executor.

    It is started early, because it imports torch meanwhile, and ends with the block unless it was told to go.

    Args:
        run: the run's folder when it starts.
        now_at: where that folder is until then.
    """
    if spec.executor != "local":
        yield None
        return
    ranks_of_function = 0 if spec.target.is_command else spec.resources.ranks
    program = ["mgpu_slurm.supervisor", str(ranks_of_function)] if spec.seeds is None else ["mgpu_slurm.coordinator"]
    with open(now_at.launch_log(log_name(run)), "a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            # libraries read their variables on import, which happens here; and /proc shows the environment that a
            # process was started with, which forks inherit, so all processes of the run carry its mark
            env=scrubbed_environment(os.environ) | _early(spec) | {processes.RUN_VARIABLE: str(run.path)},
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Supervisor(process)
    finally:
        process.stdout.close()
        with suppress(BrokenPipeError):
            process.stdin.close()


def log_name(run: RunFolder) -> str:
    """Of the supervisor's log; those of a group's runs lie beside each other."""
    return "local" if run.task is None else f"local-{run.task}"


def _early(spec: Spec) -> dict[str, str]:
    """What decides on the number of threads, and whatever else libraries ask for on import."""
    cpus = spec.resources.cpus_per_task
    return ({"SLURM_CPUS_PER_TASK": str(cpus)} if cpus else {}) | spec.environment


def is_supervised(state: dict[str, Any]) -> bool:
    """Whether the supervisor that a run's state names is alive. On another host nobody can tell: it counts as alive."""
    if state.get("host") != os.uname().nodename:
        return True
    pid, start = state.get("supervisor") or (0, None)
    return start is not None and processes.is_alive(pid, start)


def cancel(state: dict[str, Any]) -> bool:
    """Asks the supervisor to end its run, which saves first; False where there is none any more.

    Raises:
        UserError: it is a process of another machine.
    """
    host = state.get("host", "another machine")
    if host != os.uname().nodename:
        raise UserError(f"run {state['run']} is a local run of {host}: cancel it there")
    if not is_supervised(state):
        return False
    os.kill(state["supervisor"][0], signal.SIGTERM)
    return True
