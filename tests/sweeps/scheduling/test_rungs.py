"""Rungs and brackets are counted with integers."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_slurm.sweeps.scheduling.rungs import bracket_of, bracket_sizes, rungs_of

RANGES = st.tuples(st.integers(1, 20), st.integers(1, 10_000_000), st.integers(2, 32))


@pytest.mark.parametrize(
    ("least", "most", "factor", "rungs"),
    [
        (1, 27, 3, (1, 3, 9, 27)),
        (1, 10, 3, (1, 3, 9, 10)),
        (2, 100, 4, (2, 8, 32, 100)),
        (5, 5, 2, (5,)),
        (1, 2, 3, (1, 2)),
    ],
)
def test_rungs_are_multiples_and_the_maximum(least: int, most: int, factor: int, rungs: tuple[int, ...]) -> None:
    assert rungs_of(least, most, factor) == rungs


@given(RANGES)
def test_rungs_grow_by_the_factor(numbers: tuple[int, int, int]) -> None:
    least, more, factor = numbers
    *rungs, last = rungs_of(least, least + more, factor)
    assert last == least + more
    assert rungs == [least * factor**place for place in range(len(rungs))]
    assert rungs[-1] < last <= rungs[-1] * factor


@pytest.mark.parametrize(("most", "factor", "count"), [(243, 3, 6), (1000, 10, 4), (81, 3, 5), (729, 3, 7), (26, 3, 3)])
def test_brackets_are_counted_exactly(most: int, factor: int, count: int) -> None:
    assert len(bracket_sizes(1, most, factor)) == count


def test_bracket_sizes_are_those_of_the_paper() -> None:
    """Table 1 of Li et al. 2018, for 81 epochs and factor 3."""
    assert bracket_sizes(1, 81, 3) == (81, 34, 15, 8, 5)


@given(RANGES)
def test_sizes_match_the_formula_in_fractions(numbers: tuple[int, int, int]) -> None:
    least, more, factor = numbers
    sizes = bracket_sizes(least, least + more, factor)
    count = len(sizes)
    assert least * factor ** (count - 1) <= least + more < least * factor**count
    expected = [Fraction(count * factor**power, power + 1) for power in reversed(range(count))]
    assert all(want <= size < want + 1 for size, want in zip(sizes, expected, strict=True))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 300))
def test_each_bracket_gets_its_share_of_any_first_trials(sizes: list[int], trials: int) -> None:
    found = Counter(bracket_of(number, sizes) for number in range(trials))
    for bracket, size in enumerate(sizes):
        assert abs(found[bracket] - trials * size / sum(sizes)) < len(sizes)
    whole = Counter(bracket_of(number, sizes) for number in range(sum(sizes)))
    assert [whole[bracket] for bracket in range(len(sizes))] == sizes
