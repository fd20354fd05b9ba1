"""Differences between trials, paired by seed."""

from __future__ import annotations

import math
import statistics

import pytest

from mgpu_slurm.sweeps.analysis.confirmed import Confirmation, Confirmed, compared


def trial(number: int, *values: float) -> Confirmed:
    return Confirmed(number, {}, dict(enumerate(values, 1)), statistics.fmean(values))


def test_interval_is_students_over_the_differences_of_each_seed() -> None:
    best, other = compared([trial(4, 1.0, 3.0, 5.0), trial(7, 1.2, 3.1, 5.6)], is_maximized=False)
    assert (best.difference, best.is_worse) == (0.0, False)
    # 4.303 is the 97.5% quantile with two degrees of freedom, as in tables of Student's distribution
    half = 4.303 * statistics.stdev([0.2, 0.1, 0.6]) / math.sqrt(3)
    assert other.difference == pytest.approx(0.3)
    assert other.interval == pytest.approx((0.3 - half, 0.3 + half), rel=1e-3)
    assert not other.is_worse


def test_seeds_that_are_hard_for_all_do_not_hide_a_difference() -> None:
    _, other = compared([trial(0, 0.1, 9.0, 40.0), trial(1, 0.2, 9.11, 40.1)], is_maximized=False)
    assert other.is_worse
    assert other.interval[1] < 0.12


def test_lower_is_worse_if_the_metric_is_maximized() -> None:
    _, other = compared([trial(0, 0.9, 0.91, 0.92), trial(1, 0.8, 0.81, 0.82)], is_maximized=True)
    assert other.difference == pytest.approx(0.1)
    assert other.is_worse


def test_intervals_are_wider_if_more_trials_are_compared() -> None:
    values = [trial(0, 1.0, 1.1, 1.2), trial(1, 1.2, 1.1, 1.3), trial(2, 2.0, 2.1, 2.2)]
    alone, together = compared(values[:2], False)[1], compared(values, False)[1]
    assert together.difference == alone.difference
    # 7.649 is the quantile for 1 - 0.05 / 2 / 3, as there are three pairs
    assert (together.interval[1] - together.difference) / (alone.interval[1] - alone.difference) == pytest.approx(
        7.649 / 4.303, rel=1e-3
    )


def test_table_says_what_may_be_as_good() -> None:
    trials = compared([trial(4, 1.0, 1.1, 1.2), trial(7, 1.2, 1.1, 1.3), trial(2, 2.0, 2.1, 2.2)], False)
    lines = Confirmation("s-confirm", "loss", range(1, 4), 2, 1, trials).lines()
    assert lines[0] == "confirmed with seeds 1, 2, 3, as study s-confirm; 2 trials left; 1 trial without a result"
    assert [line.split()[0] for line in lines[1:]] == ["TRIAL", "4", "7", "2"]
    assert [line.endswith(end) for line, end in zip(lines[2:], ("best", "may be as good", "worse"), strict=True)]
