"""The pace of a training follows its last reports."""

from __future__ import annotations

import time

import pytest

from mgpu_slurm.metrics.pace import REPORTS, Pace


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as a list with one element."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def paces(pace: Pace, clock: list[float], reports: list[tuple[float, int]]) -> list[tuple[float, float] | None]:
    """Return what each report tells; a report is the seconds since the one before, and its progress."""
    told = []
    for seconds, progress in reports:
        clock[0] += seconds
        told.append(pace.reported(progress))
    return told


def test_first_report_tells_the_pace_if_its_beginning_is_known(clock: list[float]) -> None:
    assert paces(Pace(), clock, [(60.0, 1), (3.0, 2)]) == [None, (3.0, 3.0)]
    pace = Pace()
    pace.begin(4)
    assert paces(pace, clock, [(6.0, 5)]) == [(6.0, 6.0)]


def test_pace_is_that_of_one_unit_of_progress(clock: list[float]) -> None:
    assert paces(Pace(), clock, [(1.0, 100), (20.0, 200), (20.0, 300)])[-1] == (0.2, 20.0)


def test_pace_ignores_one_slow_report_and_follows_a_training_that_becomes_slower(clock: list[float]) -> None:
    pace = Pace()
    pace.begin(0)
    first = [(60.0, 1), *((2.0, progress) for progress in range(2, 8))]
    assert paces(pace, clock, first)[-1] == (2.0, 2.0)
    # a job that begins its loop again, such as one for each phase
    pace.begin(7)
    slower = [(5.0, progress) for progress in range(8, 9 + REPORTS)]
    assert paces(pace, clock, slower)[-1] == (5.0, 5.0)
