"""The study that a worker uses: that of its sweep, or afterwards the confirmation of its best trials, and back."""

from __future__ import annotations

from mgpu_slurm.core import log_lines
from mgpu_slurm.core.files import locked
from mgpu_slurm.registry import lookup, sweep_state
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps import confirmation
from mgpu_slurm.sweeps.client import left_trials
from mgpu_slurm.sweeps.client.sweep_end import SweepEnd
from mgpu_slurm.sweeps.client.worker_health import WorkerHealth, is_at_work
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
        self._has_confirmed = False
        """Whether nothing was left of the confirmation when this worker looked for it."""
        self._has_told = False
        self.has_waited = False
        """Whether this worker has waited for trials of others."""
        self._needed: bool | None = None
        """Whether it waits for the confirmation; None before it is known."""
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

    def settle(self) -> None:
        """Release what was left running; see `left_trials`."""
        self.settle_deaths()
        left_trials.settle(self.shared, self.health)

    def settle_deaths(self) -> None:
        """Release the trials of processes of this worker that have died meanwhile."""
        if self._process:
            left_trials.settle_deaths(self.shared, self.health, self._is_last)

    @property
    def _is_last(self) -> bool:
        """Whether a trial that is not in this study is in no other one."""
        return bool(self.confirms) or not sweep_state.confirmation_folder(self._sweep).path.exists()

    def trial_began(self) -> None:
        self._has_confirmed, self._needed = False, None
        if self.confirms and not self._has_told:
            self._has_told = True
            log_lines.say(f"the best trials are trained again, with other seeds: study {self.confirms}")
        self.health.trial_began()

    def waits(self) -> bool:
        """Return whether running trials may leave something to do here."""
        # which trials are the best is not known before all have ended
        waits_to_confirm = self._is_to_confirm() and self.shared.is_busy() and self._is_needed()
        if waits_to_confirm and not self.has_waited:
            self.shared.show(trial=None, reason="waiting for the last trials, to confirm the best")
        # others of this worker may pause or lose a trial that this process can continue
        waits = waits_to_confirm or self.shared.others_train()
        self.has_waited = self.has_waited or waits
        return waits

    def _is_needed(self) -> bool:
        """Return whether this worker is one of those that are enough for the confirmation; the others leave."""
        if self._needed is None:
            confirm, sweep = self.shared.sweep.confirm, self.shared.sweep
            assert confirm is not None
            alive = [member.task for member in lookup.members(self._sweep) if is_at_work(records.read_state(member))]
            self._needed = self._task in alive[: -(-confirm.top // sweep.trials_per_worker)]
        return self._needed

    def turn(self) -> bool:
        """Turn to the confirmation of the best trials, or back; return False if nothing is left to do there."""
        if self.confirms:
            self.shared.write_summary()
            # trials may have been added to the sweep meanwhile
            self._open(self._sweep)
            return True
        # others wait for the last trials
        if not self._is_to_confirm() or self.shared.is_busy():
            return False
        self._has_confirmed = True
        with locked(self.folder.sweep_lock):
            found = confirmation.prepare(self._sweep, self.shared.sweep, self.shared.trials())
        if found is None:
            return False
        self.shared.write_summary()
        self._open(found)
        self.settle()
        return True

    def _is_to_confirm(self) -> bool:
        return self.shared.sweep.confirm is not None and not self._has_confirmed
