"""Choosing which workers of an existing sweep to start, and when."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import optuna

from mgpu_slurm.core.retry import Note
from mgpu_slurm.registry import current_state
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import summary

LEAVING_SECONDS = 60.0
"""Seconds to wait for workers that have announced that they leave."""

Found: TypeAlias = Sequence[tuple[RunFolder, RunState]]
"""Workers and their states."""


def settled(folder: RunFolder, note: Note) -> Found:
    """Return the workers once those that announced to leave have ended: they take no more trials."""
    give_up = time.monotonic() + LEAVING_SECONDS
    while True:
        found = current_state.current([folder], note)
        leaving = [state for _, state in found if state.leaving == state.attempts and states.is_alive(state.state)]
        if not leaving or time.monotonic() > give_up:
            return found
        time.sleep(0.2)


def waiting_trials(study: optuna.Study, sweep: Sweep, is_over: bool) -> int | None:
    """Return how many trials wait for a worker; None for as many as the budget allows.

    Args:
        is_over: whether paused trials are to be promoted only until one is complete.
    """
    if sweep.trials is None and sweep.pruner.name != "pbt":
        return None
    return summary.counts(summary.own_trials(study), sweep)["WAITING"] + summary.promotable(study, sweep, is_over)


def workers_to_start(folder: RunFolder, sweep: Sweep, found: Found, left: int | None) -> list[RunFolder]:
    """Return the workers to start: first ended ones that did not complete, then other ended ones, then new ones.

    Args:
        left: number of waiting trials; None for as many as the budget allows.
    """
    alive = sum(states.is_alive(state.state) for _, state in found)
    wanted = min(max(0, sweep.workers - alive), sweep.workers_for(left))
    ended = [(member, state.state) for member, state in found if not states.is_alive(state.state)]
    # the sort is stable
    ended.sort(key=lambda each: each[1] == states.COMPLETED)
    new = [folder.of_task(number) for number in range(len(found), len(found) + max(0, wanted - len(ended)))]
    return [*(member for member, _ in ended[:wanted]), *new]


def make_room(folder: RunFolder, starting: Sequence[RunFolder]) -> None:
    """Raise the sweep's number of workers; new ones count as cancelled until they are started."""
    spec = read_spec(folder)
    assert spec.tasks is not None
    tasks = max(spec.tasks, 1 + max(member.task or 0 for member in starting))
    for task in range(spec.tasks, tasks):
        records.cancel_unstarted(folder.of_task(task), "not started")
    replace(spec, tasks=tasks, at_once=None if spec.at_once is None else tasks).write(folder)
    records.update_state(folder, tasks=tasks)
