"""A run in Weights & Biases, on its server or in files of the run's folder.

Besides W&B's public interface, it uses the settings whose names begin with `x_`, and the format of offline files.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from mgpu_slurm.core.formatting import counted
from mgpu_slurm.run_folder.record_types import Report
from mgpu_slurm.trackers.adapters.wandb_files import WandbFile
from mgpu_slurm.trackers.destinations import WANDB_OFFLINE
from mgpu_slurm.trackers.tracker import PROGRESS, Status, TrackedRun, Tracker

FLUSH_SECONDS = 0.2
"""How often W&B writes what it has to the file of a run."""

PATIENCE = 20.0
"""Seconds until W&B has written what was sent."""

_SETTINGS: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_save_requirements": False,
    "x_transaction_log_flush_interval": FLUSH_SECONDS,
}
"""This process is not the training: its program, machine use and packages are of no interest."""


class WandbTracker(Tracker):
    """A run in W&B, whose id is the run's own.

    A row of W&B has a step of its own, which only increases: it is the optimizer step, or one more than that of the row
    before, if several reports are at the same step. So the last step in W&B says which reports it has. Offline, each
    session has a file of its own, which `wandb sync` sends; the last step is then read from these files.
    """

    def __init__(self, place: str, run: TrackedRun) -> None:
        import wandb

        self._wandb = wandb
        entity, _, self._project = place.rpartition("/")
        self._entity = entity or None
        self._run = run
        self._session: Any = None
        self._file: WandbFile | None = None
        self._offline = wandb.setup().settings.mode in WANDB_OFFLINE
        self._last = self._last_step()

    @property
    def id(self) -> str:
        return self._run.key

    @property
    def address(self) -> str:
        if self._offline:
            return f"wandb sync {self._run.folder}/wandb/offline-run-*"
        return str(self._open().url)

    def _last_step(self) -> int:
        """Return the last step that W&B has; -1 if there is none."""
        if not self._offline:
            return int(self._open().starting_step) - 1
        # the folder of a second session within a second has one more number
        paths = self._run.folder.glob(f"wandb/offline-run-*/run-{self.id}.wandb")
        return max((int(row["_step"]) for path in paths for row in WandbFile(path).new_rows()), default=-1)

    def _open(self) -> Any:
        """Begin a session, if there is none."""
        if self._session is None:
            run = self._run
            self._session = self._wandb.init(
                entity=self._entity,
                project=self._project,
                id=self.id,
                name=run.name,
                group=run.group,
                job_type="trial" if run.is_trial else None,
                config={**run.config, **run.tags},
                notes=str(run.folder),
                resume="allow",
                allow_val_change=True,
                # other trials of a sweep may have sessions in this process
                reinit="create_new",
                dir=str(run.folder),
                settings=self._wandb.Settings(**_SETTINGS, git_commit=run.commit),
            )
            if self._offline:
                path = self._session.settings.sync_file
                self._file = WandbFile(path)
        return self._session

    def missing(self, reports: Sequence[Report]) -> list[Report]:
        found, last = [], -1
        for report in reports:
            last = max(report.step, last + 1)
            if last > self._last:
                found.append(report)
        return found

    def send(self, reports: Sequence[Report]) -> None:
        if not reports:
            return
        session = self._open()
        for report in reports:
            self._last = max(report.step, self._last + 1)
            moment = datetime.fromisoformat(report.time).timestamp()
            # a row is written once the next one begins, unless it is committed
            row = {**report.values, PROGRESS: report.progress, "_timestamp": moment}
            session.log(row, step=self._last, commit=True)
        self._wait_for_file(len(reports))

    def _wait_for_file(self, count: int) -> None:
        """Wait until an offline run is in its file: W&B keeps rows in memory first, which are lost if it is killed.

        Raises:
            TimeoutError: it was not written.
        """
        if self._file is None:
            return
        deadline = time.monotonic() + PATIENCE
        while not any(int(row["_step"]) == self._last for row in self._file.new_rows()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"W&B has not written {counted(count, 'report')} to its file in {PATIENCE:g} s")
            time.sleep(FLUSH_SECONDS / 2)

    def finish(self, status: Status, tags: Mapping[str, str], ended: str | None) -> None:
        if self._session is None and self._last >= 0 and status == "completed" and self._offline:
            # a session only for the end would be one more folder to send
            return
        session = self._open()
        session.config.update(dict(tags), allow_val_change=True)
        if status in ("running", "waiting"):
            session.mark_preempting()
        session.finish(exit_code=0 if status == "completed" else 1)
        self._session = None
