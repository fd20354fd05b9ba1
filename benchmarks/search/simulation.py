"""Simulated sweeps of this package and of Optuna: real samplers and schedulers on Optuna's storage in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.pruners import BasePruner, HyperbandPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from benchmarks.search.clock import FACTOR, RESOURCE, RESUME, RUNGS, START, Simulation
from benchmarks.search.problems import CONTINUOUS, Family, Point
from mgpu_slurm.sweeps import optuna_adapter
from mgpu_slurm.sweeps.scheduling.halving import Promotion, StopOnly
from mgpu_slurm.sweeps.scheduling.rung_tpe import RungTpe
from mgpu_slurm.sweeps.scheduling.rungs import bracket_sizes
from mgpu_slurm.sweeps.scheduling.scheduler import Action, Decision, OptunaPruner, Scheduler, Unlimited
from mgpu_slurm.sweeps.study.snapshots import SECONDS, UNTIL, Snapshots


@dataclass(frozen=True)
class Method:
    """A sampler and a scheduler, to be made with a seed."""

    name: str
    sampler: Callable[[int], BaseSampler]
    scheduler: Callable[[], Scheduler]


def _promotion(hedge: bool) -> Callable[[], Scheduler]:
    return lambda: Promotion(rungs=RUNGS, factor=FACTOR, is_maximized=False, hedge=hedge)


def _by_rung(seed: int) -> BaseSampler:
    return RungTpe(RUNGS, seed=seed)


def _random(seed: int) -> BaseSampler:
    return RandomSampler(seed=seed)


def _tpe(seed: int) -> BaseSampler:
    return TPESampler(seed=seed)


def _optunas_hyperband() -> Scheduler:
    pruner: BasePruner = HyperbandPruner(1, RESOURCE, FACTOR)
    return OptunaPruner(pruner, RESOURCE)


def _hyperband() -> Scheduler:
    return StopOnly(rungs=RUNGS, factor=FACTOR, is_maximized=False, sizes=bracket_sizes(1, RESOURCE, FACTOR))


def _asha() -> Scheduler:
    return StopOnly(rungs=RUNGS, factor=FACTOR, is_maximized=False)


METHODS = {
    each.name: each
    for each in (
        Method("random, whole trials", _random, Unlimited),
        Method("Optuna's TPE, whole trials", _tpe, Unlimited),
        Method("Optuna's TPE with its Hyperband", _tpe, _optunas_hyperband),
        Method("hyperband", _by_rung, _hyperband),
        Method("asha, pause: false", _by_rung, _asha),
        Method("random with asha, hedge: false", _random, _promotion(hedge=False)),
        Method("asha, hedge: false", _by_rung, _promotion(hedge=False)),
        Method("asha", _by_rung, _promotion(hedge=True)),
    )
}


def suggest(trial: Any) -> Point:
    """Return a trial's point, chosen by the study's sampler."""
    rate = trial.suggest_float("lr", 1e-4, 1.0, log=True)
    others = [trial.suggest_float(f"p{place}", 0.0, 1.0) for place in range(1, CONTINUOUS)]
    return (float(np.log10(rate)) / 4 + 1, *others, float(trial.suggest_categorical("choice", [0, 1, 2])))


class Sweep(Simulation):
    """One sweep of one of this package's methods, or of Optuna's, on one problem."""

    def __init__(self, method: Method, family: Family, seed: int, workers: int, whole_trials: int) -> None:
        super().__init__(family, seed, workers, whole_trials)
        self._scheduler = method.scheduler()
        self._study = optuna.create_study(
            sampler=method.sampler(seed), pruner=NopPruner(), study_name=f"{family}-{seed}"
        )
        self._snapshots = Snapshots(self._study, self._scheduler)

    def take(self, now: float) -> None:
        job = self._scheduler.next_job(self._snapshots.take(None))
        assert job is not None
        if job.action is Action.PROMOTE:
            assert job.number is not None
            trial = self._trial(job.number)
            optuna_adapter.set_trial_attribute(self._study, trial, UNTIL, self._until(trial) + 1)
            optuna_adapter.set_trial_state(self._study, trial, TrialState.RUNNING)
            self.train(now + RESUME, job.number, max(trial.intermediate_values))
            return
        number = optuna_adapter.trial_count(self._study)
        attributes = {UNTIL: self._scheduler.first_rung(number)} if self._scheduler.pauses else {}
        template = create_trial(state=TrialState.RUNNING, system_attrs=attributes)
        optuna_adapter.forget_cached_trials(self._study)
        new = Trial(self._study, optuna_adapter.create_trial(self._study, template))
        self.points[number] = suggest(new)
        self.train(now + START, number)

    def _trial(self, number: int) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]

    @staticmethod
    def _until(trial: FrozenTrial) -> int:
        found: int = trial.system_attrs.get(UNTIL, 0)
        return found

    def reported(self, now: float, number: int, epoch: int, value: float) -> None:
        trial = self._trial(number)
        optuna_adapter.report(self._study, trial, epoch, value)
        decision = self._decide(number, epoch)
        if epoch == RESOURCE:
            optuna_adapter.end_trial(self._study, trial, TrialState.COMPLETE, [value])
        elif decision is Decision.CONTINUE:
            self.train(now, number, epoch)
            return
        else:
            ended = TrialState.PRUNED if decision is Decision.PRUNE else TrialState.WAITING
            optuna_adapter.set_trial_attribute(self._study, trial, SECONDS, now)
            optuna_adapter.set_trial_state(self._study, trial, ended)
        self.take(now)

    def _decide(self, number: int, epoch: int) -> Decision:
        if not self._scheduler.is_due(epoch - 1, epoch):
            return Decision.CONTINUE
        snapshot = self._snapshots.take(None)
        entry = snapshot.entries[number]
        if self._scheduler.pauses and not entry.has_arrived:
            return Decision.CONTINUE
        decision = self._scheduler.decide(snapshot, number)
        if self._scheduler.pauses and decision is Decision.CONTINUE:
            optuna_adapter.set_trial_attribute(self._study, self._trial(number), UNTIL, entry.until + 1)
        return decision
