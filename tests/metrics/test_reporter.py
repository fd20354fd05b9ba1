"""What a job function has returned, as the numbers of its result."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mgpu_slurm.metrics.reporter import as_numbers, odd_result, result_of


@pytest.mark.parametrize(
    ("returned", "has_trained", "result"),
    [
        (None, True, {"loss": 0.5}),
        (2, True, {"value": 2.0}),
        ({"loss": 0.0, "other": 1}, True, {"loss": 0.0, "other": 1.0}),
        # restored at the end of its training: the loop has set nothing
        ({"loss": 0.0, "other": 1}, False, {"loss": 0.5, "other": 1.0}),
        (None, False, {"loss": 0.5}),
        ("done", True, {"loss": 0.5}),
        ({"loss": 0.25, "model": object()}, True, {"loss": 0.25}),
        ({"model": object()}, True, {"loss": 0.5}),
        ({}, True, {}),
    ],
)
def test_result_is_the_returned_value_or_the_last_report(
    returned: object, has_trained: bool, result: dict[str, float]
) -> None:
    assert result_of(returned, {"loss": 0.5}, has_trained) == result


def test_non_numeric_result_is_named() -> None:
    assert odd_result({"loss": 1.0}) is odd_result(None) is odd_result(3) is None
    assert odd_result("done") == (
        "the job function returned value = 'done' (str), which is not a number: the result omits it"
    )
    assert "history = [1, 2] (list)" in (odd_result({"loss": 1.0, "history": [1, 2]}) or "")
    assert len(odd_result("x" * 10**6) or "") < 200


def test_non_string_result_names_become_strings() -> None:
    result = result_of({np.int64(3): 0.5, (0, 1): 0.25, "loss": 0.0}, {})
    assert json.loads(json.dumps(result)) == {"3": 0.5, "(0, 1)": 0.25, "loss": 0.0}
    assert "(0, 1) = 'done' (str)" in (odd_result({(0, 1): "done"}) or "")


@pytest.mark.parametrize("digits", [400, 5000])
def test_integer_too_large_for_a_float_is_not_a_number(digits: int) -> None:
    returned = {"loss": 0.5, "states": 10**digits}
    assert result_of(returned, {}) == {"loss": 0.5}
    warning = odd_result(returned) or ""
    assert "states = " in warning
    assert "(int), which is not a number: the result omits it" in warning
    assert len(warning) < 200
    with pytest.raises(TypeError, match="metric 'states': expected a number"):
        as_numbers(returned)
