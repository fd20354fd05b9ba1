"""What the scheduler sees of the study: which trials are paused, and their values at its rungs.

That a trial is paused is not stored: it waits, may run no further than a rung, and has a value there. So no crash can
part the two. What is stored is `UNTIL`, which only grows: no trial is promoted twice.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from mgpu_slurm.run_folder.record_types import from_known
from mgpu_slurm.sweeps.optuna_adapter import TrialsView
from mgpu_slurm.sweeps.scheduling import samplers
from mgpu_slurm.sweeps.scheduling.judged_values import CHANGES, judged
from mgpu_slurm.sweeps.scheduling.observations import COPY_OF
from mgpu_slurm.sweeps.scheduling.rungs import values_at
from mgpu_slurm.sweeps.scheduling.scheduler import Entry, EntryState, Scheduler, Snapshot
from mgpu_slurm.sweeps.search.sweep_options import Pruner

UNTIL = "mgpu:until"
"""Attribute of a trial that may pause: the index of the rung to which it may run; 0 if missing."""

SOURCE = "mgpu:source"
"""Attribute of a trial that is replaced by a copy of another one: the number of that one."""

SETTLED = "mgpu:settled"
"""Attribute of a trial in doubt that has come to its rung on another worker, and paused there."""

ORIGIN = "mgpu:origin"
"""Attribute of a trial copied from an earlier study at the start: the name of that study."""

SECONDS = "mgpu:seconds"
"""Attribute of a trial that was given back or paused: how long workers had it before, in seconds."""

_ENDED = {
    TrialState.COMPLETE: EntryState.COMPLETE,
    TrialState.PRUNED: EntryState.PRUNED,
    TrialState.FAIL: EntryState.FAILED,
}


@dataclass(frozen=True)
class CopyOf:
    """Where a copy comes from; trials by their numbers in the study."""

    source: int
    trial: int
    """The trial that it replaces."""
    progress: int
    """The progress of the checkpoint from which it continues; up to it, its values are not its own."""


def copy_of(trial: FrozenTrial) -> CopyOf | None:
    """Return where a copy comes from; None for other trials."""
    found = trial.system_attrs.get(COPY_OF)
    return None if found is None else from_known(CopyOf, found)


def until_of(trial: FrozenTrial) -> int:
    found: int = trial.system_attrs.get(UNTIL, 0)
    return found


def is_paused(trial: FrozenTrial, pruner: Pruner | Scheduler) -> bool:
    """Return whether the trial waits at a rung for its promotion."""
    if trial.state != TrialState.WAITING or not pruner.pauses or not trial.intermediate_values:
        return False
    doubt = samplers.doubt_of(trial)
    is_open = doubt is not None and len(trial.intermediate_values) <= doubt.reports
    if is_open and SETTLED not in trial.system_attrs:
        # another worker has to show whether it fails there too
        return False
    until = until_of(trial)
    return until < len(pruner.rungs) - 1 and max(trial.intermediate_values) >= pruner.rungs[until]


def entry_of(trial: FrozenTrial, number: int, scheduler: Scheduler) -> Entry:
    """Return a trial that has begun, as the scheduler sees it.

    Args:
        number: see `Entry.number`.
    """
    copied, source = trial.number - number, trial.system_attrs.get(SOURCE)
    values = own_values_at(scheduler.rungs, trial)
    until = until_of(trial) if scheduler.pauses else max(values, default=0)
    values = {rung: value for rung, value in values.items() if rung <= until}
    state = _ENDED.get(trial.state, EntryState.RUNNING)
    if trial.state == TrialState.WAITING:
        state = EntryState.PAUSED if is_paused(trial, scheduler) else EntryState.GIVEN_BACK
    replaces = copy_of(trial)
    return Entry(
        number,
        until,
        values,
        state,
        source=None if source is None else source - copied,
        replaces=None if replaces is None else replaces.trial - copied,
    )


def own_values_at(rungs: Sequence[int], trial: FrozenTrial) -> dict[int, float]:
    """Return a trial's values by the index of the rung; those of a copy only above the progress at which it began."""
    began = copy_of(trial)
    values = values_at(rungs, trial.intermediate_values)
    return values if began is None else {rung: value for rung, value in values.items() if rungs[rung] > began.progress}


class Snapshots:
    """Takes snapshots of a study for a scheduler; a trial is looked at again only if the storage has replaced it."""

    def __init__(self, study: Study, scheduler: Scheduler) -> None:
        self._study = study
        self._scheduler = scheduler
        self._seen: dict[int, tuple[FrozenTrial, FrozenTrial, Entry]] = {}
        """Trials, how they are judged, and their entries."""

    def take(self, trials: int | None, is_over: bool = False) -> Snapshot:
        """Return the state of the study's own trials now.

        Args:
            trials: the sweep's number of trials; None without a limit.
            is_over: whether the budget is spent.
        """
        own = [each for each in self._study.get_trials(deepcopy=False) if ORIGIN not in each.system_attrs]
        entries: dict[int, Entry] = {}
        judged_trials = []
        waits = False
        for number, trial in enumerate(own):
            _, judged_trial, entry = self._look(number, trial)
            judged_trials.append(judged_trial)
            if trial.state == TrialState.WAITING and SECONDS not in trial.system_attrs:
                # it was queued, and has not begun
                waits = True
            else:
                entries[number] = entry
        may_begin = not is_over and (waits or trials is None or len(own) < trials)
        return Snapshot(entries, trials, may_begin, is_over, OwnTrials(self._study, judged_trials))

    def trial(self, number: int) -> FrozenTrial:
        """Return a trial of the last snapshot by its number there."""
        return self._seen[number][0]

    def _look(self, number: int, trial: FrozenTrial) -> tuple[FrozenTrial, FrozenTrial, Entry]:
        seen = self._seen.get(number)
        # storages replace a trial that changes
        if seen is None or seen[0] is not trial:
            shown = judged(trial, self._study.directions[0])
            seen = self._seen[number] = trial, shown, entry_of(shown, number, self._scheduler)
        return seen


class OwnTrials(TrialsView):
    """A study with its own trials only."""

    def with_finite_reports(self) -> OwnTrials:
        """Return the study without the reports at which trials violated a constraint."""
        return OwnTrials(self._study, list(map(_with_finite_reports, self.trials_shown)))

    def own_trial(self, number: int) -> FrozenTrial:
        """Return a trial by its number among the study's own."""
        return self.trials_shown[number]


def _with_finite_reports(trial: FrozenTrial) -> FrozenTrial:
    if CHANGES not in trial.system_attrs:
        return trial
    shown = copy.copy(trial)
    shown.intermediate_values = {at: each for at, each in trial.intermediate_values.items() if math.isfinite(each)}
    return shown
