"""What ended the attempts of runs, with accounting's word on those that SLURM restarted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mgpu_slurm.reports import attempts
from mgpu_slurm.reports.attempts import Before
from mgpu_slurm.run_folder import failures, records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.slurm import accounting
from mgpu_slurm.slurm.accounting import AccountedStart

TIME = "2026-11-28T12:00:00"


def restarted_run(base: Path, number: int) -> RunFolder:
    """Return a run that SLURM has started twice, without a word on the end of its first attempt."""
    folder = RunFolder(base / f"run{number}")
    folder.create()
    for attempt in (1, 2):
        facts = {"job_id": str(number), "nodes": ["n1"], "restarts": attempt - 1}
        records.record_event(folder, "started", attempt=attempt, **facts)
    records.update_state(folder, state="RUNNING", executor="slurm", attempts=2)
    return folder


def start(folder: RunFolder, job_id: str, state: str) -> AccountedStart:
    return AccountedStart(job_id=job_id, state=state, submit=TIME, end=TIME, name=folder.run)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The jobs about which accounting was asked, in each call: the first start of each was preempted."""
    calls: list[Sequence[str]] = []

    def accounted(job_ids: Sequence[str]) -> list[AccountedStart]:
        calls.append(job_ids)
        runs = {each: RunFolder(Path(f"run{each}")) for each in job_ids}
        return [start(run, job_id, state) for job_id, run in runs.items() for state in ("PREEMPTED", "RUNNING")]

    monkeypatch.setattr(accounting, "accounted", accounted)
    return calls


def test_accounting_is_asked_once_about_many_restarted_runs(
    tmp_path: Path, asked: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounting, "began_on", lambda *_: pytest.fail("it is asked for whom each was preempted"))
    runs = [restarted_run(tmp_path, number) for number in range(attempts.FEW_JOBS + 1)]
    known = attempts.accounted_restarts(runs)
    found = [attempts.before(run, accounted=known) for run in runs]
    (call,) = asked
    assert sorted(call) == sorted(str(number) for number in range(attempts.FEW_JOBS + 1))
    assert found == [[Before(1, failures.PREEMPTED.words, "SLURM restarted it")]] * len(runs)


def test_who_preempted_few_runs_is_named(
    tmp_path: Path, asked: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = accounting.Preemptor("9", "ann", "high")
    monkeypatch.setattr(accounting, "began_on", lambda *_: [other])
    (found,) = attempts.before(restarted_run(tmp_path, 1))
    assert found.ended == f"{failures.PREEMPTED.words} (job 9 of ann in partition high)"


def test_accounting_is_not_asked_about_restarts_that_were_requested(tmp_path: Path, asked: list[Sequence[str]]) -> None:
    run = RunFolder(tmp_path / "run")
    run.create()
    records.update_state(run, state="RUNNING", executor="slurm", attempts=2)
    records.record_event(run, "started", attempt=1, job_id="1", nodes=["n1"])
    records.record_event(run, "ended", attempt=1, message="stopped at step 3, asked to end")
    records.record_event(run, "resumed", state="CANCELLED", reason="cancelled")
    records.record_event(run, "started", attempt=2, job_id="2", nodes=["n1"])
    assert attempts.accounted_restarts([run]).jobs == {}
    (found,) = attempts.before(run)
    assert found.ended == "CANCELLED: stopped at step 3, asked to end"
    assert asked == []


def test_run_that_cannot_be_read_does_not_keep_others_from_being_asked_about(
    tmp_path: Path, asked: list[Sequence[str]]
) -> None:
    broken, run = RunFolder(tmp_path / "broken"), restarted_run(tmp_path, 1)
    broken.create()
    broken.attempts.mkdir()
    assert attempts.accounted_restarts([broken, run]).jobs == {run: ["1"]}
