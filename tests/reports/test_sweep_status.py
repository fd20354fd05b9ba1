"""What a terminal shows of sweeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mgpu_slurm.core.files import write_json
from mgpu_slurm.reports import sweep_status
from mgpu_slurm.run_folder import states
from mgpu_slurm.run_folder.records import read_state
from mgpu_slurm.sweeps.study import claims as claiming
from mgpu_slurm.sweeps.study import summary
from tests.reports.sweeps import make_sweep


def test_running_workers_come_first_and_then_pending_ones(tmp_path: Path) -> None:
    made = make_sweep(tmp_path)
    write_json(made.folder.summary, summary.summarize(made.study, made.sweep).to_json())
    some = [states.COMPLETED, states.PENDING, states.RUNNING, states.FAILED, states.RUNNING]
    state = read_state(made.folder)
    workers = [replace(state, run=f"digits/{number}", state=each) for number, each in enumerate(some)]
    told = sweep_status.lines(made.folder, workers)
    assert [line.split()[0] for line in told[told.index("") + 2 :]] == ["2", "4", "1", "0", "3"]


def test_last_failure_is_shown_with_its_log_folder(tmp_path: Path) -> None:
    made = make_sweep(tmp_path)
    for reason in ("ValueError: first", "ValueError: second"):
        number = made.begin()
        claiming.fail(made.study, made.study.trials[number], reason)
    write_json(made.folder.summary, summary.summarize(made.study, made.sweep).to_json())
    told = sweep_status.lines(made.folder, [read_state(made.folder)])
    assert [line for line in told if line.startswith("failed")] == [
        f"failed    trial 1: ValueError: second  ({made.folder.trials}/1/logs)"
    ]
