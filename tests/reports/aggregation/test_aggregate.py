"""Which runs are taken together, what is said of those that are missing, and what is written."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.metrics.reporter import Reporter
from mgpu_slurm.reports.aggregation import aggregate_files
from mgpu_slurm.reports.aggregation.aggregate import Aggregate, aggregate, grouped, is_seed
from mgpu_slurm.reports.aggregation.aggregate_table import table
from mgpu_slurm.reports.aggregation.history import History
from mgpu_slurm.reports.aggregation.merging import Curve
from mgpu_slurm.reports.aggregation.statistics import NAMES
from mgpu_slurm.run_folder.layout import RunFolder
from tests.metrics.event_files import ended_run, read_by_tensorboard, scalar, write


def history(name: str, target: str = "train:train", place: str = "", **config: Any) -> History:
    curves = {"loss": Curve(np.arange(3), np.ones(3))}
    return History(name, place or name.partition("/")[0], target=target, config=config, curves=curves)


def members(histories: list[History], *by: str) -> dict[str, list[str]]:
    return {group.name: [run.name for run in group.runs] for group in grouped(histories, by)}


# -- grouping


def test_runs_that_differ_only_in_the_seed_form_one_group() -> None:
    runs = [history("a/0", lr=0.1, seed=0), history("a/1", lr=0.1, seed=1), history("b", lr=0.5, seed=0)]
    assert members(runs) == {"lr=0.1": ["a/0", "a/1"], "lr=0.5": ["b"]}
    assert members(runs[:2]) == {"a": ["a/0", "a/1"]}
    assert [group.config for group in grouped(runs)] == [{"lr": 0.1}, {"lr": 0.5}]


SEEDS = dict.fromkeys(["seed", "data.seed", "data_seed", "random-seed"], True)
NO_SEEDS = dict.fromkeys(["seeds", "seeding", "lr"], False)


@pytest.mark.parametrize(("key", "expected"), (SEEDS | NO_SEEDS).items())
def test_seed_keys_are_recognized(key: str, expected: bool) -> None:
    assert is_seed(key) == expected


def test_by_groups_runs_by_the_given_keys() -> None:
    runs = [history(f"{lr}-{width}", lr=lr, width=width) for lr in (0.1, 0.5) for width in (16, 32)]
    assert members(runs, "width") == {"width=16": ["0.1-16", "0.5-16"], "width=32": ["0.1-32", "0.5-32"]}
    assert len(members(runs, "lr", "width")) == 4
    with pytest.raises(UserError, match=r"--by widht: no run has it in its config \(did you mean 'width'\?\)"):
        grouped(runs, ["widht"])
    # as TensorBoard has it
    assert members([*runs[:2], history("hparams", width=16.0)], "width")["width=16"] == ["0.1-16", "hparams"]
    assert set(members([*runs, history("other", lr=0.1)], "width")) == {"width=16", "width=32", "width=none"}


def test_groups_are_sorted_by_their_value() -> None:
    values = [32, None, "auto", 8, 0.5, True]
    names = list(members([history(str(place), width=value) for place, value in enumerate(values)], "width"))
    assert names == ["width=0.5", "width=True", "width=8", "width=32", "width=auto", "width=none"]


def test_runs_that_all_have_different_configs_are_noted(tmp_path: Path) -> None:
    """Such as those of a sweep: there is nothing to average."""
    for lr, width in ((0.1, 8), (0.2, 8), (0.3, 16)):
        made = ended_run(tmp_path / str(lr), config={"lr": lr, "width": width, "seed": 1})
        reporter = Reporter(RunFolder(made), attempt=1)
        reporter.report(1, 1, {"loss": 1.0})
        reporter.close(0)
    folders = [str(tmp_path / name) for name in ("0.1", "0.2", "0.3")]
    said = "no two of 3 runs have the same config: a curve for each"
    assert aggregate(folders).notes == [f"{said}; `--by width` averages runs that share a value"]
    assert aggregate(folders[1:]).notes == [said.replace("3", "2")]
    assert aggregate(folders, by=["lr"]).notes == []
    assert aggregate(folders[:1]).notes == []


def test_runs_of_different_targets_form_separate_groups() -> None:
    runs = [history("a", target="a:train", lr=0.1), history("b", target="b:train", lr=0.1)]
    assert members(runs) == {"a": ["a"], "b": ["b"]}


def test_runs_without_config_are_grouped_only_if_asked(tmp_path: Path) -> None:
    runs = [history(name, target="", place=place) for name, place in (("0", "x/one"), ("1", "x/one"), ("0", "x/two"))]
    assert members(runs) == {"0": ["0"], "1": ["1"], "two": ["0"]}
    together = {group.name: [run.name for run in group.runs] for group in grouped(runs, together=True)}
    assert together == {"one": ["0", "1"], "two": ["0"]}
    for name in ("a", "b"):
        write(tmp_path / name / "events.out.tfevents.1.h", [scalar("loss", 1, 0.5)])
    found = aggregate([str(tmp_path)])
    assert [len(group.runs) for group in found.groups] == [1, 1]
    assert found.notes == ["a, b: nothing says that these are repetitions: `--together` averages them"]
    found = aggregate([str(tmp_path)], together=True)
    assert ([len(group.runs) for group in found.groups], found.notes) == ([2], [])


def test_parts_of_a_run_are_no_repetitions(tmp_path: Path) -> None:
    """Keras writes two folders, `add_scalars` one for each line, and `add_hparams` one for the parameters."""
    for name, value in (("one/train", 1.0), ("one/validation", 3.0), ("two", 5.0), ("two/both_a", 6.0)):
        write(tmp_path / name / "events.out.tfevents.1.h", [scalar("loss", 1, value)])
    found = aggregate([str(tmp_path)])
    values = {(group.runs[0].name, metric): summary.values["mean"][-1] for group in found.groups
              for metric, summary in group.metrics.items()}  # fmt: skip
    assert values == {
        ("one", "train/loss"): 1.0,
        ("one", "validation/loss"): 3.0,
        ("two", "loss"): 5.0,
        ("two", "both_a/loss"): 6.0,
    }
    # one that is named alone is a run
    assert list(aggregate([str(tmp_path / "one" / "train")]).groups[0].metrics) == ["loss"]


def test_group_names_are_unique_and_valid_folder_names() -> None:
    runs = [history(str(number), data=value) for number, value in enumerate(["/a/../b", "/a/..:b", "x" * 300])]
    names = list(members(runs))
    assert names[:2] == ["data=-a-..-b", "data=-a-..-b-2"]
    assert len(names[2]) == 80


# -- what is said


def made(tmp_path: Path, lasts: dict[str, int], every: dict[str, int] | None = None) -> Aggregate:
    """Runs of others whose loss is their step times their place."""
    for place, (name, last) in enumerate(lasts.items()):
        steps = range(0, last + 1, (every or {}).get(name, 1))
        write(
            tmp_path / "logs" / name / "events.out.tfevents.1.h", [scalar("loss", step, step * place) for step in steps]
        )
    return aggregate([str(tmp_path / "logs")], together=True)


def test_shorter_runs_and_missing_metrics_are_noted(tmp_path: Path) -> None:
    write(tmp_path / "logs" / "c" / "events.out.tfevents.2.h", [scalar("accuracy", 1, 0.5)])
    result = made(tmp_path, {"a": 9, "b": 5, "c": 9})
    assert result.notes == [
        "loss: 1 of 3 runs end before step 9: b at 5",
        "accuracy: 2 of 3 runs without it: a, b",
    ]
    loss = result.groups[0].metrics["loss"]
    assert loss.count.tolist() == [3] * 6 + [2] * 4
    assert loss.values["mean"].tolist() == [step * 1.0 for step in range(10)]


def test_steps_that_only_some_runs_have_are_noted(tmp_path: Path) -> None:
    assert made(tmp_path, {"a": 8, "b": 8}, {"b": 2}).notes == [
        "loss: 4 of 9 steps missing in some longer runs: see `count`"
    ]


def test_same_note_of_many_runs_is_one_line(tmp_path: Path) -> None:
    notes = made(tmp_path, {"long": 9} | {f"r{number}": 4 for number in range(8)}).notes
    assert notes == [
        "loss: 8 of 9 runs end before step 9: " + ", ".join(f"r{n} at 4" for n in range(5)) + " and 3 more"
    ]


def test_runs_without_any_metrics_are_an_error(tmp_path: Path) -> None:
    write(tmp_path / "logs" / "a" / "events.out.tfevents.1.h", [])
    with pytest.raises(UserError, match=r"no metrics yet of a: see .*, or name other runs"):
        aggregate([str(tmp_path / "logs")])


def test_the_table_shows_the_last_step_that_all_runs_have_then_ends_and_best_values(tmp_path: Path) -> None:
    header, common, *rest = table(made(tmp_path / "same", {"a": 4, "b": 4})).splitlines()
    assert header.split()[:5] == ["GROUP", "METRIC", "AT", "RUNS", "MEAN"]
    assert common.split() == ["logs", "loss", "step", "4", "2", "2", "2.828", "-23.41", "to", "27.41", "0", "2", "4"]
    # they end at the same step, so there is no line of ends
    assert [line.split()[2:8] for line in rest] == [["lowest", "of", "each", "2", "0", "0"]]
    lines = table(made(tmp_path / "apart", {"a": 4, "b": 9, "c": 6})).splitlines()[1:]
    assert [line.split()[2:7] for line in lines] == [
        ["step", "4", "3", "4", "4"],
        ["end", "of", "each", "3", "7"],
        ["lowest", "of", "each", "3", "0"],
    ]


# -- what is written


def test_all_files_have_the_same_numbers(tmp_path: Path) -> None:
    result = made(tmp_path, {"a": 3, "b": 2})
    out = tmp_path / "out"
    assert aggregate_files.write(result, out) == ["curves.csv", "curves.parquet", "tensorboard/"]
    with (out / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["group", "metric", "step", "count", *NAMES]
    loss = result.groups[0].metrics["loss"]
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3]
    assert [int(row["count"]) for row in rows] == [2, 2, 2, 1]
    for name in NAMES:
        known = [float(row[name]) for row in rows if row[name]]
        assert known == loss.values[name].tolist()[: len(known)]
        # one run has no spread
        assert len(known) == (3 if name in ("std", "ci_low", "ci_high") else 4)
        (path,) = (out / "tensorboard" / "logs" / name.replace("_", "-")).iterdir()
        points = read_by_tensorboard(path)["loss"]
        assert [step for step, _, _ in points] == [0, 1, 2, 3][: len(known)]
        assert [np.frombuffer(value)[0] for _, value, _ in points] == pytest.approx(known)
    from pyarrow import parquet

    table = parquet.read_table(out / "curves.parquet").to_pylist()
    assert [{key: "" if value is None else str(value) for key, value in row.items()} for row in table] == rows
    facts = json.loads((out / "aggregate.json").read_text())
    told = facts["groups"][0]["metrics"]["loss"]
    assert (told["step"], told["count"], told["mean"]) == (2, 2, 1.0)
    assert (told["final"]["mean"], told["best"]["mean"]) == (1.0, 0.0)
    assert facts["notes"] == result.notes


def test_older_result_is_replaced_but_other_folders_are_not(tmp_path: Path) -> None:
    result = made(tmp_path, {"a": 3, "b": 2})
    out = tmp_path / "new" / "out"
    aggregate_files.write(result, out)
    (out / "stale").touch()
    aggregate_files.write(result, out)
    assert not (out / "stale").exists()
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").touch()
    with pytest.raises(UserError, match="exists and was not written by `aggregate`: choose another folder"):
        aggregate_files.write(result, tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis"]


def test_failed_write_keeps_the_older_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = made(tmp_path, {"a": 3, "b": 2})
    out = tmp_path / "new" / "out"
    aggregate_files.write(result, out)
    before = sorted(path.name for path in out.rglob("*"))

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(aggregate_files, "_write_events", full)
    with pytest.raises(OSError, match="no space"):
        aggregate_files.write(result, out)
    assert sorted(path.name for path in out.rglob("*")) == before
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_without_pyarrow_csv_is_written_and_parquet_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = made(tmp_path, {"a": 3, "b": 2})
    monkeypatch.setattr(aggregate_files, "has_parquet", lambda: False)
    assert aggregate_files.write(result, tmp_path / "out") == ["curves.csv", "tensorboard/"]
    with pytest.raises(UserError, match=r"--parquet: .* pip install 'mgpu-slurm\[parquet\]'"):
        aggregate_files.check(tmp_path / "out", parquet=True)
