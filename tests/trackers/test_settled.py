"""Which reports can no longer be taken back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Report
from mgpu_slurm.trackers.settled import Reports
from tests.trackers.run_files import add, make_run, report, save


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "run")


def settled(reports: Reports) -> list[int]:
    reports.read()
    return [each.progress for each in reports.settled()]


def test_reports_are_settled_once_a_checkpoint_has_them(run: RunFolder) -> None:
    reports = Reports(run)
    assert settled(reports) == []
    add(run, report(1), report(2))
    assert settled(reports) == []
    save(run, 1)
    assert settled(reports) == [1]
    add(run, report(3))
    save(run, 3)
    assert settled(reports) == [1, 2, 3]


def test_a_checkpoint_before_a_report_at_the_same_step_does_not_settle_it(run: RunFolder) -> None:
    add(run, report(1, step=6), report(2, step=6))
    path = run.checkpoint(6)
    path.mkdir(parents=True)
    (path / "rank-00000.json").write_text(json.dumps({"shared": {"facts": {"step": 6, "progress": 1}}}))
    assert settled(Reports(run)) == [1]


@pytest.mark.parametrize("content", ["", "{", '{"shared": {}}', '{"shared": {"facts": {"progress": null}}}', "[1]"])
def test_a_damaged_checkpoint_settles_nothing(run: RunFolder, content: str) -> None:
    add(run, *map(report, range(1, 5)))
    save(run, 2)
    save(run, 4)
    (run.checkpoint(12) / "rank-00000.json").write_text(content)
    assert settled(Reports(run)) == [1, 2]


def test_a_later_attempt_takes_back_what_it_repeats(run: RunFolder) -> None:
    reports = Reports(run)
    add(run, *map(report, range(1, 6)))
    save(run, 2)
    assert settled(reports) == [1, 2]
    add(run, report(3, attempt=2), report(4, attempt=2))
    save(run, 4)
    assert settled(reports) == [1, 2, 3, 4]
    assert [each.attempt for each in reports.standing] == [1, 1, 2, 2]
    # an attempt that still runs on a node that SLURM has abandoned
    add(run, report(6, attempt=1))
    assert settled(reports) == [1, 2, 3, 4]
    assert [each.progress for each in reports.standing] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "line", ["", "{}", "[]", "null", '{"progress": 1}', '{"progress": "x", "step": 1, "time": "", "metrics": {}}']
)
def test_damaged_lines_are_left_out(run: RunFolder, line: str) -> None:
    add(run, report(1))
    with run.metrics.open("a") as file:
        file.write(f"{line}\n")
    add(run, report(2))
    reports = Reports(run)
    reports.read()
    assert [each.progress for each in reports.standing] == [1, 2]


def test_an_incomplete_last_line_is_read_when_it_is_complete(run: RunFolder) -> None:
    add(run, report(1), report(2))
    whole = run.metrics.read_bytes()
    run.metrics.write_bytes(whole[:-5])
    reports = Reports(run)
    reports.read()
    assert [each.progress for each in reports.standing] == [1]
    run.metrics.write_bytes(whole)
    reports.read()
    assert [each.progress for each in reports.standing] == [1, 2]


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Draw attempts as the progress in the checkpoint that each starts from, and its last report."""
    attempts, saved = [], 0
    for _ in range(draw(st.integers(1, 5))):
        start = saved
        end = draw(st.integers(start, start + 5))
        attempts.append((start, end))
        saved = draw(st.integers(start, end))
    return attempts


@settings(max_examples=50)
@given(histories())
def test_what_is_settled_is_never_taken_back(
    tmp_path_factory: pytest.TempPathFactory, attempts: list[tuple[int, int]]
) -> None:
    run = make_run(tmp_path_factory.mktemp("runs") / "run")
    reports, told = Reports(run), list[Report]()
    for number, (start, end) in enumerate(attempts, start=1):
        if start and not run.checkpoint(3 * start).exists():
            save(run, start)
            reports.read()
            assert reports.settled()[: len(told)] == told
            told = reports.settled()
        add(run, *(report(progress, attempt=number) for progress in range(start + 1, end + 1)))
        reports.read()
        assert reports.settled()[: len(told)] == told
        told = reports.settled()
    assert reports.standing[: len(told)] == told
    assert [each.progress for each in reports.standing] == list(range(1, len(reports.standing) + 1))
