"""Recovery of trials whose worker is gone: they are found by checking which workers are alive, and requeued or failed.

No time-outs are used: a worker that is slow, or was suspended, keeps its trial.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from mgpu_slurm.core.files import locked, write_whole
from mgpu_slurm.core.formatting import first_line
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.registry import current_state
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.sweeps import hparams, optuna_adapter
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import claims as claiming
from mgpu_slurm.sweeps.study import outcomes


@dataclass(frozen=True)
class Death:
    """How a worker's attempt ended."""

    reason: str
    is_trials_fault: bool = False
    """Whether the trial's own code raised an error, which would happen again."""


def look(study: Study, folder: RunFolder, sweep: Sweep, note: Note = quiet, every: float = 0.0) -> list[int]:
    """Call `recover`, unless another worker does: hundreds of workers that become idle at once query SLURM only once.

    Args:
        every: seconds; do nothing if a worker has looked in this time.
    """
    if time.time() - _last_look(folder) < every:
        return []
    before = _looks(folder)
    with locked(folder.looks.with_suffix(".lock")):
        if _looks(folder) != before:
            # another look has begun since the call
            return []
        write_whole(folder.looks, str(before + 1), sync=False)
        return recover(study, folder, sweep, note)


def _last_look(folder: RunFolder) -> float:
    return folder.looks.stat().st_mtime if folder.looks.exists() else 0.0


def _looks(folder: RunFolder) -> int:
    """Return how many looks have begun."""
    return int(folder.looks.read_text()) if folder.looks.exists() else 0


def recover(study: Study, folder: RunFolder, sweep: Sweep, note: Note = quiet) -> list[int]:
    """Release the trials of dead workers, and return their numbers.

    Args:
        folder: the folder of the sweep.
        note: called with a message if SLURM does not answer, so that it is unknown who is dead.
    """
    # running trials are read first: a worker that starts afterwards is not taken for dead
    suspects = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    if not suspects:
        return []
    found = {member.task: state for member, state in current_state.current([folder], note)}
    orphans = [
        trial for trial in suspects if not any(_may_live(found, *each) for each in claiming.claims(trial).items())
    ]
    if not orphans:
        return []
    with locked(folder.trials_lock):
        now = {trial.number: trial for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))}
        left = [
            trial
            for trial in orphans
            # another worker may have done it meanwhile
            if trial.number in now and claiming.claims(now[trial.number]) == claiming.claims(trial)
        ]
        for trial in left:
            if claims := claiming.claims(trial):
                release(study, folder, trial, _death(folder, found, claims, trial.number), sweep)
            else:
                # a worker died while giving it back or releasing it
                claiming.give_back(study, trial)
    return [trial.number for trial in left]


def _may_live(found: dict[int | None, RunState], worker: int, attempt: int) -> bool:
    """Return whether an attempt of a worker may be running; the worker's state may be slightly outdated."""
    state = found.get(worker)
    if state is None or attempt > state.attempts:
        return True
    return bool(attempt == state.attempts and state.state in states.MAY_RUN)


def release(study: Study, folder: RunFolder, trial: FrozenTrial, death: Death, sweep: Sweep) -> bool:
    """Queue a trial again, or fail it if it has lost too many workers; return whether it has failed.

    The caller must hold the lock.
    """
    own = _made(folder.of_trial(trial.number))
    lost = sorted({*trial.system_attrs.get(claiming.LOSSES, []), records.attempts_started(own)})
    reason = death.reason if death.is_trials_fault else f"{death.reason} ({len(lost)} of {sweep.max_retries + 1} times)"
    if death.is_trials_fault or len(lost) > sweep.max_retries:
        fail(study, own, trial, death, sweep, told=reason)
        return True
    records.record_event(own, "lost", reason=reason)
    optuna_adapter.set_trial_attribute(study, trial, claiming.LOSSES, lost)
    claiming.give_back(study, trial)
    return False


def fail(
    study: Study, folder: RunFolder, trial: FrozenTrial, death: Death, sweep: Sweep, told: str | None = None
) -> None:
    """End a trial without a value, in its folder and in the study.

    Args:
        folder: the folder of the trial.
        death: its reason is the same for trials that fail the same way.
        told: the reason with details of this trial, for its folder.
    """
    outcomes.write(_made(folder), outcomes.Failed(told or death.reason))
    claiming.fail(study, trial, death.reason, death.is_trials_fault)
    with hparams.may_fail():
        hparams.write_end(folder, sweep, "failed")


def _made(trial: RunFolder) -> RunFolder:
    trial.path.mkdir(parents=True, exist_ok=True)
    return trial


def _death(folder: RunFolder, found: dict[int | None, RunState], claims: dict[int, int], trial: int) -> Death:
    for worker, attempt in claims.items():
        known = of_attempt(folder.of_task(worker), attempt, trial)
        if known is not None:
            return known
    worker, attempt = next(iter(claims.items()))
    state = found[worker]
    if states.is_alive(state.state) or state.attempts > attempt:
        # the worker's current state is not how that attempt ended
        return Death(f"worker {worker} was ended, and starts again")
    how = f": {state.reason}" if state.reason else ""
    return Death(f"worker {worker} is {state.state}{how}")


def of_attempt(worker: RunFolder, attempt: int, trial: int) -> Death | None:
    """Return how an attempt of a worker ended, if that was recorded where it ran.

    Args:
        trial: one that it had. It may have had others, whose code is not to blame for the end of this one.
    """
    for event in records.events(worker):
        if event.event == "ended" and event.attempt == attempt and event.message is not None:
            message = first_line(event.message)
            if event.trial == trial:
                return Death(f"{event.error}: {message}", is_trials_fault=True)
            return Death(f"its attempt ended: {message}")
    return None
