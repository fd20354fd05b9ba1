"""Runs as `efficiency` finds them, and what it asks of SLURM's accounting."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from mgpu_slurm.registry import lookup
from mgpu_slurm.reports.usage import efficiency
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import Spec, Target
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.run_folder.sweep_records import SweepSummary
from mgpu_slurm.slurm import site, step_accounting
from mgpu_slurm.slurm.step_accounting import AccountedStep
from tests.sweeps import sweeps


class Accounting:
    """SLURM's accounting, which has a step for each job."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.answers = True

    def __call__(self, job_ids: Sequence[str]) -> list[AccountedStep] | None:
        self.asked.append([*job_ids])
        now = datetime.now().isoformat(timespec="seconds")
        return [AccountedStep(each, now, 5, 1.0, 100) for each in job_ids] if self.answers else None


@pytest.fixture
def accounting(monkeypatch: pytest.MonkeyPatch) -> Accounting:
    made = Accounting()
    monkeypatch.setattr(step_accounting, "accounted_steps", made)
    monkeypatch.setattr(site, "cluster_name", lambda: "here")
    return made


def make(folder: RunFolder, state: str, executor: str = "slurm", job: str = "7", cluster: str = "here") -> RunFolder:
    folder.create()
    spec = Spec(folder.run, Target(command=("true",)), "slurm", Resources(nodes=2, cpus_per_task=3))
    spec.write(folder)
    records.record_event(folder, "started", attempt=1, job_id=job, nodes=["n1", "n2"])
    ended = None if state == "RUNNING" else records.now()
    records.update_state(
        folder, run=folder.run, state=state, executor=executor, slurm_cluster=cluster, ended=ended, job_id=job
    )
    return folder


def found(*folders: RunFolder) -> list[tuple[RunFolder, RunState]]:
    return [(folder, records.read_state(folder)) for folder in folders]


def test_accounting_is_asked_once_about_each_run_that_has_ended(accounting: Accounting, tmp_path: Path) -> None:
    ended = make(RunFolder(tmp_path / "ended"), "COMPLETED", job="7")
    other = make(RunFolder(tmp_path / "other"), "FAILED", job="8_3")
    left = [
        make(RunFolder(tmp_path / "alive"), "RUNNING", job="9"),
        make(RunFolder(tmp_path / "local"), "COMPLETED", executor="local", job="10"),
        make(RunFolder(tmp_path / "away"), "COMPLETED", cluster="away", job="11"),
    ]
    everything = found(ended, other, *left)
    assert efficiency.gather(everything).runs[0].facts.used.mem is None
    assert accounting.asked == []
    runs = efficiency.gather(everything, asks=True).runs
    assert accounting.asked == [["7", "8_3"]]
    assert [run.facts.used.mem for run in runs] == [100, 100, None, None, None]
    assert [run.facts.used.mem for run in efficiency.gather(everything, asks=True).runs][:2] == [100, 100]
    assert len(accounting.asked) == 1
    # it was resumed
    records.record_event(ended, "started", attempt=2, job_id="12", nodes=["n1", "n2"])
    efficiency.gather(found(ended), asks=True)
    assert accounting.asked[1:] == [["7", "12"]]


def test_accounting_that_does_not_answer_is_asked_again(accounting: Accounting, tmp_path: Path) -> None:
    everything = found(make(RunFolder(tmp_path / "ended"), "COMPLETED"))
    accounting.answers = False
    assert efficiency.gather(everything, asks=True).runs[0].facts.used.mem is None
    accounting.answers = True
    assert efficiency.gather(everything, asks=True).runs[0].facts.used.mem == 100


def test_units_are_those_of_the_nodes_of_each_attempt(tmp_path: Path) -> None:
    def at(seconds: int) -> str:
        return (now + timedelta(seconds=seconds)).isoformat()

    now = datetime.now(timezone.utc)
    folder = make(RunFolder(tmp_path / "run"), "COMPLETED")
    folder.attempts.unlink()
    records.record_event(folder, "started", attempt=1, nodes=["n1", "n2"], time=at(0))
    records.record_event(folder, "ended", attempt=1, exit_code=75, time=at(10))
    records.record_event(folder, "started", attempt=2, nodes=["n1"], time=at(20))
    records.update_state(folder, ended=at(25))
    (run,) = efficiency.gather(found(folder)).runs
    # three cores on each node
    assert [float(each.ledger.total) for each in run.attempts] == pytest.approx([60, 15], abs=0.01)
    assert run.to_json()["unit"] == "core"


