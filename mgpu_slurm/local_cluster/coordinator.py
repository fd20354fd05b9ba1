"""The local executor's process per group: starts the supervisors of its runs, as many at a time as fit.

It is started like a supervisor (see `executors.supervisors`) and expects `go GROUP_FOLDER`. Started runs outlive it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mgpu_slurm.core import node_gpus, processes
from mgpu_slurm.core.files import set_umask_for
from mgpu_slurm.executors import supervisors
from mgpu_slurm.executors.base import HELD_JOB_VARIABLE
from mgpu_slurm.registry import dependencies
from mgpu_slurm.request.spec import Spec, read_spec
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState

_WATCHED = {signal.SIGCHLD, signal.SIGTERM}


def main() -> None:
    # a cancel before the first run stays pending until then
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    word, _, rest = sys.stdin.readline().rstrip("\n").partition(" ")
    # an empty input means that the submission was refused
    if word == "go":
        folder = RunFolder(Path(rest))
        spec = read_spec(folder)
        set_umask_for(spec.readable_by)
        Coordinator(folder, spec).run()


class Coordinator:
    """Runs all pending runs of a group that belong to this process. SIGTERM cancels them."""

    def __init__(self, folder: RunFolder, spec: Spec) -> None:
        self._folder = folder
        self._spec = spec
        self._identity = [os.getpid(), processes.started_at(os.getpid())]
        self._shares = deque(shares(spec))
        self._alive: dict[tuple[int, int], dict[str, str]] = {}
        """Share of the machine of each supervisor, by pid and start time."""

    def run(self) -> None:
        waiting = deque(member for member, state in records.read_states(self._folder) if self._is_own(state))
        problem = dependencies.wait(self._folder, self._spec.after)
        if problem:
            self._cancel(waiting, problem)
        while waiting or self._alive:
            while waiting and self._shares:
                self._start(waiting.popleft())
            if not self._alive:
                # other processes have cancelled the waiting runs
                continue
            received = signal.sigtimedwait(_WATCHED, 3600)
            if received is not None and received.si_signo == signal.SIGTERM:
                self._cancel(waiting, "cancelled")
            self._collect()

    def _start(self, folder: RunFolder) -> None:
        if not self._is_own(records.read_state(folder)):
            # cancelled while it waited
            return
        share = self._shares.popleft()
        spec = read_spec(folder)
        spec = replace(spec, environment=share | spec.environment)
        folder.create_task()
        # not set for runs on this machine
        held = os.environ.get(HELD_JOB_VARIABLE)
        with supervisors.supervisor(spec, folder, folder, held) as supervisor:
            pid = supervisor.pid
            supervisor.claim(folder)
            supervisor.go(folder, spec)
        start = processes.started_at(pid)
        if start is None:
            self._shares.append(share)
        else:
            self._alive[pid, start] = share

    def _collect(self) -> None:
        processes.reap()
        for pid, start in list(self._alive):
            if not processes.is_alive(pid, start):
                self._shares.append(self._alive.pop((pid, start)))

    def _cancel(self, waiting: deque[RunFolder], reason: str) -> None:
        for pid, _ in self._alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for folder in waiting:
            if self._is_own(records.read_state(folder)):
                records.cancel_unstarted(folder, reason)
        waiting.clear()

    def _is_own(self, state: RunState) -> bool:
        """Return whether a run waits for this process to start it; once started, it belongs to its supervisor."""
        return state.state == states.PENDING and supervisors.is_here(state) and bool(state.supervisor == self._identity)


def shares(spec: Spec) -> list[dict[str, str]]:
    """Return the environment of each slot for a run: on this machine, its GPUs and number of threads."""
    if not spec.nodes_are_simulated:
        # each run may use the whole allocation
        return [{}] * (spec.at_once or 1)
    resources = spec.resources
    gpus = node_gpus.of_this_machine() if resources.gpus_per_node else node_gpus.VisibleGpus(())
    each = resources.gpus
    places = len(gpus) // each if each else spec.at_once or processes.cores() // resources.ranks
    places = max(1, min(places, spec.at_once or places, spec.tasks or 1))
    threads = max(1, processes.cores() // (places * resources.ranks))
    return [
        {"OMP_NUM_THREADS": str(threads)} | (gpus.chosen(range(place * each, (place + 1) * each)) if each else {})
        for place in range(places)
    ]


if __name__ == "__main__":
    main()
