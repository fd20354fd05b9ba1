"""The statistics that benchmarks report, and the file they are kept in."""

from __future__ import annotations

import random

import pytest

from benchmarks.measure import Estimate, difference, interleave, median, ratio
from benchmarks.report import Row, replace_section


def test_cases_are_interleaved_and_warm_ups_are_dropped() -> None:
    turns: list[str] = []

    def case(name: str) -> int:
        turns.append(name)
        return len(turns)

    measured = interleave({name: lambda name=name: case(name) for name in "abc"}, rounds=20, warm_ups=2)
    rounds = [turns[start : start + 3] for start in range(0, len(turns), 3)]
    assert len(rounds) == 22
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert {names[0] for names in rounds} == {"a", "b", "c"}
    for name, values in measured.items():
        expected = [3 * index + names.index(name) + 1 for index, names in enumerate(rounds)]
        assert values == expected[2:]


def test_interval_contains_the_median_and_narrows_with_more_samples() -> None:
    chance = random.Random(1)
    samples = [chance.gauss(10, 1) for _ in range(400)]
    few, many = median(samples[:20]), median(samples)
    assert (few.count, many.count) == (20, 400)
    for estimate in (few, many):
        assert estimate.low < estimate.value < estimate.high
    assert many.low < 10 < many.high
    assert many.high - many.low < (few.high - few.low) / 2


def test_interval_contains_the_true_median_about_95_times_in_100() -> None:
    chance = random.Random(2)
    estimates = [median([chance.expovariate(1.0) for _ in range(30)]) for _ in range(60)]
    held = sum(estimate.low <= 0.6931 <= estimate.high for estimate in estimates)
    assert 53 <= held <= 60


def test_same_samples_give_the_same_interval() -> None:
    samples = [3.0, 1.0, 4.0, 1.5, 9.0]
    assert median(samples) == median(samples)


def test_one_outlier_moves_neither_median_nor_interval() -> None:
    assert median([1.0] * 30 + [100.0]) == Estimate(1.0, 1.0, 1.0, 31)


def test_paired_ratios_and_differences_cancel_shared_drift() -> None:
    baseline = [1.0, 2.0, 4.0, 8.0]
    assert ratio([1.5, 3.0, 6.0, 12.0], baseline) == Estimate(1.5, 1.5, 1.5, 4)
    assert difference([1.25, 2.25, 4.25, 8.25], baseline) == Estimate(0.25, 0.25, 0.25, 4)


def test_unequal_pairs_and_empty_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="longer"):
        ratio([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no samples"):
        median([])


@pytest.mark.parametrize(
    ("estimate", "verdict"),
    [
        (Estimate(0.8, 0.7, 0.9, 9), "yes"),
        (Estimate(0.8, 0.7, 1.1, 9), "yes, but the interval reaches above"),
        (Estimate(1.1, 0.9, 1.2, 9), "NO, but the interval reaches below"),
        (Estimate(1.2, 1.1, 1.3, 9), "NO"),
    ],
)
def test_verdict_says_if_the_interval_crosses_the_target(estimate: Estimate, verdict: str) -> None:
    assert Row("x", estimate, "s", 2, target=1.0).verdict == verdict


def test_row_shows_value_interval_count_and_target() -> None:
    row = Row("start", Estimate(0.0912, 0.0901, 0.0956, 30).scaled(1000), "ms", 1, target=150)
    assert row.cells() == ["start", "91.2 ms", "90.1 to 95.6", "30", "at most 150 ms", "yes"]


def test_section_is_replaced_in_place_and_a_new_one_is_appended() -> None:
    document = "# Speed\n\nWords.\n"
    document = replace_section(document, "one", "## one\n\nfirst\n")
    document = replace_section(document, "two", "## two\n\nsecond\n")
    assert document == "# Speed\n\nWords.\n\n## one\n\nfirst\n\n## two\n\nsecond\n"
    again = replace_section(document, "one", "## one\n\nnewer\n")
    assert again == "# Speed\n\nWords.\n\n## one\n\nnewer\n\n## two\n\nsecond\n"
    assert replace_section(again, "two", "## two\n\nsecond\n") == again