def test_units_are_those_for_which_each_attempt_had_asked(tmp_path: Path) -> None:
    now = datetime.now(timezone.utc)
    folder = make(RunFolder(tmp_path / "run"), "COMPLETED")
    folder.attempts.unlink()
    for attempt, asked in ((1, {"nodes": 1, "gpus_per_node": 8}), (2, {"nodes": 2, "cpus_per_task": 3})):
        begin, end = ((now + timedelta(seconds=20 * attempt + each)).isoformat() for each in (0, 10))
        records.record_event(folder, "started", attempt=attempt, nodes=["n1"], time=begin, asked=asked)
        records.record_event(folder, "ended", attempt=attempt, exit_code=0, time=end)
    (run,) = efficiency.gather(found(folder)).runs
    assert [float(each.ledger.total) for each in run.attempts] == pytest.approx([80, 30], abs=0.01)


@pytest.mark.parametrize(("state", "seconds"), [("RUNNING", 3600), ("PENDING", 10), ("REQUEUED", 10)])
def test_time_in_the_queue_is_not_allocated(state: str, seconds: float, tmp_path: Path) -> None:
    folder = make(RunFolder(tmp_path / "run"), state)
    folder.attempts.unlink()
    begun = datetime.now(timezone.utc) - timedelta(hours=1)
    records.record_event(folder, "started", attempt=1, nodes=["n1"], time=begun.isoformat())
    # nobody has recorded its end
    last = (begun + timedelta(seconds=10)).timestamp()
    for path in (folder.state, *folder.logs.glob("*")):
        os.utime(path, (last, last))
    (run,) = efficiency.gather([(folder, replace(records.read_state(folder), ended=None))]).runs
    assert run.facts.used.seconds == pytest.approx(seconds, abs=60 if state == "RUNNING" else 1)


def test_workers_of_a_confirmed_sweep_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, confirmation = RunFolder(tmp_path / "s"), RunFolder(tmp_path / "s-confirm")
    worker = make(sweep.of_task(0), "COMPLETED", executor="local")
    confirmation.create()
    confirmation.tasks.symlink_to(Path("..", "s", "tasks"))
    again = confirmation.of_task(0)
    monkeypatch.setattr(lookup, "all_states", lambda note: found(worker, again))
    assert [folder.run for folder, _ in efficiency.chosen([])] == ["s/0"]
    monkeypatch.setattr(lookup, "all_states", lambda note: found(again))
    # its sweep was deleted, or is not among the newest
    assert [folder.run for folder, _ in efficiency.chosen([])] == ["s-confirm/0"]


def test_ranges_that_end_at_the_best_values_are_those_of_the_summary(tmp_path: Path) -> None:
    sweep = sweeps.make(tmp_path)
    worker = sweep.of_task(0)
    worker.create()
    records.record_event(worker, "started", attempt=1, job_id="7", nodes=["n1"])
    records.update_state(worker, run=worker.run, state="RUNNING", executor="local", kind="worker", job_id="7")
    sweep.summary.write_text(json.dumps(SweepSummary(narrow={"x": "upper"}).to_json()))
    advice = efficiency.gather(found(worker)).advice
    assert [(each.runs, each.why) for each in advice] == [
        (("s",), "the best values are at the upper end of the range of x: widen it")
    ]


def test_run_that_cannot_be_read_costs_no_other(tmp_path: Path) -> None:
    good, bad = (make(RunFolder(tmp_path / name), "COMPLETED") for name in ("good", "bad"))
    never = RunFolder(tmp_path / "never")
    never.create()
    bad.spec.write_text("{")
    made = efficiency.gather(found(good, bad, never))
    assert [run.facts.run for run in made.runs] == ["good"]
    (warning,) = made.warnings
    assert warning.startswith("bad: ")
