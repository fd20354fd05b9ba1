"""What a decision and a draw cost in a study of many trials."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import optuna
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import Trial, TrialState, create_trial

from benchmarks.measure import interleave, median, ratio
from benchmarks.report import Row
from mgpu_slurm.sweeps import optuna_adapter
from mgpu_slurm.sweeps.scheduling.halving import Promotion
from mgpu_slurm.sweeps.scheduling.rung_tpe import RungTpe
from mgpu_slurm.sweeps.scheduling.rungs import rungs_of
from mgpu_slurm.sweeps.scheduling.scheduler import Entry, EntryState, Snapshot
from mgpu_slurm.sweeps.search import space_parser
from mgpu_slurm.sweeps.search.space import Space

ENTRIES = 10_000
TRIALS = 1000
ROUNDS = 30
RUNGS, FACTOR = rungs_of(1, 27, 3), 3
DECISION_TARGET_MS, DRAW_TARGET = 50, 0.5

SPACE: Space = space_parser.parse(
    {
        "lr": {"float": [1e-4, 1.0], "log": True},
        "momentum": {"float": [0.0, 0.99]},
        "dropout": {"float": [0.0, 0.6]},
        "width": {"int": [16, 128], "step": 16},
        "batch_size": {"choice": [16, 32, 64]},
    },
    "benchmark",
)


def rows() -> list[Row]:
    optuna_adapter.silence()
    scheduler, snapshot, running = _snapshot()
    calls = {
        "decide": partial(_timed, lambda: scheduler.decide(snapshot, running)),
        "next_job": partial(_timed, lambda: scheduler.next_job(snapshot)),
    }
    seconds = interleave(calls, ROUNDS)
    draws = {
        "whole": _drawing(TPESampler(seed=1), is_whole=True),
        "by rung": _drawing(RungTpe(RUNGS, SPACE, seed=1), is_whole=False),
        "by value": _drawing(RungTpe((), SPACE, seed=1), is_whole=True),
    }
    drawn = interleave(draws, ROUNDS, warm_ups=3)
    return [
        *(
            Row(f"asha: `{name}` with {ENTRIES:,} trials", median(found).scaled(1000), "ms", 1, DECISION_TARGET_MS)
            for name, found in seconds.items()
        ),
        Row(f"Optuna's TPE: a draw after {TRIALS:,} whole trials", median(drawn["whole"]).scaled(1000), "ms", 1),
        Row(
            f"a draw by rung after {TRIALS:,} trials, 1 in 27 of them whole / Optuna's TPE",
            ratio(drawn["by rung"], drawn["whole"]), "", 2, DRAW_TARGET,
        ),
        Row(f"a draw after {TRIALS:,} whole trials / Optuna's TPE", ratio(drawn["by value"], drawn["whole"]), "", 2),
    ]  # fmt: skip


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _snapshot() -> tuple[Promotion, Snapshot, int]:
    """Return a snapshot in which one in three trials has been promoted out of each rung, and a trial that runs."""
    scheduler = Promotion(rungs=RUNGS, factor=FACTOR, is_maximized=False, hedge=True)
    entries = {}
    for number in range(ENTRIES):
        furthest = next((rung for rung in (3, 2, 1) if number % FACTOR**rung == 0), 0)
        until = max(scheduler.first_rung(number), furthest)
        values = dict.fromkeys(range(until + 1), number * 7919 % ENTRIES / ENTRIES)
        state = EntryState.COMPLETE if until == len(RUNGS) - 1 else EntryState.PAUSED
        entries[number] = Entry(number, until, values, state)
    running = ENTRIES - 2
    entries[running] = Entry(running, 0, {0: 0.5}, EntryState.RUNNING)
    return scheduler, Snapshot(entries, trials=2 * ENTRIES), running


def _drawing(sampler: BaseSampler, is_whole: bool) -> Callable[[], float]:
    study = optuna.create_study(sampler=sampler)
    draw = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=2))
    for number in range(TRIALS):
        trial = draw.ask()
        SPACE.suggest(trial)
        furthest = 3 if is_whole else next((rung for rung in (3, 2, 1) if number % FACTOR**rung == 0), 0)
        value = (number * 7919 % TRIALS) / TRIALS
        study.add_trial(
            create_trial(
                state=TrialState.COMPLETE if furthest == len(RUNGS) - 1 else TrialState.PRUNED,
                value=value,
                params=trial.params,
                distributions=trial.distributions,
                intermediate_values={RUNGS[rung]: value for rung in range(furthest + 1)},
            )
        )

    def drawn() -> float:
        optuna_adapter.forget_cached_trials(study)
        new = Trial(study, optuna_adapter.create_trial(study, create_trial(state=TrialState.RUNNING)))
        seconds = _timed(lambda: SPACE.suggest(new))
        study.tell(new, state=TrialState.FAIL)
        return seconds

    return drawn


ABOUT = (
    f"Decisions: one call with a snapshot of {ENTRIES:,} trials, a third of which were promoted out of each rung."
    f" Draws: five parameters of a new trial, in memory, {TRIALS:,} trials before it."
)
