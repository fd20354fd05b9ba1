"""How findings are told."""

from __future__ import annotations

import pytest

from mgpu_slurm import findings


def test_the_mend_stands_below_what_was_found() -> None:
    assert findings.ok("clocks", "clocks agree").lines() == ["ok       clocks agree"]
    assert findings.ok("clocks", "clocks of n[1-2] agree").lines(20) == [
        "ok       clocks of",
        "         n[1-2]",
        "         agree",
    ]
    assert findings.warning("clocks", "clocks differ", "tell the site").lines() == [
        "warning  clocks differ",
        "         -> tell the site",
    ]


def test_programs_get_the_same_by_fixed_names() -> None:
    found = findings.failed("clocks", "no clock", "buy one")
    assert found.plain == {"level": "failed", "check": "clocks", "text": "no clock", "mend": "buy one"}
    assert findings.has_failed([findings.ok("clocks", ""), found])
    assert not findings.has_failed([findings.warning("clocks", "", "")])


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0000421, "0.042 ms"), (0.0031, "3.1 ms"), (0.42, "420 ms"), (0.9999, "1.0 s"), (12.34, "12.3 s")],
)
def test_times_have_two_or_three_digits(seconds: float, words: str) -> None:
    assert findings.span(seconds) == words
