"""What is read out of a run's history."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import pytest

from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder

BEGUN, LAST, LATER = "2026-01-01T00:00:00+00:00", "2026-01-01T01:00:00+00:00", "2026-01-02T00:00:00+00:00"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "try")
    folder.create()
    records.update_state(folder, run="try", state="RUNNING")
    return folder


def seconds(folder: RunFolder) -> list[float | None]:
    return [None if end is None else (end - begun).total_seconds() for begun, end in records.spans(folder)]


def test_lost_attempt_ends_when_it_was_lost_and_not_when_resumed(folder: RunFolder) -> None:
    records.record_event(folder, "started", attempt=1, time=BEGUN)
    assert seconds(folder) == [None]
    records.update_state(folder, state="FAILED", ended=LAST)
    records.note_unseen_end(folder)
    # as a resume does
    records.update_state(folder, state="PENDING", ended=None)
    records.record_event(folder, "started", attempt=2, time=LATER)
    assert seconds(folder) == [3600.0, None]


def test_attempt_requeued_by_slurm_ends_at_its_last_sign_of_life(folder: RunFolder) -> None:
    records.record_event(folder, "started", attempt=1, time=BEGUN)
    os.utime(folder.state, times=(datetime.fromisoformat(LAST).timestamp(),) * 2)
    records.note_unseen_end(folder, records.settle_event)
    records.record_event(folder, "started", attempt=2, time=LATER)
    assert seconds(folder) == [3600.0, None]


def test_recorded_end_is_not_recorded_again(folder: RunFolder) -> None:
    records.note_unseen_end(folder)
    records.record_event(folder, "started", attempt=1, time=BEGUN)
    records.record_event(folder, "ended", attempt=1, time=LAST)
    records.update_state(folder, state="FAILED", ended=LATER)
    records.note_unseen_end(folder)
    assert seconds(folder) == [3600.0]


def test_newest_written_file_is_the_last_sign_of_life(folder: RunFolder) -> None:
    records.record_event(folder, "started", attempt=1, time=BEGUN)
    log = folder.rank_log(1, 0)
    log.write_text("here")
    os.utime(folder.state, (1000, 1000))
    os.utime(log, (5000, 5000))
    assert records.last_sign_of_life(folder) == "1970-01-01T01:23:20+00:00"
