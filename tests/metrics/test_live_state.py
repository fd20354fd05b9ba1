"""What rank 0 says of itself comes into `state.json` without the training having to wait for it."""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core import files
from mgpu_slurm.metrics.reporter import Reporter
from mgpu_slurm.metrics.sinks import LiveState, Tolerance
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Report
from tests.support import wait_until


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    records.update_state(folder, attempts=1, state="RUNNING")
    return folder


def test_state_is_written_without_another_call(folder: RunFolder) -> None:
    live = LiveState(folder, 1, Tolerance())
    live.report(Report(1, 3, records.now(), 1, {}))
    wait_until(lambda: records.read_state(folder).progress == 1)
    # the thread pauses now, and then finds these
    live.report(Report(2, 3, records.now(), 1, {}))
    live.step_done(4)
    wait_until(lambda: [getattr(records.read_state(folder), name) for name in ("step", "progress")] == [4, 2])
    live.close(4)


def test_state_says_when_the_training_ends(folder: RunFolder) -> None:
    live = LiveState(folder, 1, Tolerance())
    live.expect(10, 0)
    wait_until(lambda: records.read_state(folder).total == 10)
    live.report(Report(1, 3, records.now(), 1, {}))
    live.close(3)
    state = records.read_state(folder)
    assert state.pace is not None
    reported = datetime.fromisoformat(state.reported or "")
    assert state.seconds_left(reported) == pytest.approx(9 * state.pace[0])
    # a training that makes no progress does not come nearer to its end
    assert state.seconds_left(reported + timedelta(hours=1)) == pytest.approx(8 * state.pace[0], abs=1e-5)


def test_report_does_not_wait_for_the_state_file(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename that hangs delays nothing; metrics and curves are on the disk when `report` returns."""
    gate, passed = os.pipe()
    replace = os.replace

    def hangs(*arguments: Any) -> None:
        os.read(gate, 1)
        replace(*arguments)

    monkeypatch.setattr(os, "replace", hangs)
    reporter = Reporter(folder, 1)
    for progress in (1, 2, 3):
        reporter.report(progress, 10 * progress, {"loss": 0.5})
        assert len(list(files.read_jsonl(folder.metrics))) == progress
    (events,) = folder.tensorboard.iterdir()
    assert events.read_bytes().count(b"loss") == 3
    os.write(passed, b"...")
    reporter.close(31)
    state = records.read_state(folder)
    assert (state.step, state.progress, state.metrics) == (31, 3, {"loss": 0.5})
    assert state.state == "RUNNING"


def test_earlier_attempt_does_not_overwrite_a_later_one(folder: RunFolder) -> None:
    records.update_state(folder, attempts=2, step=7)
    live = LiveState(folder, 1, Tolerance())
    live.close(3)
    assert records.read_state(folder).step == 7


def test_unsubmitted_run_gets_no_state_file(tmp_path: Path) -> None:
    live = LiveState(RunFolder(tmp_path), 1, Tolerance())
    live.close(3)
    assert list(tmp_path.iterdir()) == []
