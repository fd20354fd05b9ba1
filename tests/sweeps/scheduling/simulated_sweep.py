"""A sweep without training: real schedulers, samplers and the queue's functions, on Optuna's storage in memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from mgpu_slurm.sweeps import optuna_adapter
from mgpu_slurm.sweeps.scheduling.rung_tpe import RungTpe
from mgpu_slurm.sweeps.scheduling.scheduler import Action, Clone, Decision, Scheduler, Snapshot
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import claims as claiming
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.claims import Worker
from mgpu_slurm.sweeps.study.snapshots import Snapshots, copy_of


class Crash(Exception):
    """A worker died."""


class SimulatedSweep:
    """Workers that take turns in random order; one of them may die before a write."""

    def __init__(
        self,
        scheduler: Scheduler,
        seed: int,
        trials: int,
        workers: int,
        direction: str = "minimize",
        epochs: int = 9,
        dies_at: int | None = None,
        sweep: Sweep | None = None,
    ) -> None:
        """
        Args:
            epochs: the length of a trial, if the scheduler has no rungs.
            dies_at: number of the write, from 1, before which the worker dies that is about to do it.
            sweep: the sweep file, for copies.
        """
        self._sweep = sweep
        optuna_adapter.silence()
        self.scheduler = scheduler
        self.trials = trials
        self.epochs = scheduler.rungs[-1] if scheduler.rungs else epochs
        self.study = optuna.create_study(direction=direction, sampler=RungTpe(scheduler.rungs, seed=seed))
        self._sign = -1 if direction == "maximize" else 1
        self._snapshots = Snapshots(self.study, scheduler)
        self._random = random.Random(seed)
        self._at_work: dict[int, int] = {}
        """The trial of each worker that has one."""
        self._workers = workers
        self._dies_at = dies_at
        self._seed = seed
        self.writes = self.deaths = 0
        self.promoted: list[tuple[int, int]] = []
        """Trials and the rungs that they were granted, in order."""
        storage: Any = self.study._storage
        for name in ("create_new_trial", "set_trial_system_attr", "set_trial_intermediate_value"):
            setattr(storage, name, self._counted(getattr(storage, name)))
        storage.set_trial_state_values = self._counted(storage.set_trial_state_values)

    def _counted(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **options: Any) -> Any:
            self.writes += 1
            if self.writes == self._dies_at:
                raise Crash
            return write(*given, **options)

        return counted

    def snapshot(self) -> Snapshot:
        # the members of a population are counted without copies
        return self._snapshots.take(self.trials if self._sweep is None else None)

    def run(self) -> None:
        """Let all workers work until none has anything to do."""
        idle = 0
        while idle < 3 * self._workers:
            idle = 0 if self.step() else idle + 1

    def step(self) -> bool:
        """Let a worker do something; return whether it did."""
        before = self.writes
        try:
            self.act(self._random)
        except Crash:
            self.deaths += 1
            self._recover()
        return self.writes > before or bool(self._at_work)

    def act(self, order: random.Random) -> None:
        """Let a random worker take a trial, or train it to the next report."""
        worker = order.randrange(self._workers)
        number = self._at_work.pop(worker, None)
        if number is None:
            number = self._take(Worker(worker, 1))
        elif not self._train(number):
            number = None
        if number is not None:
            self._at_work[worker] = number

    def _take(self, worker: Worker) -> int | None:
        # asked for waiting trials only, the storage in memory skips those that began to wait again
        for trial in self.study.get_trials(deepcopy=False):
            is_waiting = trial.state == TrialState.WAITING and studies.SECONDS in trial.system_attrs
            if is_waiting and not studies.is_paused(trial, self.scheduler):
                claiming.claim(self.study, worker, trial)
                return trial.number
        job = self.scheduler.next_job(self.snapshot())
        if job is None:
            return None
        if job.action is Action.PROMOTE:
            assert job.number is not None
            self.promoted.append((job.number, studies.until_of(self._trial(job.number)) + 1))
            try:
                studies._promote(self.study, worker, self._snapshots.trial(job.number))
            except Crash:
                # its last write lets the trial run further
                self.promoted.pop()
                raise
            return job.number
        number = len(self.study.trials)
        if job.action is Action.CLONE:
            assert job.number is not None
            assert job.source is not None
            assert self._sweep is not None
            replaced, source = self._trial(job.number), self._trial(job.source)
            if replaced.state == TrialState.WAITING:
                studies.replace_by_copy(self.study, replaced, source.number)
                optuna_adapter.set_trial_state(self.study, replaced, TrialState.PRUNED)
            progress = max(replaced.intermediate_values)
            studies._begin_copy(self.study, self._sweep, worker, replaced, source, progress)
            return number
        studies._begin(self.study, worker, self.scheduler, number, {})
        return number

    def _trial(self, number: int) -> FrozenTrial:
        return self.study.get_trials(deepcopy=False)[number]

    def _train(self, number: int) -> bool:
        """Train a trial to its next report; return whether it continues."""
        optuna_adapter.forget_cached_trials(self.study)
        trial = Trial(self.study, self._trial(number)._trial_id)
        x = trial.suggest_float("x", 0, 1)
        last = max(self._trial(number).intermediate_values, default=0)
        if not last:
            # a copy continues after the trial that it replaces
            copied = copy_of(self._trial(number))
            last = 0 if copied is None else copied.progress
        if last < self.epochs:
            last += 1
            noise = random.Random(f"{self._seed} {number} {last}").random() / last
            trial.report(self._sign * ((x - 0.3) ** 2 + 0.2 * noise), last)
        decision = self._decide(number, last)
        if isinstance(decision, Clone):
            studies.replace_by_copy(self.study, self._trial(number), decision.source)
            optuna_adapter.set_trial_state(self.study, self._trial(number), TrialState.PRUNED)
        elif decision is Decision.PAUSE:
            claiming.give_back(self.study, self._trial(number))
        elif decision is Decision.PRUNE:
            optuna_adapter.set_trial_state(self.study, self._trial(number), TrialState.PRUNED)
        elif last == self.epochs:
            value = self._trial(number).intermediate_values[last]
            optuna_adapter.end_trial(self.study, self._trial(number), TrialState.COMPLETE, [value])
        else:
            return True
        return False

    def _decide(self, number: int, progress: int) -> Decision | Clone:
        if not self.scheduler.is_due(progress - 1, progress):
            return Decision.CONTINUE
        snapshot = self.snapshot()
        if self.scheduler.pauses and not snapshot.entries[number].has_arrived:
            return Decision.CONTINUE
        decision = self.scheduler.decide(snapshot, number)
        if self.scheduler.pauses and decision is Decision.CONTINUE:
            studies.grant(self.study, self._trial(number))
            self.promoted.append((number, studies.until_of(self._trial(number))))
        return decision

    def _recover(self) -> None:
        """Do what a look for dead workers does."""
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if trial.number not in self._at_work.values():
                claiming.give_back(self.study, trial)
