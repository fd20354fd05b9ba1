"""Simulated sweeps: how good the best trial is after a part of the budget, by sampler and scheduler; and what they
cost."""

from __future__ import annotations

import itertools
import random
import statistics
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context

from benchmarks import peers
from benchmarks.measure import CONFIDENCE, RESAMPLES, Estimate
from benchmarks.report import Row, Section
from benchmarks.search import cost
from benchmarks.search.clock import MARKS, RESOURCE, RESUME, START
from benchmarks.search.peer_sweeps import BOHB, RAY
from benchmarks.search.problems import CONTINUOUS, FAMILIES, Family
from benchmarks.search.simulation import METHODS, Sweep

FIRST_SEED = 200
SEEDS, WORKERS = 20, 8
LONG_SEEDS, LONG_WORKERS = 5, 64
WHOLE_PER_WORKER = 4
"""The budget of a worker, as the number of whole trials."""

TPE, HYPERBAND_OF_OPTUNA = "Optuna's TPE, whole trials", "Optuna's TPE with its Hyperband"
WHEN = ("a quarter", "half", "the end")

Regrets = Mapping[str, Mapping[Family, Sequence[Sequence[float]]]]
"""By method and family, for each seed, the regret after each of the `MARKS`."""


def run() -> Section:
    found = _measured(SEEDS, WORKERS)
    rows = [*_regret_rows(found), *_ratio_rows(found), *cost.rows()]
    return Section("search", f"{_about(SEEDS, WORKERS)} {cost.ABOUT}", rows, _NOTES)


def run_long() -> Section:
    found = _measured(LONG_SEEDS, LONG_WORKERS)
    return Section("search, 64 workers", _about(LONG_SEEDS, LONG_WORKERS), [*_regret_rows(found), *_ratio_rows(found)])


def _measured(seeds: int, workers: int) -> Regrets:
    peers.install()
    cases = [*itertools.product(FAMILIES, range(FIRST_SEED, FIRST_SEED + seeds))]
    measured: dict[str, list[list[float]]] = {}
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        given = [(family, seed, workers, WHOLE_PER_WORKER * workers) for family, seed in cases]
        # each in a process of its own environment, side by side with ours
        others = {name: pool.submit(peers.simulated, name, given) for name in (RAY, BOHB)}
        for name in METHODS:
            measured[name] = list(pool.map(_regrets, itertools.repeat(name), *zip(*given, strict=True)))
        measured |= {name: future.result() for name, future in others.items()}
    return {
        name: {family: [regrets for case, regrets in zip(cases, found, strict=True) if case[0] == family]
               for family in FAMILIES}
        for name, found in measured.items()
    }  # fmt: skip


def _regrets(name: str, family: Family, seed: int, workers: int, whole_trials: int) -> list[float]:
    import optuna

    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return Sweep(METHODS[name], family, seed, workers, whole_trials).regrets()


def _regret_rows(found: Regrets) -> list[Row]:
    return [
        Row(f"regret at {when}, {name}", _mean_of(found[name], mark), "", 3)
        for name in found
        for mark, when in enumerate(WHEN)
    ]


def _ratio_rows(found: Regrets) -> list[Row]:
    plain, hedged, stops = "asha, hedge: false", "asha", "hyperband"
    rows = [
        Row(f"regret at {WHEN[mark]}, {plain} / Optuna's TPE", _ratio(found, plain, TPE, mark), "", 2, 0.5)
        for mark in (1, 2)
    ]
    rows += [
        Row(
            f"regret at the end, {hedged} / Optuna's TPE, {family}",
            _ratio(found, hedged, TPE, 2, [family]),
            "",
            2,
            0.75,
        )
        for family in FAMILIES
    ]
    better = min((RAY, BOHB), key=lambda name: _mean_of(found[name], 1).value)
    rows += [
        Row(f"regret at half, {plain} / {better}, the better of both", _ratio(found, plain, better, 1), "", 2, 0.8),
        *(
            Row(f"regret at {WHEN[mark]}, {ours} / {theirs}", _ratio(found, ours, theirs, mark), "", 2)
            for ours in (plain, hedged)
            for theirs in (RAY, BOHB)
            for mark in (1, 2)
        ),
    ]
    what = f"regret at the end, {stops} / {HYPERBAND_OF_OPTUNA}"
    return [*rows, Row(what, _ratio(found, stops, HYPERBAND_OF_OPTUNA, 2), "", 2, 0.7)]


# -- means of families, with intervals by bootstrap over seeds


def _mean_of(regrets: Mapping[Family, Sequence[Sequence[float]]], mark: int) -> Estimate:
    return _bootstrapped(
        lambda chosen: statistics.mean(statistics.mean(regrets[family][seed][mark] for seed in chosen)
                                       for family in FAMILIES),
        len(regrets[FAMILIES[0]]),
    )  # fmt: skip


def _ratio(found: Regrets, ours: str, theirs: str, mark: int, families: Sequence[Family] = FAMILIES) -> Estimate:
    """Return the ratio of the mean regrets; the same seeds for both."""

    def total(name: str, chosen: Sequence[int]) -> float:
        return sum(found[name][family][seed][mark] for family in families for seed in chosen)

    seeds = len(found[ours][families[0]])
    return _bootstrapped(lambda chosen: total(ours, chosen) / total(theirs, chosen), seeds)


def _bootstrapped(figure: object, seeds: int) -> Estimate:
    assert callable(figure)
    chance = random.Random(0)
    drawn = sorted(figure(chance.choices(range(seeds), k=seeds)) for _ in range(RESAMPLES))
    tail = round(RESAMPLES * (1 - CONFIDENCE) / 2)
    return Estimate(figure(range(seeds)), drawn[tail], drawn[-1 - tail], seeds)


def _about(seeds: int, workers: int) -> str:
    return (
        f"Sweeps on a simulated clock with {workers} asynchronous workers: real samplers and schedulers on the storage"
        f" of Optuna {version('optuna')} in memory, learning curves in place of training. {len(FAMILIES)} families of"
        f" curves (see `benchmarks/search/problems.py`), {CONTINUOUS + 1} parameters, trials of 1 to {RESOURCE} epochs,"
        f" factor 3; a start costs {START} epochs, a resumption {RESUME}, an epoch .6 to 1.4. The budget is"
        f" {WHOLE_PER_WORKER} whole trials for each worker. Regret: the true final loss of the trial with the best"
        " value at the furthest rung, less the optimum, over that of the median random configuration; after"
        f" {MARKS[0]:g} and {MARKS[1]:g} of the budget, and at its end; the mean of the families. {seeds} seeds of each"
        f" family, from {FIRST_SEED} on, the same for all methods; intervals are bootstraps over seeds."
    )


_NOTES = [
    "`asha` pauses trials and continues the best of them; `hedge: false` compares all of them at the first rung."
    " `hyperband`, and `asha` with `pause: false`, only prune. All of them draw by TPE by rung, unless another sampler"
    " is named.",
    "The regret is 1 before the first report. Whole trials report once, at their end.",
    f"Ray Tune {peers.RAY} and Syne Tune {peers.SYNE_TUNE}: their own schedulers and samplers, called as their tuners"
    " do, on the same clock and the same problems; their trials report at the rungs too. Both only stop trials.",
]
