"""What the benchmark of sweeps makes of times and reports."""

from __future__ import annotations

import pytest

from benchmarks.sweep.accuracy import ACCURACY, SECONDS, Search, outcome
from benchmarks.sweep.busy import Span, idle_share, idle_share_of_batches
from benchmarks.sweep.nothing import from_start_to_start


def test_trial_time_is_start_to_start_whatever_the_input_order() -> None:
    assert from_start_to_start([3.0, 0.0, 1.0]) == [1.0, 2.0]


def test_trial_time_is_divided_by_the_number_of_concurrent_trials() -> None:
    # two slots, each of which starts a trial every two seconds, a tenth of a second apart
    assert from_start_to_start([0.0, 0.1, 2.0, 2.1, 4.0], at_once=2) == pytest.approx([1.0, 1.0, 1.0])


def test_workers_that_always_train_are_never_idle() -> None:
    spans = [Span(0, 0, 2, 2), Span(0, 2, 6, 4), Span(1, 0, 5, 5), Span(1, 5, 6, 1)]
    assert idle_share(spans, workers=2, since=0, until=6) == 0


def test_trial_overhead_and_late_workers_count_as_idle_time() -> None:
    spans = [Span(0, 0, 4, 3), Span(1, 2, 4, 2)]
    assert idle_share(spans, workers=2, since=0, until=4) == pytest.approx(3 / 8)
    assert idle_share(spans, workers=2, since=2, until=4) == pytest.approx(1 / 4)


def test_training_after_the_end_of_the_window_does_not_count() -> None:
    spans = [Span(0, 0, 2, 2), Span(1, 0, 1, 1), Span(1, 1, 9, 8)]
    assert idle_share(spans, workers=2, since=0, until=1) == 0
    assert idle_share(spans, workers=2, since=0, until=9) == pytest.approx(7 / 18)


def test_batches_take_as_long_as_their_slowest_trials() -> None:
    assert idle_share_of_batches([1, 3, 2, 2], workers=2) == pytest.approx(1 - 8 / 10)
    assert idle_share_of_batches([2, 2, 2], workers=2) == pytest.approx(1 - 6 / 8)


def test_search_succeeds_at_the_first_report_that_is_good_enough() -> None:
    reports = [(109.0, ACCURACY), (104.0, 0.5), (106.0, ACCURACY), (105.0, 0.6), (107.0, 0.7)]
    assert outcome(reports, start=100.0) == Search(seconds=6.0, epochs=3, to_first=4.0, has_found=True)


def test_search_that_succeeds_too_late_or_never_counts_its_full_time() -> None:
    late = [(101.0, 0.5), (100.0 + SECONDS + 1, ACCURACY)]
    for reports in (late, late[:1]):
        assert outcome(reports, start=100.0) == Search(SECONDS, epochs=1, to_first=1.0, has_found=False)
