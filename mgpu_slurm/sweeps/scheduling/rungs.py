"""Rungs, at which trials are compared, and the brackets of Hyperband; both counted with integers.

Floating-point logarithms are wrong for some ranges: Optuna 5.0.0 finds 5 brackets for 243 with factor 3, instead of 6.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from functools import cache


def rungs_of(min_resource: int, max_resource: int, factor: int) -> tuple[int, ...]:
    """Return `min_resource`, `min_resource * factor` and so on below `max_resource`, and then `max_resource`."""
    found = [min_resource]
    while found[-1] * factor < max_resource:
        found.append(found[-1] * factor)
    return (*found, max_resource) if found[-1] < max_resource else tuple(found)


def values_at(rungs: Sequence[int], reports: Mapping[int, float]) -> dict[int, float]:
    """Return values by the index of the rung: the first that was reported at the rung or later.

    Args:
        rungs: progress values, ascending.
        reports: values by progress.
    """
    steps = sorted(reports) if rungs else []
    places = [bisect.bisect_left(steps, rung) for rung in rungs]
    return {rung: reports[steps[place]] for rung, place in enumerate(places) if place < len(steps)}


def bracket_sizes(min_resource: int, max_resource: int, factor: int) -> tuple[int, ...]:
    """Return the number of trials of each bracket of Hyperband in one round, as in the paper (Li et al. 2018).

    The first bracket compares its trials at all rungs, the next ones from the second, third, ... rung on.
    """
    count = 0
    while min_resource * factor**count <= max_resource:
        count += 1
    # ceil(count * factor**s / (s + 1)) for s = count - 1, ..., 0
    return tuple(-(-count * factor**power // (power + 1)) for power in reversed(range(count)))


def bracket_of(number: int, sizes: Sequence[int]) -> int:
    """Return the bracket of a trial, by its number alone; the trials of each bracket are spread evenly.

    Args:
        number: the trial's number among those of its study, from 0.
        sizes: the number of trials of each bracket in one round.
    """
    return _round(tuple(sizes))[number % sum(sizes)]


@cache
def _round(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the brackets of the trials of one round: the next one goes to the bracket that is most behind."""
    total, has = sum(sizes), [0] * len(sizes)
    order = []
    for number in range(total):
        behind = [(number + 1) * size - count * total for size, count in zip(sizes, has, strict=True)]
        bracket = behind.index(max(behind))
        has[bracket] += 1
        order.append(bracket)
    return tuple(order)
