"""What a terminal shows of sweeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mgpu_slurm.core.files import write_json
from mgpu_slurm.reports import sweep_status
from mgpu_slurm.reports.live import follow
from mgpu_slurm.run_folder import states
from mgpu_slurm.run_folder.records import read_state
from mgpu_slurm.run_folder.sweep_records import SweepSummary, TrialSummary
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


def test_error_of_several_trials_is_shown_once() -> None:
    long = "ValueError: " + 200 * "x"
    reasons = [long, long, "another", long]
    trials = [TrialSummary(number=number, state="FAIL", reason=reason) for number, reason in enumerate(reasons)]
    pruned = TrialSummary(number=4, state="PRUNED", reason=long, progress=3)
    found = SweepSummary(metric="loss", recent=(*trials, pruned))
    lines = sweep_status.new_lines(found, set())
    assert [line[len("-- trial   0  ") :].strip() for line in lines] == [
        *(f"failed: {long}", "failed: as trial 0", "failed: another", "failed: as trial 0", f"pruned at 3: {long}")
    ]
    # also if the first one was shown a while ago
    assert sweep_status.new_lines(found, {0, 1, 2, 4}) == [lines[3]]


def test_error_of_several_workers_is_shown_once(tmp_path: Path) -> None:
    made = make_sweep(tmp_path)
    state = replace(read_state(made.folder), kind="worker")
    error = "rank 0 on n1: ImportError: no module named vision"
    some = [("FAILED", error), ("FAILED", error), ("RUNNING", "seed 3"), ("RUNNING", "seed 3"), ("COMPLETED", "")]
    workers = [replace(state, run=f"digits/{n}", state=each, reason=why) for n, (each, why) in enumerate(some)]
    workers[4] = replace(workers[4], metrics={"trials": 1.0})
    told = sweep_status.lines(made.folder, workers)
    last = {line.split()[0]: line.rpartition("  ")[2] for line in told[told.index("") + 2 :]}
    assert last == {"0": error, "1": "as worker 0", "2": "seed 3", "3": "seed 3", "4": "1 trial ended here"}
    shown: dict[str, str] = {}
    assert [follow._words(worker, shown) for worker in workers] == [
        *(f": {error}", ": as digits/0", ": seed 3", ": seed 3", "  1 trial ended here")
    ]
