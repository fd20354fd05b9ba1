"""The script's columns have the values of the curves, within the budget, and may stand in a page."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as some

from mgpu_slurm.reports.facts.report_facts import RunFacts
from mgpu_slurm.reports.facts.series import AXES, Series
from mgpu_slurm.reports.page import page_data
from mgpu_slurm.reports.page.shown import Shown


def shown(index: int = 0, config: dict[str, Any] | None = None, **series: Series) -> Shown:
    facts = RunFacts(f"run-{index}", "run", None, "COMPLETED", "", config=config or {}, series=series)
    return Shown(index, facts, facts.run, facts.run, facts.run, None, 0)


def series(values: np.ndarray, begin: float = 0.0) -> Series:
    progress = np.arange(len(values), dtype=np.float64)
    return Series(progress, progress * 10, begin + progress / 7, values)


def decoded(data: dict[str, Any], place: int) -> np.ndarray:
    kind, _, text = data["columns"][place].partition(":")
    return np.frombuffer(base64.b64decode(text), f"<{kind}")


@given(some.lists(some.floats(), min_size=1, max_size=30))
def test_columns_have_the_values(values: list[float]) -> None:
    curve = series(np.asarray(values))
    data = json.loads(page_data.packed([shown(loss=curve)], 1000, {"loss": "minimize"}))
    places = data["runs"][0]["metrics"]["loss"]
    assert data["axes"] == list(AXES)
    for place, expected in zip(places, (curve.progress, curve.step, curve.minutes, curve.value), strict=True):
        found = decoded(data, place)
        if found.dtype == np.float32:
            expected = expected.astype(np.float32)
        np.testing.assert_array_equal(found, expected)
    large = np.abs(curve.value[np.isfinite(curve.value)]) > 2**24
    assert decoded(data, places[3]).dtype == (np.float64 if large.any() else np.float32)


def test_steps_beyond_float32_stay_apart() -> None:
    steps = np.asarray([2.0**53, 2.0**53 + 2])
    data = json.loads(page_data.packed([shown(a=Series(steps, steps, steps, steps / 2**53))], 1000, []))
    assert decoded(data, data["runs"][0]["metrics"]["a"][1]).tolist() == steps.tolist()


def test_points_stay_within_the_budget_and_equal_columns_are_there_once() -> None:
    random = np.random.default_rng(0)
    for count, length in ((1, 5000), (200, 1000), (400, 5000)):
        runs = [
            shown(each, a=series(random.random(length), each), b=series(random.random(length), each))
            for each in range(count)
        ]
        most = page_data.points_per_curve(runs)
        columns = json.loads(page_data.packed(runs, most, []))["columns"]
        assert len(set(columns)) == len(columns)
        assert sum(map(len, columns)) <= page_data.BUDGET * 1.1
        assert page_data.FEWEST_POINTS <= most <= page_data.MOST_POINTS
        assert most == 1000 or count > 1
    same = [shown(each, a=series(np.zeros(10)), b=series(np.zeros(10))) for each in range(9)]
    assert len(json.loads(page_data.packed(same, 1000, []))["columns"]) == 4


def test_data_may_stand_in_a_page() -> None:
    name = "</script><!-- \u2028 é"
    config = {name: name, "nan": float("nan"), "big": 2**60, "list": [1, float("inf")], "none": None, "yes": True}
    text = page_data.packed([shown(config=config, **{name: series(np.asarray([1.0]))})], 1000, list(config))
    assert "<" not in text
    assert text.isascii()
    (run,) = json.loads(text)["runs"]
    assert list(run["metrics"]) == [name]
    assert run["config"] == {**config, "nan": "nan", "list": "[1, Infinity]"}
