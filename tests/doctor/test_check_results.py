"""How findings are told."""

from __future__ import annotations

import pytest

from mgpu_slurm.doctor import check_results


def test_fix_is_printed_below_the_finding() -> None:
    assert check_results.ok("clocks", "clocks agree").lines() == ["ok       clocks agree"]
    assert check_results.ok("clocks", "clocks of n[1-2] agree").lines(20) == [
        "ok       clocks of",
        "         n[1-2]",
        "         agree",
    ]
    assert check_results.warning("clocks", "clocks differ", "tell the site").lines() == [
        "warning  clocks differ",
        "         -> tell the site",
    ]


def test_plain_finding_has_fixed_keys() -> None:
    found = check_results.failed("clocks", "no clock", "buy one")
    assert found.plain == {
        "level": "failed",
        "check": "clocks",
        "text": "no clock",
        "fix": "buy one",
        "mend": "buy one",
    }
    assert check_results.has_failed([check_results.ok("clocks", ""), found])
    assert not check_results.has_failed([check_results.warning("clocks", "", "")])


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0000421, "0.042 ms"), (0.0031, "3.1 ms"), (0.42, "420 ms"), (0.9999, "1.0 s"), (12.34, "12.3 s")],
)
def test_durations_are_rounded_to_two_or_three_digits(seconds: float, words: str) -> None:
    assert check_results.span(seconds) == words
