"""The process that sends the reports of a run to trackers, next to the batch step or supervisor of the run.

It is started with all signals blocked, and ends when its standard input, a socket, is shut down by the process that has
started it or by its end. What it does is never waited for by the ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mgpu_slurm.core import processes
from mgpu_slurm.core.files import set_umask_for
from mgpu_slurm.request.spec import Spec, read_spec
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.sweep_records import confirmation_of
from mgpu_slurm.trackers import outcome
from mgpu_slurm.trackers.described import standing
from mgpu_slurm.trackers.destinations import Destination
from mgpu_slurm.trackers.sending import Sender

FIRST_LOOK, LOOK_EVERY, LOOK_AT_TRIALS_EVERY = 1.0, 5.0, 30.0
"""Seconds until the first look at the run, and between two; there may be thousands of trials."""

LAST_PAUSES = (0.0, 1.0, 2.0, 4.0)
"""Seconds before each look at the end of the job, as long as something was not sent."""


def main(folder: RunFolder) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    is_over = threading.Event()
    threading.Thread(target=_hear_the_end, args=(is_over,), name="end of the job", daemon=True).start()
    # a library of an earlier process, which was killed, may still be writing
    processes.end_marked(processes.SINK_VARIABLE, str(folder.path))
    # each trial has a lock
    processes.allow_many_files()
    spec = read_spec(folder.group)
    set_umask_for(spec.readable_by)
    senders = Senders(folder, spec)
    pause = FIRST_LOOK
    # a run that was deleted needs no sender
    while os.path.exists(folder.spec):
        if is_over.wait(pause):
            _look_at_last(senders)
            return
        senders.look(is_job_over=False)
        pause = LOOK_EVERY if spec.kind == "run" else LOOK_AT_TRIALS_EVERY


def _look_at_last(senders: Senders) -> None:
    for pause in LAST_PAUSES:
        time.sleep(pause)
        if senders.look(is_job_over=True):
            return


def _hear_the_end(is_over: threading.Event) -> None:
    """Wait for the end of the job, and limit the time that is left to this process, even if a library hangs."""
    # processes of libraries do not inherit it
    connection = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    with suppress(OSError):
        os.read(connection, 1)
    signal.alarm(outcome.FINISH_SECONDS)
    is_over.set()


class Senders:
    """A sender for the run, or for each trial of the sweep whose worker it is."""

    def __init__(self, folder: RunFolder, spec: Spec) -> None:
        """
        Args:
            spec: of the run, or of its group.
        """
        self._folder = folder
        self._spec = spec
        self._destinations = [Destination.parse(text) for text in spec.sinks]
        self._senders: dict[Path, Sender] = {}
        """By the folders of runs."""
        self._done: set[Path] = set()
        """The folders of trials, or of their runs with several seeds, of which everything was sent."""

    def look(self, is_job_over: bool) -> bool:
        """Send what is settled now; return whether that was everything."""
        try:
            # such as a disk that fails for a moment
            runs = list(self._runs())
        except Exception:
            traceback.print_exc()
            return False
        for run in runs:
            try:
                self._look_at(run, is_job_over)
            except Exception:
                traceback.print_exc()
        return all(run.path in self._done for run in runs)

    def _look_at(self, run: RunFolder, is_job_over: bool) -> None:
        if run.path not in self._senders:
            if outcome.has_all(run, self._spec.sinks) and standing(run, is_job_over).is_final:
                self._done.add(run.path)
                return
            self._senders[run.path] = Sender(run, self._spec, self._destinations)
        if self._senders[run.path].look(is_job_over):
            self._senders.pop(run.path).close()
            self._done.add(run.path)

    def _runs(self) -> Iterator[RunFolder]:
        if self._spec.kind == "run":
            yield self._folder
            return
        # any worker's process sends any trial: the first that finds it unsent
        sweep = self._folder.group
        for each in (sweep, RunFolder(sweep.path.with_name(confirmation_of(sweep.path.name)))):
            yield from outcome.runs_of_sweep(each, self._done)


if __name__ == "__main__":
    main(RunFolder(Path(sys.argv[1])))
    # libraries have threads that wait for a server
    os._exit(0)
