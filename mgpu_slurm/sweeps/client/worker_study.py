"""One attempt of a worker's access to the study, the sweep file and the files for `status`."""

from __future__ import annotations

import math
import os
import time
from contextlib import nullcontext, suppress
from typing import Any

from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from mgpu_slurm.core import log_lines
from mgpu_slurm.core.files import locked
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.scheduling.construction import scheduler_of
from mgpu_slurm.sweeps.scheduling.scheduler import Snapshot
from mgpu_slurm.sweeps.search import sweep_file
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import recovery, summary
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.claims import Worker, claims
from mgpu_slurm.sweeps.study.snapshots import Snapshots

LOOK_EVERY = 30.0
"""Seconds between two checks for dead workers, over all workers."""

SUMMARY_SHARE = 0.02
"""Largest share of a worker's time for writing summaries between trials."""


class WorkerStudy:
    """The state that a worker shares with the other workers of its sweep."""

    def __init__(self, folder: RunFolder, attempt: int, process: int = 0) -> None:
        """
        Args:
            folder: the folder of the worker.
            process: that of a worker with several, from 1; 0 for others.
        """
        assert folder.task is not None
        self.folder = folder
        self.sweep_folder = folder.group
        self.worker = Worker(folder.task, attempt, process)
        self._sweep_written = 0
        self.sweep: Sweep
        self.reread_sweep()
        self.study: Study = studies.load(self.sweep, folder.journal, self.worker)
        self.scheduler = scheduler_of(self.sweep.pruner, self.sweep.direction)
        self.snapshots = Snapshots(self.study, self.scheduler)
        self._next_look = time.monotonic()
        self._summary_written, self._summary_took = -math.inf, 0.0
        self.summary_is_due = False

    def reread_sweep(self) -> bool:
        """Read the sweep file again if it has changed, and return whether it has."""
        # opened first: a network file system may report an old time for a file that is not open
        with open(self.folder.sweep, "rb") as file:
            written = os.fstat(file.fileno()).st_mtime_ns
        if written == self._sweep_written:
            return False
        self._sweep_written = written
        self.sweep = sweep_file.load(self.folder.sweep)
        return True

    def trials(self) -> list[FrozenTrial]:
        """Return the study's own trials in their current state."""
        return summary.own_trials(self.study)

    def had(self, trial: FrozenTrial) -> bool:
        """Return whether this attempt of the worker, by any of its processes, trains or has ended a trial."""
        return claims(trial).get(self.worker.number) == self.worker.attempt

    def others_train(self) -> bool:
        """Return whether another process of this worker trains a trial, while this one has none."""
        return bool(self.worker.process) and any(
            trial.state == TrialState.RUNNING and self.had(trial) for trial in self.trials()
        )

    def is_busy(self) -> bool:
        """Return whether a trial is trained, or waits for a worker to continue it."""
        return any(
            trial.state == TrialState.RUNNING or studies.was_given_back(trial, self.sweep) for trial in self.trials()
        )

    def snapshot(self) -> Snapshot:
        """Return the study's own trials for the scheduler; the caller must hold the lock if trials may pause."""
        return self.snapshots.take(self.sweep.trials, is_over=studies.why_over(self.study) is not None)

    def recover(self, at_once: bool = False) -> None:
        """Release the trials of dead workers.

        Args:
            at_once: check now; if False, only if no worker has checked for a while.
        """
        if not at_once and time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_EVERY
        every = 0.0 if at_once else LOOK_EVERY
        found = recovery.look(self.study, self.sweep_folder, self.sweep, log_lines.say, every)
        if found:
            log_lines.say(f"released trials of dead workers: {', '.join(map(str, found))}")

    def show(self, leaving: int | None = None, **changes: Any) -> None:
        """Change what `status` shows of the worker.

        Args:
            leaving: the attempt, if it has found nothing left to do.
        """
        process = self.worker.process
        # only for people: a full disk must not end a trial
        with suppress(OSError), locked(self.folder.state.with_suffix(".lock")) if process else nullcontext():
            state = records.read_state(self.folder)
            # an attempt that SLURM gave up with its node must not change the state of a later attempt
            if state.attempts > self.worker.attempt:
                return
            if process and leaving is None:
                known = state.processes or {}
                changes = {"processes": {**known, str(process): {**known.get(str(process), {}), **changes}}}
            elif leaving is not None:
                changes |= {"leaving": leaving, "processes": None}
            records.update_state(self.folder, sync=False, **changes)

    def write_summary(self, at_once: bool = True) -> None:
        """Write the summary of the sweep.

        Args:
            at_once: write it now; if False, wait for a later report if summaries would take too much time.
        """
        began = time.monotonic()
        self.summary_is_due = not at_once and began < self._summary_written + self._summary_took / SUMMARY_SHARE
        if self.summary_is_due:
            return
        # only for people: a full disk must not end a trial
        with suppress(OSError):
            summary.write(self.sweep_folder, self.study, self.sweep)
        self._summary_written = time.monotonic()
        self._summary_took = self._summary_written - began
