"""Ticks, scales and paths, for all numbers that a curve may have."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as some

from mgpu_slurm.reports.page import svg
from mgpu_slurm.reports.page.svg import Chart, Scale, log_ticks, path, ticks, whole_ticks

FINITE = some.floats(allow_nan=False, allow_infinity=False)
POSITIVE = some.floats(min_value=1e-280, allow_infinity=False)
CURVES = some.lists(some.lists(some.floats(), max_size=6).map(np.asarray), max_size=3)


def check(found: list[float], low: float, high: float) -> None:
    """Ticks that a reader can tell apart, within the axis or as near to its ends as numbers are."""
    assert all(a < b for a, b in itertools.pairwise(found))
    room = (high / 1000 - low / 1000) * 2
    assert all(low - room <= each <= high + room for each in found)


@given(FINITE, FINITE, some.integers(2, 10))
def test_ticks(one: float, other: float, count: int) -> None:
    low, high = sorted((one, other))
    found = ticks(low, high, count)
    check(found, low, high)
    assert len(found) <= 2 * count + 1
    if high - low > max(1e-288, 1e-9 * max(abs(low), abs(high))):
        assert len(found) >= count / 2


def test_ticks_are_round() -> None:
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert ticks(-0.3, 0.7, 4) == [-0.25, 0, 0.25, 0.5]
    assert ticks(2**53, 2**53 + 10) == [2**53 + each for each in (0, 2, 4, 6, 8, 10)]
    assert ticks(1.0, 1.0) == [1.0]
    assert ticks(math.nan, 1.0) == ticks(-math.inf, math.inf) == []
    assert whole_ticks(Scale(0, 3, 0, 1)) == [0, 1, 2, 3]
    assert log_ticks(0.01, 100) == [0.01, 0.1, 1, 10, 100]


@given(POSITIVE, POSITIVE)
def test_ticks_of_a_logarithmic_axis(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assume(high / low > 1.1)
    found = log_ticks(low, high)
    assert all(a < b for a, b in itertools.pairwise(found))
    assert all(low * 0.998 <= each <= high * 1.002 for each in found)
    assert len(found) <= 20


@given(CURVES, some.booleans())
def test_scale_holds_all_that_is_finite(curves: list[np.ndarray], is_log: bool) -> None:
    scale = Scale.over(curves, 10, 110, is_log)
    assert scale.low < scale.high
    places = [
        float(scale(each))
        for curve in curves
        for each in curve
        if math.isfinite(each) and (each > 1e-290 or not is_log)
    ]
    assert all(10 - 1e-6 <= place <= 110 + 1e-6 for place in places)
    for curve in curves:
        np.testing.assert_allclose(scale(curve), [scale(each) for each in curve])
    assert all(math.isfinite(scale(each)) for each in scale.ticks())


def points(d: str) -> list[list[tuple[float, float]]]:
    """The lines of a path, as a browser draws them."""
    lines: list[list[tuple[float, float]]] = []
    assert re.fullmatch(r"(M-?[\d.]+ -?[\d.]+(l-?[\d.]+(?: [\d.]+|-[\d.]+))*)*", d), d
    for letter, x, y in re.findall(r"([Ml])(-?[\d.]+) ?(-?[\d.]+)", d):
        if letter == "M":
            lines.append([(float(x), float(y))])
        else:
            before = lines[-1][-1]
            lines[-1].append((before[0] + float(x), before[1] + float(y)))
    return lines


@given(some.lists(some.tuples(some.floats(), some.floats()), max_size=20))
def test_path_goes_through_its_points_with_gaps(given_points: list[tuple[float, float]]) -> None:
    xs, ys = np.asarray(given_points, np.float64).reshape(-1, 2).T
    expected: list[list[tuple[float, float]]] = []
    for is_known, each in itertools.groupby(given_points, lambda each: all(map(math.isfinite, each))):
        if is_known:
            clipped = [tuple(min(max(at, -1e4), 1e4) for at in point) for point in each]
            rounded = [(round(x * 10) / 10, round(y * 10) / 10) for x, y in clipped]
            expected.append([point for point, _ in itertools.groupby(rounded)])
    found = points(path(xs, ys))
    assert [len(each) for each in found] == [len(each) for each in expected]
    for line, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(line, other, atol=1e-6)


def test_chart_has_its_parts_and_a_name_for_those_who_do_not_see_it() -> None:
    chart = Chart("c", "<Loss>", 'of "a" & b', data={"data_metric": "<i>"})
    scale = Scale(0.0, 10.0, chart.x0, chart.x1)
    chart.x_axis(scale, "step & more")
    chart.y_axis(Scale(0.0, 1.0, chart.y0, chart.y1))
    root = ElementTree.fromstring(chart.svg())
    assert (root.get("role"), root.get("aria-labelledby")) == ("img", "c-title c-desc")
    assert (root.get("data-metric"), root.findtext("title"), root.findtext("desc")) == ("<i>", "<Loss>", 'of "a" & b')
    x, y = root.findall("g[@class='axis']")
    assert [each.text for each in x.findall("text")] == ["0", "2", "4", "6", "8", "10", "step & more"]
    assert [each.text for each in y.findall("text")] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert len(x.findall("path[@class='tick']")) == len(y.findall("path[@class='grid']")) == 6
    assert svg.COLORS == 8
