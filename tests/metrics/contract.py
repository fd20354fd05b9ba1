"""What every sink has to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_slurm.metrics.sinks import Sink, Tolerance, Tolerant
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Report
from tests.support import wait_until

Heard = list[tuple[int, float]]
"""Steps, and the loss reported at each."""


class SinkContract:
    """Take it, make the sink, read what it has written, and name the function that a full disk makes fail."""

    writes_with: str
    """A function by which the sink writes, as `monkeypatch` names it."""
    keeps_all = True
    """Whether it keeps all reports, not only the last one."""

    def sink(self, folder: RunFolder, tolerance: Tolerance) -> Sink:
        raise NotImplementedError

    def heard(self, folder: RunFolder, screen: str) -> Heard:
        raise NotImplementedError

    @pytest.fixture
    def folder(self, tmp_path: Path) -> RunFolder:
        folder = RunFolder(tmp_path / "run")
        folder.create()
        records.update_state(folder, attempts=1, state="RUNNING")
        return folder

    @pytest.fixture
    def made(self, folder: RunFolder) -> Sink:
        tolerance = Tolerance()
        return Tolerant(self.sink(folder, tolerance), tolerance)

    def expect(self, heard: Heard, expected: Heard) -> None:
        assert heard == (expected if self.keeps_all else expected[-1:])

    def test_reports_are_written_in_order(
        self, made: Sink, folder: RunFolder, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for progress in (1, 2, 3):
            made.report(report(progress))
            made.step_done(10 * progress)
        made.close(30)
        self.expect(self.heard(folder, capsys.readouterr().out), [(10, 1.0), (20, 2.0), (30, 3.0)])

    def test_close_without_a_report_writes_no_values(
        self, made: Sink, folder: RunFolder, capsys: pytest.CaptureFixture[str]
    ) -> None:
        made.resume(20, 2)
        made.close(20)
        made.close(20)
        assert [loss for _, loss in self.heard(folder, capsys.readouterr().out)] == []

    @pytest.mark.parametrize(
        ("error", "warning", "lost"),
        [
            (OSError(28, "No space"), "metrics are kept in memory for now: [Errno 28] No space; training continues", 0),
            (ValueError("a bug"), "metrics cannot be written: ValueError: a bug; training continues", 2),
        ],
        ids=["full disk", "bug"],
    )
    def test_write_error_warns_once_and_full_disk_loses_nothing(
        self,
        made: Sink,
        folder: RunFolder,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        error: Exception,
        warning: str,
        lost: int,
    ) -> None:
        said = ""

        def has_warned() -> bool:
            nonlocal said
            said += capsys.readouterr().out
            return "WARNING" in said

        def fail(*_: object, **__: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(self.writes_with, fail)
            for progress in (1, 2):
                made.report(report(progress))
                wait_until(has_warned)
            made.step_done(20)
        made.report(report(3))
        made.close(30)
        said += capsys.readouterr().out
        assert said.count("WARNING") == 1
        assert f"mgpu_slurm: WARNING: {warning}\n" in said
        self.expect(self.heard(folder, said), [(10, 1.0), (20, 2.0), (30, 3.0)][lost:])


def report(progress: int) -> Report:
    return Report(progress, 10 * progress, records.now(), 1, {"loss": float(progress)})
