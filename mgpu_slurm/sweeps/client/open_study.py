"""The study that a worker uses: that of its sweep, or afterwards the confirmation of its best trials, and back."""

from __future__ import annotations

from mgpu_slurm.core import log_lines
from mgpu_slurm.core.files import locked
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps import confirmation
from mgpu_slurm.sweeps.client import left_trials
from mgpu_slurm.sweeps.client.left_trials import Predecessor
from mgpu_slurm.sweeps.client.sweep_end import SweepEnd
from mgpu_slurm.sweeps.client.worker_health import WorkerHealth
from mgpu_slurm.sweeps.client.worker_study import WorkerStudy


class OpenStudy:
    """One attempt of a worker, or of one of its processes, and the study that it uses now."""

    def __init__(self, folder: RunFolder, attempt: int, process: int, gpus: int) -> None:
        """
        Args:
            folder: the folder of the worker.
            process: as in `Rank`.
            gpus: number of GPUs of the worker.
        """
        assert folder.task is not None
        self._task, self._attempt, self._process, self._gpus = folder.task, attempt, process, gpus
        self._sweep = folder.group
        """The worker's own sweep."""
        self._replaced: Predecessor | None = None
        self._has_confirmed = False
        """Whether nothing was left of the confirmation when this worker looked for it."""
        self._has_told = False
        self._open(self._sweep)

    def _open(self, sweep: RunFolder) -> None:
        self.sweep_folder, self.folder = sweep, sweep.of_task(self._task)
        self.shared = WorkerStudy(self.folder, self._attempt, self._process)
        self.health = WorkerHealth(self.shared)
        self.end = SweepEnd(self.shared, self._gpus)

    @property
    def confirms(self) -> str:
        """The name of the confirmation while that is used; empty for the sweep's own study."""
        return "" if self.sweep_folder == self._sweep else self.sweep_folder.run

    def settle(self, replaced: Predecessor | None) -> None:
        """Release what was left running; see `left_trials.settle`."""
        self._replaced = replaced
        left_trials.settle(self.shared, self.health, replaced)

    def trial_began(self) -> None:
        self._has_confirmed = False
        if self.confirms and not self._has_told:
            self._has_told = True
            log_lines.say(f"the best trials are trained again, with other seeds: study {self.confirms}")
        self.health.trial_began()

    def waits(self) -> bool:
        """Return whether running trials may leave something to do here."""
        if self.shared.others_train():
            # they may pause or lose a trial that this process can continue
            return True
        # which trials are the best is not known before
        waits = self._is_to_confirm() and self.shared.is_busy()
        if waits:
            self.shared.show(trial=None, reason="waiting for the last trials, to confirm the best")
        return waits

    def turn(self) -> bool:
        """Turn to the confirmation of the best trials, or back; return False if nothing is left to do there."""
        if self.confirms:
            self.shared.write_summary()
            # trials may have been added to the sweep meanwhile
            self._open(self._sweep)
            return True
        if not self._is_to_confirm():
            return False
        self._has_confirmed = True
        with locked(self.folder.sweep_lock):
            found = confirmation.prepare(self._sweep, self.shared.sweep, self.shared.trials())
        if found is None:
            return False
        self.shared.write_summary()
        self._open(found)
        self.settle(self._replaced)
        return True

    def _is_to_confirm(self) -> bool:
        return self.shared.sweep.confirm is not None and not self._has_confirmed
