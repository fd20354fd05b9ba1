"""The table of a study's trials: for people, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps.analysis import trial_table
from mgpu_slurm.sweeps.analysis.trial_table import TrialRow
from tests.sweeps.client.test_pausing import make_asha, pause
from tests.sweeps.sweeps import begin, finish, make, study_of, sweep_of, worker

SPACE = {"x": {"float": [0.0, 1.0]}, "sizes": {"choice": [[8], [8, 16]]}, "deep": {"choice": [True]}}


def rows(folder: RunFolder) -> list[TrialRow]:
    return trial_table.rows(study_of(folder), sweep_of(folder), folder)


def test_all_that_have_begun_are_listed_with_their_values_at_rungs(tmp_path: Path) -> None:
    folder = make_asha(tmp_path)
    part = worker(folder, 1)
    for score in (0.5, 0.25):
        pause(part, folder, score)
    begin(part)
    part.report(1, {"score": 0.9})
    part.report(3, {"score": float("nan")})
    part.prune("score is nan", 3)
    begin(part)
    part.fail("ValueError: boom")
    begin(part)
    found = rows(folder)
    assert [(row.number, row.state, row.value) for row in found] == [
        (0, "PAUSED", 0.5), (1, "PAUSED", 0.25), (2, "PRUNED", 0.9), (3, "FAIL", None), (4, "RUNNING", None),
    ]  # fmt: skip
    assert [row.rungs for row in found] == [{"1": 0.5}, {"1": 0.25}, {"1": 0.9}, {}, {}]
    assert [row.reason for row in found] == ["", "", "score is nan", "ValueError: boom", ""]
    # also of paused trials, which no worker has now
    assert [row.worker for row in found] == [1] * 5
    assert (found[4].seconds, found[2].seconds is not None) == (None, True)


def test_trial_pruned_while_paused_counts_the_time_of_its_workers(tmp_path: Path) -> None:
    folder = make_asha(tmp_path, trials=3)
    part = worker(folder, 0)
    pause(part, folder, 0.5)
    before = study_of(folder).trials[0].system_attrs["mgpu:seconds"]
    begin(part)
    part.report(1, {"score": 0.6})
    part.pause(1)
    (first, _) = rows(folder)
    assert (first.state, first.seconds) == ("PRUNED", before)


def test_csv_has_a_column_for_each_parameter_and_rung(tmp_path: Path) -> None:
    folder = make(tmp_path, space=SPACE, pruner={"name": "hyperband", "max_resource": 3}, sampler="random")
    part = worker(folder, 0)
    for score in (0.5, 0.75):
        begin(part)
        part.report(1, {"score": score / 2})
        part.report(3, {"score": score})
        finish(part, score)
    table = list(csv.DictReader(io.StringIO(trial_table.as_csv(rows(folder)))))
    assert [row["value"] for row in table] == ["0.5", "0.75"]
    assert [(row["rungs.1"], row["rungs.3"]) for row in table] == [("0.25", "0.5"), ("0.375", "0.75")]
    assert {row["params.sizes"] for row in table} <= {"[8]", "[8, 16]"}
    assert {row["params.deep"] for row in table} == {"true"}
    assert [float(row["params.x"]) for row in table] == [row.params["x"] for row in rows(folder)]
    (best,) = trial_table.rows(study_of(folder), sweep_of(folder), folder, top=1)
    assert best.number == 1


def test_study_without_trials_says_so(tmp_path: Path) -> None:
    folder = make(tmp_path, enqueue=[{"x": 0.5}])
    assert trial_table.lines(rows(folder), sweep_of(folder)) == ["no trial has begun yet"]
    assert trial_table.as_csv([]) == "number,state,value,seconds,worker,reason,infeasible\n"


def test_reasons_fit_a_terminal_and_are_left_out_without_any(tmp_path: Path) -> None:
    sweep = sweep_of(make(tmp_path))
    facts = {"value": 0.5, "params": {"lr": 0.25}, "rungs": {}, "seconds": 3.0, "worker": 0, "infeasible": False}
    good, bad = (TrialRow(number=0, state="FAIL", reason=reason, values={}, **facts) for reason in ("", "x" * 60))
    header, row = trial_table.lines([good], sweep)
    assert header.split() == ["TRIAL", "STATE", "score", "AT", "lr", "TIME"]
    assert row.split() == ["0", "FAIL", "0.5", "0.25", "3s"]
    header, _, row = trial_table.lines([good, bad], sweep, 70)
    assert header.endswith("TIME  REASON")
    assert (len(row), row[-5:]) == (70, "xx...")
