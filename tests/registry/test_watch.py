"""Looking at a run while SLURM does not answer, played by a squeue that waits for a file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.registry import watch
from mgpu_slurm.registry.watch import Watch
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from tests.support import wait_until

RUNS = "42|RUNNING|N/A|0|2024-05-01T12:00:00|N/A||None|"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(watch, "ANSWER_TAKES", 0.01)
    monkeypatch.setitem(watch.ASK_EVERY, "slurm", 0.01)
    (tmp_path / "bin").mkdir()
    folder = RunFolder(tmp_path / "run")
    folder.create()
    records.update_state(folder, executor="slurm", job_id="42", state="RUNNING", submitted=records.now())
    return folder


@pytest.fixture
def squeue(run: RunFolder, tmp_path: Path) -> Callable[[str], Path]:
    """Makes squeue do this when it may; the file that lets it."""

    def make(does: str) -> Path:
        script, gate = tmp_path / "bin" / "squeue", tmp_path / "gate"
        script.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/calls\nuntil [ -e {gate} ]; do sleep 0.01; done\n{does}\n")
        script.chmod(0o755)
        return gate

    return make


def test_unresponsive_slurm_is_asked_once_and_does_not_block(
    run: RunFolder, squeue: Callable[[str], Path], tmp_path: Path
) -> None:
    gate = squeue(f"echo '{RUNS}'")
    watch = Watch(run)
    for _ in range(10):
        assert watch.state().state == "RUNNING"
    wait_until(lambda: (tmp_path / "calls").exists() and (tmp_path / "calls").read_text() != "")
    (asked,) = (tmp_path / "calls").read_text().split()
    # nobody has lost patience with it: it waits to this moment
    os.kill(int(asked), 0)
    records.update_state(run, state="COMPLETED")
    assert watch.state().state == "COMPLETED"
    gate.touch()


def test_each_outage_of_slurm_is_reported_once(run: RunFolder, squeue: Callable[[str], Path], tmp_path: Path) -> None:
    down = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    squeue(f"[ -e {tmp_path}/up ] && {{ echo '{RUNS}'; exit; }}; {down}").touch()
    notes: list[str] = []
    watch = Watch(run, note=notes.append)

    def calls() -> int:
        return len((tmp_path / "calls").read_text().split()) if (tmp_path / "calls").exists() else 0

    def ask_again() -> None:
        before = calls()
        wait_until(lambda: watch.state().state == "RUNNING" and calls() > before + 1)

    ask_again()
    assert notes == ["SLURM's controller does not answer: showing the last known states; asking again"]
    assert watch.problem is not None
    (tmp_path / "up").touch()
    ask_again()
    assert watch.problem is None
    (tmp_path / "up").unlink()
    ask_again()
    assert len(notes) == 2


def test_watching_a_deleted_run_is_an_error(run: RunFolder) -> None:
    records.update_state(run, executor="local")
    watch = Watch(run)
    assert watch.state().state == "RUNNING"
    shutil.rmtree(run.path)
    with pytest.raises(UserError, match="run run was deleted meanwhile"):
        watch.state()


def test_several_runs_share_one_request(run: RunFolder, squeue: Callable[[str], Path], tmp_path: Path) -> None:
    other = RunFolder(tmp_path / "other")
    other.create()
    records.update_state(other, executor="slurm", job_id="43", state="RUNNING", submitted=records.now())
    squeue(f"echo '{RUNS}'; echo '{RUNS.replace('42', '43')}'").touch()
    watch = Watch(other, run, may_vanish=True)
    wait_until(lambda: bool(watch.pairs()) and (tmp_path / "calls").exists())
    assert [folder.run for folder, _ in watch.pairs()] == ["other", "run"]
    before = len((tmp_path / "calls").read_text().split())
    records.update_state(other, state="COMPLETED")
    wait_until(lambda: [state.state for _, state in watch.pairs()] == ["COMPLETED", "RUNNING"])
    # a run that was deleted is no reason to look at no other
    shutil.rmtree(other.path)
    assert [folder.run for folder, _ in watch.pairs()] == ["run"]
    assert before == 1
