"""Each sink keeps the contract; several of them share one warning about one disk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mgpu_slurm.core import files
from mgpu_slurm.metrics import sinks
from mgpu_slurm.metrics.reporter import Reporter
from mgpu_slurm.metrics.sinks import EventFiles, LiveState, MetricsFile, Screen, Sink, Tolerance
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from tests.metrics.contract import Heard, SinkContract
from tests.metrics.test_event_writer import points


class TestMetricsFile(SinkContract):
    writes_with = "mgpu_slurm.metrics.sinks.append_jsonl"

    def sink(self, folder: RunFolder, tolerance: Tolerance) -> Sink:
        return MetricsFile(folder)

    def heard(self, folder: RunFolder, screen: str) -> Heard:
        return [(record["step"], record["metrics"]["loss"]) for record in files.read_jsonl(folder.metrics)]


class TestEventFiles(SinkContract):
    writes_with = "mgpu_slurm.metrics.event_writer.os.write"

    def sink(self, folder: RunFolder, tolerance: Tolerance) -> Sink:
        return EventFiles(folder)

    def heard(self, folder: RunFolder, screen: str) -> Heard:
        return points(folder.tensorboard).get("loss", []) if folder.tensorboard.exists() else []

    def test_reports_after_the_resumed_step_are_replaced(self, folder: RunFolder) -> None:
        for first in (1, 2):
            sink = EventFiles(folder)
            if first > 1:
                sink.resume(10, 1)
            for progress in (first, first + 1):
                sink.report(sinks.Report(progress, 10 * progress, records.now(), 1, {"loss": float(first)}))
            sink.close(0)
        assert points(folder.tensorboard)["loss"] == [(10, 1.0), (20, 2.0), (30, 2.0)]

    def test_progress_of_a_job_without_optimizer_steps_is_the_step(self, folder: RunFolder) -> None:
        for first in (1, 3):
            sink = EventFiles(folder)
            if first > 1:
                sink.resume(0, 2)
            for progress in range(first, first + 3):
                sink.report(sinks.Report(progress, 0, records.now(), 1, {"loss": float(first)}))
            sink.close(0)
        assert points(folder.tensorboard)["loss"] == [(1, 1.0), (2, 1.0), (3, 3.0), (4, 3.0), (5, 3.0)]


class TestLiveState(SinkContract):
    writes_with = "mgpu_slurm.metrics.sinks.update_state"
    keeps_all = False

    def sink(self, folder: RunFolder, tolerance: Tolerance) -> Sink:
        return LiveState(folder, 1, tolerance)

    def heard(self, folder: RunFolder, screen: str) -> Heard:
        state = records.read_state(folder)
        return [(state.step, state.metrics["loss"])] if state.metrics else []


class TestScreen(SinkContract):
    writes_with = "mgpu_slurm.metrics.sinks.as_text"

    def sink(self, folder: RunFolder, tolerance: Tolerance) -> Sink:
        return Screen()

    def heard(self, folder: RunFolder, screen: str) -> Heard:
        lines = re.findall(r"^\[ +\d+\]  step (\d+) +loss (\S+)  \(\d+\.\d s\)$", screen, re.MULTILINE)
        return [(int(step), float(loss)) for step, loss in lines]


def test_full_disk_warns_once_for_all_sinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def is_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sinks, "append_jsonl", is_full)
    monkeypatch.setattr(sinks, "EventWriter", is_full)
    reporter = Reporter(RunFolder(tmp_path), 1)
    reporter.report(1, 10, {"loss": 1.0})
    reporter.close(10)
    assert capsys.readouterr().out.count("WARNING") == 1
