"""Detection of a broken node: a suspect worker waits for results of others, and leaves if only its trials fail."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from datetime import datetime
from typing import NoReturn

from optuna.trial import FrozenTrial

from mgpu_slurm.core import log_lines
from mgpu_slurm.registry import lookup
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Event, RunState
from mgpu_slurm.sweeps.client.messages import BrokenWorker, SweepFailed
from mgpu_slurm.sweeps.client.sweep_end import end_sweep
from mgpu_slurm.sweeps.client.worker_study import WorkerStudy
from mgpu_slurm.sweeps.scheduling import samplers
from mgpu_slurm.sweeps.study import health, summary
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.health import Place

LONGEST_WAIT = 600.0
"""Seconds for which a worker whose trials fail waits for results of others before it tries another trial."""


class WorkerHealth:
    """A check whether trials fail because of this worker's node."""

    def __init__(self, shared: WorkerStudy) -> None:
        self._shared = shared
        self._number = shared.worker.number
        self._place = Place(self._number, _since(shared.folder))
        self._may_be_broken = True
        """Whether its last trial failed, as far as known."""
        self._waits_until: float | None = None
        self.has_waited = False

    def trial_began(self) -> None:
        self._waits_until = None

    def waits_for_news(self) -> bool:
        """Return whether the next trial should wait for the results of other workers.

        Raises:
            BrokenWorker: a trial that failed here succeeds elsewhere.
        """
        if not self._may_be_broken:
            return False
        trials = self._shared.trials()
        self._leave_if_broken(trials)
        self._may_be_broken = health.is_suspect(trials, self._place) or health.is_in_doubt(trials, self._place)
        sweep = self._shared.sweep
        are_left = sweep.trials is None or summary.counts(trials, sweep)["WAITING"] > 0
        if not (self._may_be_broken and are_left and self._awaits_others(trials)):
            self._waits_until = None
            return False
        if self._waits_until is None:
            self._waits_until = time.monotonic() + LONGEST_WAIT
            self._shared.show(trial=None, reason="its last trials failed: waiting for results of other workers")
            self._shared.write_summary()
            log_lines.say("the last trials failed here: waiting for results of other workers")
        self.has_waited = True
        # the workers waited for may be dead
        self._shared.recover()
        return time.monotonic() < self._waits_until

    def others_wait(self) -> bool:
        """Return whether all other workers wait for the result of a trial elsewhere, as this one does."""
        return not self._is_at_work(but={self._number, *health.in_doubt(self._shared.trials())})

    def check(self, reason: str) -> None:
        """Check after a failed trial whether to continue.

        Args:
            reason: why it failed.

        Raises:
            SweepFailed: all other trials will fail too.
            BrokenWorker: trials on this worker will fail.
        """
        self._may_be_broken = True
        if health.concerns_all(reason):
            self._end_sweep(reason)
        trials = self._shared.trials()
        common = health.common_failure(trials, self._shared.sweep.trials)
        if common is not None and not self._awaits_others(trials):
            self._end_sweep(common)
        self._leave_if_broken(trials)

    def _end_sweep(self, reason: str) -> NoReturn:
        end_sweep(self._shared, reason, failed=True)
        self._shared.write_summary()
        raise SweepFailed(reason)

    def is_doubtful(self, trial: FrozenTrial, reason: str) -> bool:
        """Return whether another worker should try a trial that failed here."""
        is_doubtful = health.is_doubtful(self._shared.trials(), self._place, trial, reason)
        return is_doubtful and self._is_at_work(but={self._number})

    def doubted(self) -> None:
        """Note that a trial that failed here was given to another worker."""
        self._may_be_broken = True

    def _leave_if_broken(self, trials: Sequence[FrozenTrial]) -> None:
        reason = health.broken_worker(trials, self._place)
        if reason is not None and self._is_at_work(but={self._number}):
            key = f"{samplers.INNOCENT}{self._number}"
            # earlier nodes of this worker may have been broken too
            known = studies.notes(self._shared.study).get(key, [])
            studies.note(self._shared.study, key, sorted({*known, *health.innocent(trials, self._place)}))
            self._shared.write_summary()
            raise BrokenWorker(reason)

    def _awaits_others(self, trials: Sequence[FrozenTrial]) -> bool:
        if health.is_in_doubt(trials, self._place):
            return self._is_at_work(but={self._number})
        if health.awaits_others(trials):
            return True
        # or another worker has its nodes, but has not begun its first trial yet
        return not health.goes_well(trials) and self._is_at_work(but=health.workers_with_trials(trials))

    def _is_at_work(self, but: set[int]) -> bool:
        """Return whether any worker other than these is running, according to the state files."""
        others = [member for member in lookup.members(self._shared.sweep_folder) if member.task not in but]
        found = map(records.read_state, others)
        return any(map(is_at_work, found))


def is_at_work(worker: RunState) -> bool:
    """Return whether a worker is running and may take more trials, according to its state."""
    return worker.state == states.RUNNING and worker.leaving != worker.attempts


def _since(folder: RunFolder) -> datetime:
    """Return since when this worker has its nodes; ranks that restart in place keep them."""
    starts = [event for event in records.events(folder) if event.event == "started"]
    place = _place_of(starts[-1])
    here = itertools.takewhile(lambda event: _place_of(event) == place, reversed(starts))
    return datetime.fromisoformat([event.time for event in here][-1])


def _place_of(start: Event) -> tuple[str | None, Sequence[str]]:
    return start.job_id, start.nodes
