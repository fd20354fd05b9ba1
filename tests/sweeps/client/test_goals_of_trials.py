"""Trials with several objectives, and trials that violate a constraint: on a real journal, from report to result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import append_jsonl, read_json
from mgpu_slurm.metrics.report_socket import CONTINUE, PAUSE, Verdict
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps import hparams
from mgpu_slurm.sweeps.analysis import best_trial, trial_table
from mgpu_slurm.sweeps.analysis.importance import importance
from mgpu_slurm.sweeps.client import sweep_end
from mgpu_slurm.sweeps.client.paused_trials import WORSE
from mgpu_slurm.sweeps.client.study_client import StudyClient
from mgpu_slurm.sweeps.study import summary
from tests.sweeps.client.test_pausing import ASHA, save
from tests.sweeps.sweeps import begin, finish, leave, make, states, study_of, sweep_of, worker

METRICS = {"score": "maximize", "size": "minimize"}


def make_front(base: Path, **values: Any) -> RunFolder:
    return make(base, metric=None, metrics=METRICS, trials=9, **values)


def complete(part: StudyClient, **values: float) -> int:
    number = begin(part).number
    part.complete(values, {}, step=1, progress=1)
    return number


def front(folder: RunFolder) -> list[int]:
    return [trial.number for trial in summary.front_of(study_of(folder).trials, sweep_of(folder))]


def marks(folder: RunFolder, number: int) -> list[float]:
    """Return the values of a trial's mark in TensorBoard, in their order."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder.of_trial(number).tensorboard))
    events.Reload()
    tags: list[str] = events.Tags()["scalars"]
    return [point.value for point in events.Scalars(hparams.FRONT)] if hparams.FRONT in tags else []


