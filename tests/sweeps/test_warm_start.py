"""What an earlier study is good for: the region around its best trials, and trials to start with."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request import config as configs
from mgpu_slurm.run_folder import layout, records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.sweeps import optuna_adapter, warm_start
from mgpu_slurm.sweeps.scheduling.observations import COPY_OF
from mgpu_slurm.sweeps.search import sweep_file
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import summary
from mgpu_slurm.sweeps.study import trial_queue as studies
from mgpu_slurm.sweeps.study.claims import Worker
from mgpu_slurm.sweeps.study.snapshots import ORIGIN

SPACE = {
    "optimizer": {"choice": ["sgd", "adam"]},
    "lr": {"float": [1e-4, 1.0], "log": True},
    "momentum": {"float": [0.0, 1.0], "when": {"optimizer": "sgd"}},
    "width": {"int": [16, 128], "step": 16},
    "layers": {"choice": [[8], [8, 8]]},
}
VALUES = {"study": "first", "job": "train.py", "metric": "loss", "direction": "minimize", "trials": 40, "space": SPACE}

Make = Callable[..., tuple[RunFolder, Study]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A study in the runs folder, its trials ended with what `judge` makes of their parameters."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv(layout.RUNS_VARIABLE, str(tmp_path / "runs"))

    def make(judge: Callable[[dict[str, Any]], float], **changes: Any) -> tuple[RunFolder, Study]:
        values = VALUES | {"sampler": {"name": "random", "seed": 0}} | changes
        folder = RunFolder(tmp_path / "runs" / str(values["study"]))
        folder.create()
        records.update_state(folder, kind="sweep", tasks=1)
        folder.sweep.write_text(configs.dump_yaml(values))
        sweep = sweep_file.parse(values, "sweep.yaml")
        studies.create(sweep, folder.journal)
        study = studies.load(sweep, folder.journal, Worker(0, 1))
        while (trial := studies.take(study, sweep, Worker(0, 1), folder.trials_lock)) is not None:
            assert isinstance(sweep.space, Space)
            study.tell(trial, judge(sweep.space.suggest(trial)))
        return folder, study

    return make


def test_grid_covers_the_region_of_the_best_tenth(make: Make) -> None:
    def judge(values: dict[str, Any]) -> float:
        wrong = 1000 * (values["optimizer"] == "adam") + 500 * (len(values["layers"]) > 1)
        return float(abs(values["width"] - 64) + wrong)

    _, study = make(judge)
    changed = warm_start.around(VALUES | {"enqueue": [], "resources": {"nodes": 2}}, "first")
    space = changed.pop("space")
    assert changed == {
        "study": "first-around",
        "job": "train.py",
        "metric": "loss",
        "direction": "minimize",
        "resources": {"nodes": 2},
        "sampler": "grid",
    }
    best = sorted((trial for trial in study.trials), key=lambda trial: trial.value or 0)[:4]
    rates = [trial.params["lr"] for trial in best]
    assert space["lr"]["choice"] == [float(f"{value:.4g}") for value in
                                     (min(rates), (min(rates) * max(rates)) ** 0.5, max(rates))]  # fmt: skip
    # adam is not among the best, and what depends on sgd still does
    assert space["optimizer"] == {"choice": ["sgd"]}
    assert space["momentum"]["when"] == {"optimizer": ["sgd"]}
    assert space["layers"] == {"choice": [[8]]}
    assert set(space["width"]["choice"]) <= set(range(16, 129, 16))
    # it is a sweep file of its own
    grid = sweep_file.parse(changed | {"space": space}, "made")
    assert grid.trials == len(grid.space.grid()) if isinstance(grid.space, Space) else None


def test_parameter_missing_in_the_best_trials_is_dropped(make: Make) -> None:
    make(lambda values: float(values["optimizer"] == "sgd"))
    assert "momentum" not in warm_start.around(VALUES, "first")["space"]


def test_study_with_too_few_trials_is_rejected(make: Make) -> None:
    make(lambda values: 0.0, trials=2)
    with pytest.raises(UserError, match=r"^--around first: 2 of its trials are complete: it needs 3$"):
        warm_start.around(VALUES, "first")


def add(study: Study, known: Sequence[FrozenTrial]) -> None:
    """Add the trials of an earlier study to one that has begun, in which version 0.1 may have mixed them."""
    for trial in known:
        study.add_trial(trial)
    studies.note(study, studies.ORIGINS, len(known))


def test_previous_trials_are_known_but_not_counted(make: Make) -> None:
    _, before = make(lambda values: values["lr"], trials=6)
    folder, study = make(lambda values: 1.0, study="second", trials=2)
    second = sweep_file.load(folder.sweep)
    add(study, warm_start.known_trials(second, "first"))
    assert studies.begun(study) == 2
    known = [trial for trial in study.trials if ORIGIN in trial.system_attrs]
    assert [trial.params for trial in known] == [trial.params for trial in before.trials]
    assert [trial.value for trial in known] == [trial.value for trial in before.trials]
    told = summary.summarize(study, second)
    assert told.best is not None
    assert (told.trials["COMPLETE"], told.best.value) == (2, 1.0)


def test_previous_trials_use_up_neither_trials_nor_queued_points(make: Make) -> None:
    make(lambda values: values["lr"], trials=6)
    folder, study = make(lambda values: 1.0, study="second", trials=1, enqueue=[{"lr": 0.5}])
    second = replace(sweep_file.load(folder.sweep), trials=3)
    add(study, warm_start.known_trials(second, "first"))
    studies.queue(study, [{"lr": 0.25}])
    rates = []
    while (trial := studies.take(study, second, Worker(0, 1), folder.trials_lock)) is not None:
        assert isinstance(second.space, Space)
        rates.append(second.space.suggest(trial)["lr"])
    assert rates[0] == 0.25
    assert len(rates) == 2


def test_only_trials_inside_the_new_space_are_taken(make: Make) -> None:
    _, before = make(lambda values: values["lr"], trials=12)
    narrow = SPACE | {"lr": {"float": [1e-2, 1.0], "log": True}}
    folder, _ = make(lambda values: 1.0, study="second", trials=1, space=narrow)
    inside = [trial for trial in before.trials if trial.params["lr"] >= 1e-2]
    second = sweep_file.load(folder.sweep)
    assert len(warm_start.known_trials(second, "first")) == len(inside) < 12


def test_names_that_one_of_the_studies_lacks_are_left_out(make: Make) -> None:
    _, before = make(lambda values: values["lr"], trials=6)
    others = {"lr": SPACE["lr"], "depth": {"int": [1, 4]}, "momentum": SPACE["momentum"]}
    folder, _ = make(lambda values: 1.0, study="second", trials=1, space=others | {"optimizer": SPACE["optimizer"]})
    known = warm_start.known_trials(sweep_file.load(folder.sweep), "first")
    # momentum depends on the optimizer, which comes after it here and first in the study
    assert [trial.params["lr"] for trial in known] == [trial.params["lr"] for trial in before.trials]
    assert {name for trial in known for name in trial.params} == {"lr", "optimizer", "momentum"}
    assert [trial.params.keys() for trial in known] == [trial.distributions.keys() for trial in known]


def test_paused_trials_are_known_by_their_reports_and_copies_are_not(make: Make) -> None:
    folder, before = make(lambda values: values["lr"], trials=2)
    first = replace(sweep_file.load(folder.sweep), trials=4)
    for report in ({1: 0.5}, {}):
        trial = studies.take(before, first, Worker(0, 1), folder.trials_lock)
        assert trial is not None
        assert isinstance(first.space, Space)
        first.space.suggest(trial)
        for progress, value in report.items():
            trial.report(value, progress)
        before._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
    copied = create_trial(value=0.1, params=before.trials[0].params, distributions=before.trials[0].distributions)
    copied.system_attrs[COPY_OF] = {}
    before.add_trial(copied)
    folder, _ = make(lambda values: 1.0, study="second", trials=1)
    known = warm_start.known_trials(sweep_file.load(folder.sweep), "first")
    assert [(trial.state.name, trial.intermediate_values) for trial in known] == [
        ("COMPLETE", {}), ("COMPLETE", {}), ("PRUNED", {1: 0.5}),
    ]  # fmt: skip


def test_violations_are_known_if_the_constraints_are_the_same(make: Make) -> None:
    _, before = make(lambda values: values["lr"], trials=1, constraints={"gib": "<= 7"})
    (only,) = before.trials
    only.system_attrs[f"{optuna_adapter.CONSTRAINT}gib"] = 3.0
    before.add_trial(only)
    for study, bound, violation in (("second", "<= 7", 3.0), ("third", "<= 9", 0.0)):
        folder, _ = make(lambda values: 1.0, study=study, trials=1, constraints={"gib": bound})
        _, known = warm_start.known_trials(sweep_file.load(folder.sweep), "first")
        assert known.constraints == {"gib": violation}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"metric": "accuracy"}, "it is to minimize loss, and this study to minimize accuracy"),
        ({"space": {"depth": {"int": [1, 2]}}}, "none of its 3 trials is in this space: remove it"),
    ],
)
def test_study_of_another_metric_or_space_is_rejected(make: Make, changes: dict[str, Any], told: str) -> None:
    make(lambda values: 0.5, trials=3)
    folder, _ = make(lambda values: 0.5, study="second", trials=1, **changes)
    with pytest.raises(UserError, match=told):
        warm_start.known_trials(sweep_file.load(folder.sweep), "first")


def test_run_that_is_not_a_sweep_is_rejected(make: Make, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "run")
    run.create()
    run.spec.write_text("")
    run.state.write_text(json.dumps({"run": "run"}))
    with pytest.raises(UserError, match="'run' is not a sweep: name a study"):
        warm_start.around(VALUES, "run")


def test_enqueued_points_come_first_and_must_lie_in_the_space(make: Make) -> None:
    point = {"optimizer": "adam", "lr": 0.5, "width": 64, "layers": [8, 8]}
    _, study = make(lambda values: 0.0, trials=3, enqueue=[point, {"lr": 0.25}])
    sweep: Sweep = sweep_file.parse(VALUES, "x")
    assert summary.parameters(study.trials[0], sweep) == point
    assert study.trials[1].params["lr"] == 0.25
    for wrong, told in [
        ({"lr": 2.0}, "lr is float 0.0001 to 1, log, not 2.0"),
        ({"width": 20}, "width is int 16 to 128, step 16, not 20"),
        ({"widht": 16}, r"'widht' is not a parameter \(did you mean 'width'\?\)"),
    ]:
        with pytest.raises(UserError, match=told):
            sweep_file.parse(VALUES | {"enqueue": [wrong]}, "x")
