"""Send the reports of a run to its trackers: each settled report once, whatever ends the sending process."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress

from mgpu_slurm.core import files, log_lines
from mgpu_slurm.core.formatting import cut, first_line
from mgpu_slurm.request.spec import Spec
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Report
from mgpu_slurm.trackers.described import Standing, describe, standing
from mgpu_slurm.trackers.destinations import MLFLOW, Destination
from mgpu_slurm.trackers.outcome import Sent, lock_of, read_sent, write_sent
from mgpu_slurm.trackers.settled import Reports
from mgpu_slurm.trackers.tracker import TrackedRun, Tracker

LONGEST_PROBLEM = 200

FIRST_PAUSE, LONGEST_PAUSE = 10.0, 300.0
"""Seconds until a tracker that has failed is tried again; doubled each time."""


def connect(destination: Destination, run: TrackedRun) -> Tracker:
    """Return a run in a tracker, whose library is imported now."""
    if destination.tracker == MLFLOW:
        from mgpu_slurm.trackers.adapters.mlflow_tracker import MlflowTracker

        return MlflowTracker(destination.place, run)
    from mgpu_slurm.trackers.adapters.wandb_tracker import WandbTracker

    return WandbTracker(destination.place, run)


class Link:
    """A run and one of its trackers."""

    def __init__(self, folder: RunFolder, spec: Spec, destination: Destination, before: Sent | None) -> None:
        """
        Args:
            before: what an earlier process has sent there.
        """
        self._folder = folder
        self._spec = spec
        self._destination = destination
        self._tracker: Tracker | None = None
        self._next_try = 0.0
        self._pause = FIRST_PAUSE
        self.sent = before or Sent(str(destination))
        self.new = 0
        """The number of reports that this process has sent."""
        self._told: tuple[int, int] | None = None
        """The last attempt and the number of reports when this process has told the tracker of the end."""

    def pass_on(self, due: Sequence[Report], at_end: Standing | None, waits: bool) -> None:
        """Send what the tracker lacks of these reports, the first of the run. An error is recorded; a later call tries
        again.

        Args:
            at_end: how the run stands, if it has ended.
            waits: whether a tracker that has failed is left alone for a while.
        """
        if waits and time.monotonic() < self._next_try:
            return
        if at_end is not None and self._told == (at_end.attempts, len(due)):
            # another tracker of the run has failed
            return
        try:
            self._send(due)
            if at_end is not None:
                assert self._tracker is not None
                self._tracker.finish(at_end.status, at_end.tags, at_end.ended)
                self._tracker = None
                self._told = at_end.attempts, len(due)
                self.sent = self.sent.changed(ended=records.now(), attempt=at_end.attempts)
            self.sent, self._pause = self.sent.changed(problem=""), FIRST_PAUSE
        except Exception as error:
            self._tracker = None
            self._next_try = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            problem = cut(f"{type(error).__name__}: {first_line(str(error))}", LONGEST_PROBLEM)
            if problem != self.sent.problem:
                log_lines.warn(f"{self._destination.tracker}: {problem}")
            self.sent = self.sent.changed(problem=problem)

    def _send(self, due: Sequence[Report]) -> None:
        tracker = self._tracker or connect(self._destination, describe(self._folder, self._spec))
        last = max((report.progress for report in due), default=0)
        if self._tracker is None or last > self.sent.progress:
            # it may have more than was sent from here: a failed run was exported, and then resumed
            new = tracker.missing(due)
            tracker.send(new)
            self.new += len(new)
            step = due[-1].step if due else 0
            count = {"reports": len(due), "step": step, "progress": last}
            self.sent = self.sent.changed(id=tracker.id, address=tracker.address, ended=None, **count)
        self._tracker = tracker


class Sender:
    """Sends the reports of one run, if no other process does."""

    def __init__(self, folder: RunFolder, spec: Spec, destinations: Sequence[Destination]) -> None:
        """
        Args:
            spec: of the run, or of its group.
        """
        self._folder = folder
        self._reports = Reports(folder)
        self._spec = spec
        self._destinations = destinations
        self.links: list[Link] = []
        self._lock: int | None = None

    @property
    def problems(self) -> list[str]:
        """What is wrong with each tracker that has failed."""
        return [f"{link.sent.destination}: {link.sent.problem}" for link in self.links if link.sent.problem]

    @property
    def sent(self) -> list[Sent]:
        return [link.sent for link in self.links]

    def look(self, is_job_over: bool, everything: bool = False) -> bool:
        """Send what is settled now; return whether that was the last of the run.

        Args:
            everything: send also what a later attempt may take back.

        Raises:
            OSError: the run's folder cannot be read or locked.
        """
        if not self.is_mine():
            return False
        # before its reports, of which the last is there when it has ended
        stands = standing(self._folder, is_job_over)
        self._reports.read()
        is_last = is_job_over or stands.is_final
        due = self._reports.standing if everything or stands.is_final else self._reports.settled()
        if not is_last and not self._is_described():
            return False
        before = self.sent
        for link in self.links:
            link.pass_on(due, stands if is_last else None, waits=not is_job_over)
        if self.sent != before:
            # only shown to people
            with suppress(OSError):
                write_sent(self._folder, self.sent)
        return is_last and not self.problems

    def _is_described(self) -> bool:
        """Return whether the run's config is known: MLflow keeps the first one that it is told."""
        if self._reports.standing or self._folder.config.exists():
            return True
        return self._spec.config_base is None and self._spec.kind == "run"

    def is_mine(self) -> bool:
        """Return whether this process is the one that sends, which it then is until `close`.

        Raises:
            OSError: the run's folder cannot be read or locked.
        """
        if self._lock is None:
            self._lock = files.hold_if_free(lock_of(self._folder))
        if self._lock is None:
            return False
        if not self.links:
            before = {sent.destination: sent for sent in read_sent(self._folder)}
            self.links = [Link(self._folder, self._spec, each, before.get(str(each))) for each in self._destinations]
        return True

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
