"""The process that sends reports ends with the job, even if a tracker hangs, and is started again if it was killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mgpu_slurm.core.processes import RUN_VARIABLE, SINK_VARIABLE, started_at, with_variable
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.trackers.outcome import read_sent
from mgpu_slurm.trackers.tracker_start import TrackerProcess
from tests.support import REPOSITORY, wait_until
from tests.trackers.run_files import add, make_run, report, save

HANGING = """
import sys
from pathlib import Path
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.trackers import outcome, tracker_process

outcome.FINISH_SECONDS = 1
tracker_process.main(RunFolder(Path(sys.argv[1])))
"""


@pytest.fixture
def run(mlflow_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    run = make_run(tmp_path / "run-1", [f"mlflow=sqlite:///{mlflow_file}#project"])
    add(run, *map(report, range(1, 4)))
    yield run
    for pid in alive(run):
        os.kill(pid, signal.SIGKILL)


def alive(run: RunFolder) -> list[int]:
    return [pid for pid in with_variable(SINK_VARIABLE, str(run.path)) if started_at(pid) is not None]


def sent(run: RunFolder) -> int:
    return sum(each.reports for each in read_sent(run))


def test_it_is_apart_from_the_job_and_ends_with_it(run: RunFolder) -> None:
    tracker = TrackerProcess(run, read_spec(run))
    wait_until(lambda: len(alive(run)) == 1)
    (pid,) = alive(run)
    assert pid not in with_variable(RUN_VARIABLE, str(run.path.parent))
    assert int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) != os.getpid()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        os.kill(pid, signum)
    save(run, 2)
    wait_until(lambda: sent(run) == 2)
    records.update_state(run, state="COMPLETED")
    tracker.end(patience=60)
    assert sent(run) == 3
    wait_until(lambda: not alive(run))


def test_one_that_was_killed_is_started_again_for_the_rest(run: RunFolder) -> None:
    tracker = TrackerProcess(run, read_spec(run))
    wait_until(lambda: len(alive(run)) == 1)
    os.kill(alive(run)[0], signal.SIGKILL)
    wait_until(lambda: not alive(run))
    records.update_state(run, state="COMPLETED")
    tracker.end(patience=60)
    assert sent(run) == 3


def test_it_ends_by_itself_if_the_job_is_killed(run: RunFolder) -> None:
    script = (
        "import os, sys; from pathlib import Path; from mgpu_slurm.trackers.tracker_start import TrackerProcess;"
        " from mgpu_slurm.request.spec import read_spec; from mgpu_slurm.run_folder.layout import RunFolder;"
        " run = RunFolder(Path(sys.argv[1])); kept = TrackerProcess(run, read_spec(run)); os.kill(os.getpid(), 9)"
    )
    save(run, 2)
    assert subprocess.run([sys.executable, "-c", script, str(run.path)], check=False).returncode == -signal.SIGKILL
    wait_until(lambda: sent(run) == 2 and not alive(run))


def test_a_run_without_trackers_has_no_such_process(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run-2")
    tracker = TrackerProcess(run, read_spec(run))
    assert alive(run) == []
    tracker.end(patience=0)


def test_a_process_that_cannot_be_started_is_nobodys_failure(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    TrackerProcess(run, read_spec(run)).end(patience=0)
    assert alive(run) == []


def test_a_tracker_that_hangs_does_not_keep_it(run: RunFolder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        run = make_run(run.path.with_name("run-2"), [f"mlflow=http://127.0.0.1:{server.getsockname()[1]}#project"])
        add(run, report(1))
        records.update_state(run, state="COMPLETED")
        ours, its = socket.socketpair()
        with ours, its:
            process = subprocess.Popen([sys.executable, "-c", HANGING, str(run.path)], stdin=its)
            with server.accept()[0]:
                ours.shutdown(socket.SHUT_WR)
                assert process.wait(60) == -signal.SIGALRM
