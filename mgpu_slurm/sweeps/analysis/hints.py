"""What a sweep's trials say about its file: whether the first rung misleads, and whether a range is too narrow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from optuna.study import Study

from mgpu_slurm.sweeps.scheduling.construction import scheduler_of
from mgpu_slurm.sweeps.scheduling.halving import HEDGE_EVERY, Promotion
from mgpu_slurm.sweeps.search.parameters import wider
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import summary
from mgpu_slurm.sweeps.study.snapshots import Snapshots

FEWEST_HEDGED = 10
"""Number of hedged trials from which rungs are compared."""


def hints(study: Study, sweep: Sweep) -> list[str]:
    """Return advice for the next sweep, in lines for people."""
    narrow = summary.narrow_ranges(summary.ranked(summary.own_trials(study), sweep), sweep)
    return [*_rank_hints(study, sweep), *(wider(name, end) for name, end in narrow.items())]


def _rank_hints(study: Study, sweep: Sweep) -> list[str]:
    """Return how well the first rung predicts the third, by the hedged trials, which are not selected there."""
    scheduler = scheduler_of(sweep.pruner, sweep.direction) if sweep.pruner.pauses else None
    if not isinstance(scheduler, Promotion):
        return []
    entries = Snapshots(study, scheduler).take(sweep.trials).entries.values()
    pairs = [
        (each.values[0], each.values[scheduler.first_rung(each.number)])
        for each in entries
        if scheduler.is_hedged(each.number) and each.has_arrived
    ]
    if len(pairs) < FEWEST_HEDGED:
        return []
    correlation = rank_correlation(pairs)
    low, high = interval_of_correlation(correlation, len(pairs))
    first, later = scheduler.rungs[0], scheduler.rungs[scheduler.first_rung(HEDGE_EVERY - 1)]
    told = (
        f"ranks at progress {first} and {later} correlate by {correlation:.2f} ({low:.2f} to {high:.2f}, {len(pairs)}"
        " hedged trials)"
    )
    if low > 0:
        return [told]
    return [f"{told}: progress {first} may mislead: raise min_resource"]


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Spearman's rank correlation; equal values share their mean rank."""
    ranks = [_ranks(column) for column in zip(*pairs, strict=True)]
    if any(len(set(column)) == 1 for column in ranks):
        return 0.0
    return float(np.corrcoef(np.array(ranks))[0][1])


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    places = {value: [place for place, each in enumerate(ordered) if each == value] for value in set(values)}
    return [sum(places[value]) / len(places[value]) for value in values]


def interval_of_correlation(correlation: float, count: int) -> tuple[float, float]:
    """Return the 95% interval of Spearman's correlation by Fisher's transformation, with the variance of Bonett and
    Wright (Psychometrika, 2000).

    Args:
        count: number of pairs, more than 3.
    """
    if abs(correlation) >= 1:
        return correlation, correlation
    center = math.atanh(correlation)
    width = 1.96 * math.sqrt((1 + correlation**2 / 2) / (count - 3))
    return math.tanh(center - width), math.tanh(center + width)
