"""Outputs are refused before anything is read, charts are files of their own, and a live page ends with its runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mgpu_slurm.core import processes
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.metrics.reporter import Reporter
from mgpu_slurm.reports.facts.gather import ReportOptions, gather
from mgpu_slurm.reports.facts.report_facts import Facts
from mgpu_slurm.reports.page import make_report
from mgpu_slurm.reports.page.make_report import check_output, make, write_charts
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.submission.project.outputs import is_page
from tests.metrics.event_files import ended_run

NAME = "a <b> & \x01"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(ended_run(tmp_path / "run"))
    reporter = Reporter(folder, 1)
    for progress in (1, 2, 3):
        reporter.report(progress, progress, {"loss": 1 / progress, NAME: 1.0})
    reporter.close(0)
    return folder


def test_outputs_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_output(None, None)
    check_output(tmp_path / "new.html", tmp_path / "new")
    check_output(tmp_path / "file", tmp_path)
    for out, folder, words in (
        (tmp_path, None, f"-o {tmp_path}: it is a folder: name a file, such as {tmp_path / 'report.html'}"),
        (tmp_path / "no" / "x.html", None, f"there is no folder {tmp_path / 'no'}: create it, or name another"),
        (tmp_path / "file" / "x.html", None, f"there is no folder {tmp_path / 'file'}"),
        (None, tmp_path / "file", f"--svg {tmp_path / 'file'}: it is a file: name a folder"),
        (None, tmp_path / "no" / "charts", f"there is no folder {tmp_path / 'no'}"),
    ):
        with pytest.raises(UserError) as error:
            check_output(out, folder)
        assert words in str(error.value)
        assert "\n" not in str(error.value)


def test_folder_of_somebody_else(tmp_path: Path, ordinary_user: None) -> None:
    with pytest.raises(UserError, match=r"-o /etc/report.html: folder /etc is not yours to write into"):
        check_output(Path("/etc/report.html"), None)


def test_each_chart_is_a_file_of_its_own(tmp_path: Path, run: RunFolder) -> None:
    names = write_charts(gather([str(run.path)], ReportOptions()), tmp_path / "charts")
    # no part of the code of runs that are submitted later
    assert all(is_page(tmp_path / "charts" / name) for name in names)
    assert names == ["a-b-by-progress.svg", "loss-by-progress.svg"]
    assert sorted(path.name for path in (tmp_path / "charts").iterdir()) == names
    space = "{http://www.w3.org/2000/svg}"
    for name, metric in zip(names, ("a <b> & \ufffd", "loss"), strict=True):
        root = ElementTree.parse(tmp_path / "charts" / name).getroot()
        assert root.tag == f"{space}svg"
        assert root.findtext(f"{space}title") == f"{metric} by progress"
        assert root.find(f"{space}style") is not None
        assert (root.get("width"), root.get("height")) == tuple(root.get("viewBox", "").split()[2:])


def test_live_page_ends_with_its_runs(tmp_path: Path, run: RunFolder) -> None:
    vouched = {"host": os.uname().nodename, "supervisor": [os.getpid(), processes.started_at(os.getpid())]}
    records.update_state(run, state="RUNNING", **vouched)
    out, pages, states = tmp_path / "page.html", [], []

    def written(facts: Facts, size: int) -> None:
        pages.append(out.read_text())
        assert size == len(pages[-1].encode())
        states.append(facts.runs[0].state)
        records.update_state(run, state="COMPLETED")

    make([str(run.path)], ReportOptions(), out, 1, True, said=written)
    assert states == ["RUNNING", "COMPLETED"]
    assert ['http-equiv="refresh" content="1"' in page for page in pages] == [True, False]


def test_live_page_outlives_a_disk_that_takes_nothing_for_a_while(
    tmp_path: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    vouched = {"host": os.uname().nodename, "supervisor": [os.getpid(), processes.started_at(os.getpid())]}
    records.update_state(run, state="RUNNING", **vouched)
    said: list[str] = []
    sizes: list[int] = []
    whole = make_report.write_page

    def failing(*given: Any) -> int:
        if sizes and not said:
            raise OSError("no space left on device")
        return whole(*given)

    def written(facts: Facts, size: int) -> None:
        sizes.append(size)
        if said:
            records.update_state(run, state="COMPLETED")

    monkeypatch.setattr(make_report, "write_page", failing)
    monkeypatch.setattr(make_report.time, "sleep", lambda seconds: None)
    make([str(run.path)], ReportOptions(), tmp_path / "page.html", 60, True, said.append, written)
    assert said == ["the page is written again in 60 s: no space left on device"]
    said.clear()
    with pytest.raises(OSError, match="no space"):
        make([str(run.path)], ReportOptions(), tmp_path / "page.html", None, True)


def test_page_to_standard_output(run: RunFolder, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    make([str(run.path)], ReportOptions(), None, None, True)
    text = capfdbinary.readouterr().out.decode()
    assert text.startswith("<!doctype html>\n")
    assert text.endswith("</html>\n")