class TestSeveralObjectives:
    def test_front_has_the_trials_than_which_none_is_better_in_all(self, tmp_path: Path) -> None:
        folder = make_front(tmp_path)
        part = worker(folder, 0)
        for score, size in ((0.5, 10), (0.9, 90), (0.4, 20), (0.9, 80), (0.5, 10)):
            complete(part, score=score, size=size)
        # 2 is worse than 0 in both, 1 than 3 in size, and 4 is the same as 0
        assert front(folder) == [3, 0]
        told = summary.summarize(study_of(folder), sweep_of(folder))
        assert told.metrics == METRICS
        assert [trial.values for trial in told.front] == [{"score": 0.9, "size": 80}, {"score": 0.5, "size": 10}]
        assert told.best is not None
        assert told.best.number == 3
        # Optuna's programs see the same, except that they list both of two equal trials
        assert sorted(trial.number for trial in study_of(folder).best_trials) == [0, 3, 4]

    def test_front_is_marked_in_tensorboard_and_the_mark_is_taken_back(self, tmp_path: Path) -> None:
        folder = make_front(tmp_path)
        part = worker(folder, 0)
        complete(part, score=0.5, size=10)
        complete(part, score=0.9, size=90)
        complete(part, score=0.4, size=20)
        assert [marks(folder, number) for number in range(3)] == [[1.0], [1.0], []]
        complete(part, score=0.9, size=5)
        assert [marks(folder, number) for number in range(4)] == [[1.0, 0.0], [1.0, 0.0], [], [1.0]]
        assert read_json(folder.tensorboard / "front.json") == [3]

    def test_last_report_counts_for_what_the_job_does_not_return(self, tmp_path: Path) -> None:
        folder = make_front(tmp_path)
        part = worker(folder, 0)
        begin(part)
        part.report(1, {"score": 0.5, "size": 7})
        part.report(2, {"score": 0.6})
        part.complete({}, {"score": 0.6}, step=2, progress=2)
        assert study_of(folder).trials[0].values == [0.6, 7]

    def test_metrics_of_earlier_attempts_count(self, tmp_path: Path) -> None:
        folder = make_front(tmp_path, constraints={"gib": "<= 9"})
        part = worker(folder, 0)
        number = begin(part).number
        append_jsonl(folder.of_trial(number).metrics, {"progress": 1, "metrics": {"score": 0.5, "size": 7, "gib": 3}})
        part.report(1, {"score": 0.5, "size": 7, "gib": 3})
        part.give_back(is_late=True, has_saved=True)
        other = worker(folder, 1)
        begin(other)
        other.report(2, {"score": 0.6})
        # as after a checkpoint, which has the metrics of the last report
        other.complete({"score": 0.6}, {"score": 0.6}, step=2, progress=2)
        assert study_of(folder).trials[0].values == [0.6, 7]

    def test_missing_objective_fails_the_trial_and_nan_prunes_it(self, tmp_path: Path) -> None:
        folder = make_front(tmp_path)
        part = worker(folder, 0)
        complete(part, score=0.5, sise=7)
        complete(part, score=0.5, size=float("nan"))
        assert states(folder) == ["FAIL", "PRUNED"]
        failure = read_json(folder.of_trial(0).failure)
        assert failure["message"] == "the job never reported or returned the metric 'size' (did you mean 'sise'?)"
        assert read_json(folder.of_trial(1).result)["reason"] == "size is nan"

    def test_trials_are_pruned_by_the_first(self, tmp_path: Path) -> None:
        folder = make_front(tmp_path, pruner={"name": "hyperband", "max_resource": 3})
        part = worker(folder, 0)
        begin(part)
        assert part.report(1, {"score": 0.9, "size": 90}) == CONTINUE
        complete_now(part, score=0.9, size=90)
        begin(part)
        # of another bracket, which does not prune
        assert part.report(1, {"score": 0.8, "size": 90}) == CONTINUE
        complete_now(part, score=0.8, size=90)
        begin(part)
        assert part.report(1, {"score": 0.7, "size": 1}) == Verdict(WORSE)
        part.prune(WORSE, 1)
        assert states(folder) == ["COMPLETE", "COMPLETE", "PRUNED"]

    @pytest.mark.parametrize("sampler", ["tpe", "random", "gp"])
    @pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
    def test_samplers_learn_from_all_objectives_failures_and_pruned_trials(self, tmp_path: Path, sampler: str) -> None:
        options = {"n_startup_trials": 3} if sampler != "random" else {}
        folder = make_front(tmp_path, sampler={"name": sampler, "seed": 1, "options": options})
        part = worker(folder, 0)
        for number in range(9):
            order = begin(part)
            x = order.values["x"]
            if number == 2:
                part.fail("ValueError: boom")
            elif number == 3:
                part.report(1, {"score": x, "size": x})
                part.prune(WORSE, 1)
            else:
                part.complete({"score": x, "size": x * x}, {}, step=1, progress=1)
        assert leave(part).exit_code == 0
        assert states(folder) == ["COMPLETE", "COMPLETE", "FAIL", "PRUNED", *["COMPLETE"] * 5]

    def test_patience_ends_when_the_front_has_not_grown(self, tmp_path: Path) -> None:
        folder = make_front(tmp_path)
        part = worker(folder, 0)
        for score, size in ((0.5, 10), (0.4, 5), (0.5, 10), (0.3, 7)):
            complete(part, score=score, size=size)
        assert sweep_end.since_best(study_of(folder).trials, sweep_of(folder)) == 2

    def test_table_and_best_show_all_objectives(self, tmp_path: Path) -> None:
        folder = make_front(tmp_path)
        part = worker(folder, 0)
        complete(part, score=0.5, size=10)
        complete(part, score=0.9, size=90)
        summary.write(folder, study_of(folder), sweep_of(folder))
        found = best_trial.front(folder)
        assert found is not None
        head, table, first, second, again = found.lines()
        assert head == "front     2 trials of study s that no other beats in all metrics"
        assert (table.split(), first.split()[:3], second.split()[:3]) == (
            ["TRIAL", "score", "size", "x"], ["1", "0.9", "90"], ["0", "0.5", "10"],
        )  # fmt: skip
        assert "best s --trial N" in again
        (line, *_) = best_trial.best(folder, 0).lines()
        assert line == "best      score 0.5  size 10, trial 0 of study s"
        with pytest.raises(UserError, match="study s: there is no trial 7: the last one is 1"):
            best_trial.best(folder, 7)
        rows = trial_table.rows(study_of(folder), sweep_of(folder), folder)
        assert [row.values for row in rows] == [{"score": 0.5, "size": 10}, {"score": 0.9, "size": 90}]
        assert trial_table.as_csv(rows).splitlines()[0].endswith("values.score,values.size,params.x")


