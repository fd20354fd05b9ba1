"""What a report shows of a study is what the study has."""

from __future__ import annotations

from pathlib import Path

from optuna.trial import TrialState

from mgpu_slurm.sweeps.analysis.study_facts import study_facts
from tests.reports.sweeps import make_sweep


def test_rungs_and_brackets_of_hyperband(tmp_path: Path) -> None:
    pruner = {"name": "hyperband", "min_resource": 1, "max_resource": 9, "reduction_factor": 3}
    made = make_sweep(tmp_path, pruner=pruner)
    reported = {}
    for place in range(6):
        number = made.begin()
        reported[number] = {progress: 10.0 * place + progress for progress in range(1, 2 + 3 * (place % 3))}
        for progress, value in reported[number].items():
            made.trials[number].report(value, progress)
        made.study.tell(number, None, TrialState.PRUNED)
    facts = study_facts(made.folder)
    assert list(facts.rungs) == [1, 3, 9]
    for trial in facts.trials:
        values = reported[trial.row.number]
        assert trial.row.rungs == {str(rung): values[rung] for rung in (1, 3, 9) if rung in values}
    brackets = [trial.bracket for trial in facts.trials]
    # the bracket that stops most trials has the most of them
    assert set(brackets) <= {0, 1, 2}
    assert brackets.count(0) == max(map(brackets.count, (0, 1, 2)))
    assert facts.importance is None
    assert facts.no_importance


def test_parameters_are_those_that_trials_had_a_choice_of(tmp_path: Path) -> None:
    made = make_sweep(tmp_path)
    for _ in range(12):
        made.run("done", 1.0)
    facts = study_facts(made.folder)
    parameters = {each.name: each for each in facts.parameters}
    assert parameters.keys() == {"lr", "width", "optimizer", "momentum", "layers", "nesterov", "clip", "batch_size"}
    lr, width, clip = (parameters[name] for name in ("lr", "width", "clip"))
    assert (lr.is_log, lr.is_whole, list(lr.ends)) == (True, False, [1e-4, 1.0])
    assert (width.is_log, width.is_whole, list(width.ends)) == (False, True, [16, 128])
    assert (clip.is_choice, list(clip.ends)) == (True, [None, 1, 0.5])
    assert [each.row.params for each in facts.trials] == [made.values[number] for number in range(12)]
    assert all(each.started is not None and each.ended is None for each in facts.trials)


def test_importance_with_its_interval(tmp_path: Path) -> None:
    made = make_sweep(tmp_path, space={"lr": {"float": [0.0, 1.0]}, "unused": {"float": [0.0, 1.0]}})
    for _ in range(40):
        number = made.begin()
        made.study.tell(number, float(made.values[number]["lr"]))
    shown = study_facts(made.folder).to_json()["importance"]
    assert shown["trials"] == 40
    assert shown["missing"] == ""
    values = shown["values"]
    assert values["lr"]["value"] > values["unused"]["value"]
    assert all(0 <= each["low"] <= each["value"] <= each["high"] <= 1 for each in values.values())
