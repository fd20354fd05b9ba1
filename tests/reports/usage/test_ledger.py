"""The parts of a ledger add up to what was allocated, whatever has happened, and each moment is in the right one."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_slurm.reports.usage import ledger
from mgpu_slurm.reports.usage.ledger import OPEN, Ledger, Outcome, Reported, Save, Stretch, TrialRun

OUTCOMES: list[Outcome] = ["running", "completed", "stopped", "failed", "lost"]
TIMES = st.integers(0, 100_000)


@st.composite
def stretches(draw: st.DrawFn, can_be_open: bool = False) -> Stretch:
    """An attempt, with reports and checkpoints that may be anywhere: clocks of nodes differ, and records get lost."""
    begin = draw(TIMES)
    end = draw(st.just(OPEN)) if can_be_open and draw(st.booleans()) else begin + draw(TIMES)
    reports = draw(st.lists(st.builds(Reported, TIMES, st.integers(-2, 20)), max_size=12))
    saves = [
        Save(begun, begun + stood, begun + stood + more)
        for begun, stood, more in draw(st.lists(st.tuples(TIMES, TIMES, TIMES), max_size=6))
    ]
    return Stretch(begin, end, draw(st.sampled_from(OUTCOMES)), reports, saves)


def seconds(attempt: Stretch) -> Fraction:
    return Fraction(attempt.end - attempt.begin, 1000)


@given(st.lists(stretches(), max_size=6), st.none() | TIMES, st.booleans(), st.integers(1, 1000))
def test_parts_of_a_run_add_up_to_what_was_allocated(
    attempts: list[Stretch], typical: int | None, failed: bool, units: int
) -> None:
    found = [each.times(units) for each in ledger.of_run(attempts, typical, failed)]
    assert [each.total for each in found] == [seconds(attempt) * units for attempt in attempts]
    assert all(getattr(each, part) >= 0 for each in found for part in ledger.PARTS)
    assert sum(found, Ledger()).total == sum(map(seconds, attempts)) * units


@given(st.lists(stretches(), max_size=6), st.none() | TIMES, st.booleans())
def test_parts_of_an_attempt_follow_each_other(attempts: list[Stretch], typical: int | None, failed: bool) -> None:
    for attempt, spans in zip(attempts, ledger.spans_of_run(attempts, typical, failed), strict=True):
        edges = [attempt.begin, *(span.end for span in spans)]
        assert [span.begin for span in spans] == edges[:-1]
        assert edges[-1] == attempt.end


TRIALS = st.lists(
    st.lists(st.tuples(stretches(can_be_open=True), st.integers(0, 2)), max_size=4).flatmap(
        lambda pairs: st.builds(
            TrialRun, st.just([pair[0] for pair in pairs]), st.just([pair[1] for pair in pairs]), st.booleans()
        )
    ),
    max_size=6,
)


@given(st.dictionaries(st.integers(0, 2), st.lists(stretches(), max_size=3)), TRIALS, st.integers(1, 3))
def test_parts_of_workers_add_up_to_what_was_allocated(
    workers: dict[int, list[Stretch]], trials: list[TrialRun], at_once: int
) -> None:
    found = ledger.of_workers(workers, trials, at_once)
    for worker, attempts in workers.items():
        assert [each.total for each in found[worker]] == list(map(seconds, attempts))
        assert all(getattr(each, part) >= 0 for each in found[worker] for part in ledger.PARTS)


# -- what is in which part; times in seconds


def attempt(
    begin: float, end: float, outcome: Outcome, reports: dict[float, int] | None = None, *saves: tuple[float, ...]
) -> Stretch:
    given = [Reported(round(time * 1000), progress) for time, progress in (reports or {}).items()]
    times = [[round(time * 1000) for time in save] for save in saves]
    return Stretch(round(begin * 1000), round(end * 1000), outcome, given, [Save(*each) for each in times])


def parts(found: Ledger) -> dict[str, float]:
    return {name: value for name, value in found.to_json().items() if value}


def test_time_before_the_first_report_is_starting_but_for_one_report() -> None:
    (found,) = ledger.of_run([attempt(0, 100, "completed", {30: 1, 50: 2, 70: 3, 90: 4})])
    assert parts(found) == {"starting": 10, "training": 80, "other": 10}


def test_reports_that_a_resumed_run_has_done_again_are_repeated() -> None:
    first = attempt(0, 50, "stopped", {10: 1, 20: 2, 30: 3, 40: 4})
    second = attempt(100, 150, "completed", {115: 3, 125: 4, 135: 5, 145: 6})
    found = ledger.of_run([first, second])
    assert parts(found[0]) == {"training": 50}
    assert parts(found[1]) == {"starting": 5, "repeated": 20, "training": 20, "other": 5}


def test_attempt_that_failed_has_lost_what_came_after_its_last_checkpoint() -> None:
    first = attempt(0, 50, "failed", {10: 1, 20: 2, 30: 3}, (31, 32, 33))
    (found, _) = ledger.of_run([first, attempt(100, 150, "completed", {110: 3, 120: 4})])
    assert parts(found) == {"training": 31, "saving": 1, "failed": 18}


@pytest.mark.parametrize("outcome", ["failed", "lost"])
def test_attempt_that_failed_before_its_first_report_came_to_nothing(outcome: Outcome) -> None:
    (found, _) = ledger.of_run([attempt(0, 50, outcome), attempt(100, 150, "completed", {110: 1, 120: 2})])
    assert parts(found) == {"failed": 50}


def test_run_that_failed_for_good_keeps_what_led_to_its_last_checkpoint() -> None:
    first = attempt(0, 50, "stopped", {10: 1, 20: 2, 30: 3}, (30, 30, 31))
    second = attempt(100, 150, "failed", {110: 4, 120: 5})
    found = ledger.of_run([first, second], failed=True)
    assert [parts(each) for each in found] == [{"training": 30, "failed": 20}, {"failed": 50}]


def test_training_stands_for_a_copy_and_at_its_end_until_the_checkpoint_is_complete() -> None:
    (found,) = ledger.of_run([attempt(0, 50, "stopped", {10: 1, 20: 2}, (12, 13, 19), (45, 46, 49))])
    assert parts(found) == {"training": 45, "saving": 5}


def test_script_that_reports_nothing_trains() -> None:
    (found,) = ledger.of_run([attempt(0, 50, "completed")])
    assert parts(found) == {"training": 50}


def test_running_attempt_trains_after_its_last_report() -> None:
    (found,) = ledger.of_run([attempt(0, 50, "running", {10: 1, 20: 2})])
    assert parts(found) == {"training": 50}


def test_worker_is_between_trials_without_one() -> None:
    trials = [
        TrialRun([attempt(5, 15, "completed", {10: 1, 15: 2})], [0]),
        TrialRun([attempt(20, 30, "stopped", {25: 1, 30: 2}, (26, 26, 27))], [0], failed=True),
        TrialRun([attempt(0, 40, "completed", {20: 1})], [1]),
    ]
    found = ledger.of_workers({0: [attempt(0, 40, "completed")]}, trials)
    assert parts(found[0][0]) == {"starting": 5, "training": 16, "failed": 4, "between_trials": 15}


def test_trial_whose_end_nobody_recorded_ends_with_the_next_one_of_its_worker_or_the_worker() -> None:
    def lost(begin: float, report: float) -> Stretch:
        return Stretch(round(begin * 1000), OPEN, "lost", [Reported(round(report * 1000), 1)])

    trials = [TrialRun([lost(0, 8)], [0]), TrialRun([lost(20, 25)], [0])]
    found = ledger.of_workers({0: [attempt(0, 40, "lost")]}, trials)
    # the first one was given back by a worker that restarted in place
    assert parts(found[0][0]) == {"training": 25, "failed": 15}


def test_trials_side_by_side_share_what_their_worker_has() -> None:
    trials = [
        TrialRun([attempt(0, 40, "running", {10: 1, 20: 2})], [0]),
        TrialRun([attempt(10, 30, "completed", {20: 1, 30: 2})], [0]),
    ]
    found = ledger.of_workers({0: [attempt(0, 40, "running")]}, trials, at_once=2)
    assert parts(found[0][0]) == {"starting": 5, "training": 30, "between_trials": 5}