def complete_now(part: StudyClient, **values: float) -> None:
    part.complete(values, {}, step=1, progress=1)


class TestConstraints:
    def test_best_is_the_best_that_violates_none(self, tmp_path: Path) -> None:
        folder = make(tmp_path, trials=9, constraints={"gib": "<= 70", "rate": ">= 5"})
        part = worker(folder, 0)
        complete(part, score=0.9, gib=71.5, rate=4)
        assert sweep_end.since_best(study_of(folder).trials, sweep_of(folder)) == 1
        summary.write(folder, study_of(folder), sweep_of(folder))
        with pytest.raises(UserError, match="every complete trial violates a constraint"):
            best_trial.best(folder)
        complete(part, score=0.5, gib=70, rate=5)
        complete(part, score=0.6, gib=80, rate=5)
        told = summary.summarize(study_of(folder), sweep_of(folder))
        assert told.best is not None
        assert (told.best.number, told.best.infeasible) == (1, False)
        assert [(trial.number, trial.infeasible, trial.reason) for trial in told.recent] == [
            (0, True, "infeasible: gib 71.5, not <= 70, rate 4, not >= 5"),
            (1, False, ""),
            (2, True, "infeasible: gib 80, not <= 70"),
        ]
        top = trial_table.rows(study_of(folder), sweep_of(folder), folder, top=3)
        assert [row.number for row in top] == [1]
        # a target is reached only by a trial that violates nothing
        assert sweep_end.spent(study_of(folder).trials, sweep_of(make(tmp_path / "b", budget={"target": 0.55}))) is None

    def test_violating_trial_is_worst_at_its_rung_whatever_it_reports_later(self, tmp_path: Path) -> None:
        folder = make(
            tmp_path, pruner=ASHA, trials=9, sampler={"name": "random", "seed": 1}, constraints={"gib": "<= 70"}
        )
        part = worker(folder, 0)
        begin(part)
        # it would be the candidate
        assert part.report(1, {"score": 0.9, "gib": 71}) == Verdict(WORSE)
        part.prune(WORSE, 1)
        for number, score in ((1, 0.1), (2, 0.2)):
            begin(part)
            assert part.report(1, {"score": score, "gib": 60}) == (PAUSE if number == 1 else CONTINUE)
            if number == 1:
                save(folder, 1, 1)
                part.pause(1)
        # at the next rung it violates the constraint
        assert part.report(3, {"score": 0.9, "gib": 71}) == Verdict(WORSE)

    def test_metric_of_a_constraint_that_is_never_reported_fails_the_trial(self, tmp_path: Path) -> None:
        folder = make(tmp_path, constraints={"gib": "<= 70"})
        part = worker(folder, 0)
        complete(part, score=0.5, gigabytes=3)
        failure = read_json(folder.of_trial(0).failure)
        assert failure["message"].startswith("the job never reported or returned the metric 'gib'")
        # reported once, perhaps by an earlier attempt, it counts
        begin(part)
        part.report(1, {"score": 0.1, "gib": 3})
        part.give_back(is_late=True, has_saved=True)
        other = worker(folder, 1)
        begin(other)
        finish(other, 0.4)
        assert states(folder) == ["FAIL", "COMPLETE"]

    def test_infeasible_trials_are_the_samplers_worst_the_less_so_the_less_they_violate(self, tmp_path: Path) -> None:
        """With x > 0.2 infeasible and better, half of random points and most of Optuna's best would be infeasible."""
        folder = make(tmp_path, trials=60, sampler={"name": "tpe", "seed": 1}, constraints={"gib": "<= 0.2"})
        part = worker(folder, 0)
        for _ in range(60):
            x = begin(part).values["x"]
            part.complete({"score": x, "gib": x}, {}, step=1, progress=1)
        found = [trial.params["x"] for trial in study_of(folder).trials]
        assert sum(x <= 0.2 for x in found[20:]) >= 20, found
        best = summary.best_of(study_of(folder).trials, sweep_of(folder))
        assert best is not None
        assert 0.15 < best.params["x"] <= 0.2

    @pytest.mark.parametrize("sampler", ["gp", "optuna.samplers.TPESampler", "optuna.samplers.NSGAIISampler"])
    @pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
    def test_optunas_samplers_take_constraints(self, tmp_path: Path, sampler: str) -> None:
        options = {} if sampler.endswith("NSGAIISampler") else {"n_startup_trials": 3}
        folder = make(
            tmp_path,
            trials=9,
            sampler={"name": sampler, "seed": 1, "options": options},
            constraints={"gib": "<= 0.5"},
        )
        part = worker(folder, 0)
        for number in range(9):
            x = begin(part).values["x"]
            if number == 4:
                part.fail("ValueError: boom")
            else:
                part.complete({"score": x, "gib": x}, {}, step=1, progress=1)
        assert leave(part).exit_code == 0

    def test_hyperband_prunes_each_that_violates_a_constraint(self, tmp_path: Path) -> None:
        pruner = {"name": "asha", "min_resource": 1, "max_resource": 9, "pause": False}
        folder = make(tmp_path, pruner=pruner, trials=9, constraints={"gib": "<= 70"})
        part = worker(folder, 0)
        for _ in range(3):
            begin(part)
            assert part.report(1, {"score": 0.5, "gib": 71}) == Verdict(WORSE)
            part.prune(WORSE, 1)

    def test_importance_takes_trials_that_violate_a_constraint_for_the_worst(self, tmp_path: Path) -> None:
        space = {"x": {"float": [0.0, 1.0]}, "y": {"float": [0.0, 1.0]}}
        folder = make(
            tmp_path, trials=60, space=space, constraints={"gib": "<= 0.5"}, sampler={"name": "random", "seed": 1}
        )
        part = worker(folder, 0)
        for _ in range(60):
            values = begin(part).values
            score = values["y"] + (10 if values["x"] > 0.5 else 0)
            part.complete({"score": score, "gib": values["x"]}, {}, step=1, progress=1)
        found = importance(study_of(folder), sweep_of(folder))
        shares = {each.name: each.share for each in found.parameters}
        assert shares["y"] > 0.2, shares
        assert found.lines()[0] == "importance of the parameters of study s for score, by 60 values at the end"

    def test_median_pruner_prunes_the_others_too(self, tmp_path: Path) -> None:
        """Of several infinite values, Optuna's percentile is NaN, by which it would prune nothing."""
        pruner = {"name": "median", "startup_trials": 3}
        folder = make(tmp_path, trials=9, pruner=pruner, constraints={"gib": "<= 70"})
        part = worker(folder, 0)
        for gib, score in ((60, 0.5), (71, 0.1), (71, 0.2), (60, 0.6)):
            begin(part)
            part.report(1, {"score": score, "gib": gib})
            part.complete({"score": score, "gib": gib}, {}, step=1, progress=1)
        begin(part)
        assert part.report(1, {"score": 0.1, "gib": 60}) == Verdict(WORSE)
        part.prune(WORSE, 1)
        begin(part)
        assert part.report(1, {"score": 0.9, "gib": 60}) == CONTINUE
        assert part.report(2, {"score": 0.9, "gib": 71}) == Verdict(WORSE)

    def test_median_pruner_sees_the_worst_value(self, tmp_path: Path) -> None:
        pruner = {"name": "median", "startup_trials": 1}
        folder = make(tmp_path, trials=9, pruner=pruner, constraints={"gib": "<= 70"})
        part = worker(folder, 0)
        begin(part)
        assert part.report(1, {"score": 0.1, "gib": 60}) == CONTINUE
        complete_now(part, score=0.1, gib=60)
        begin(part)
        assert part.report(1, {"score": 0.9, "gib": 71}) == Verdict(WORSE)
