"""What a run has said, where attempts and writers repeat steps, and where lines or files are broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mgpu_slurm.reports.aggregation.history import History, flattened, read
from mgpu_slurm.reports.aggregation.merging import Curve
from mgpu_slurm.reports.aggregation.run_sources import sources
from tests.metrics.event_files import ended_run, opened, restarted, scalar, write


def points(curve: Curve) -> dict[int, float]:
    return dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))


# -- event files


def only(folder: Path) -> History:
    (history,) = read(sources([str(folder)]), "step")
    return history


def test_newest_event_file_wins_whatever_its_name(tmp_path: Path) -> None:
    # the clocks of two machines: names tell nothing within a second
    old = [opened(10.25), *(scalar("loss", step, 1.0) for step in range(8))]
    new = [opened(10.75), *(scalar("loss", step, 2.0) for step in range(5, 7)), scalar("late", 9, 3.0)]
    write(tmp_path / "run" / "events.out.tfevents.10.b", old)
    write(tmp_path / "run" / "events.out.tfevents.10.a", new)
    curves = only(tmp_path / "run").curves
    assert points(curves["loss"]) == dict.fromkeys(range(5), 1.0) | {5: 2.0, 6: 2.0}
    assert points(curves["late"]) == {9: 3.0}


def test_restart_drops_later_points_even_if_not_written_again(tmp_path: Path) -> None:
    first = [opened(1.0), *(scalar("loss", step, 1.0) for step in range(6)), restarted(4), scalar("loss", 4, 2.0)]
    write(tmp_path / "events.out.tfevents.1.a", [*first, *(scalar("other", step, 0.0) for step in range(6))])
    write(tmp_path / "events.out.tfevents.2.a", [opened(2.0), restarted(3)])
    curves = only(tmp_path).curves
    assert {name: list(points(curve)) for name, curve in curves.items()} == {"loss": [0, 1, 2], "other": [0, 1, 2]}


def test_restart_in_the_middle_of_a_file_drops_points_written_before_it(tmp_path: Path) -> None:
    before = [scalar(tag, step, 1.0) for tag in ("loss", "other") for step in range(6)]
    write(tmp_path / "events.out.tfevents.1.a", [opened(1.0), *before, restarted(4), scalar("loss", 5, 2.0)])
    curves = only(tmp_path).curves
    assert points(curves["loss"]) == dict.fromkeys(range(4), 1.0) | {5: 2.0}
    assert list(points(curves["other"])) == [0, 1, 2, 3]


def test_duplicate_points_of_one_writer_are_noted(tmp_path: Path) -> None:
    write(tmp_path / "events.out.tfevents.1.a", [scalar("loss", 3, 1.0), scalar("loss", 3, 2.0)])
    history = only(tmp_path)
    assert points(history.curves["loss"]) == {3: 2.0}
    assert history.notes == ["1 point superseded by a later one of its writer at the same step"]


def test_damaged_record_is_noted_with_its_file(tmp_path: Path) -> None:
    path = write(tmp_path / "events.out.tfevents.1.a", [scalar("loss", step, 0.5) for step in range(3)])
    broken = bytearray(path.read_bytes())
    broken[len(broken) // 2] ^= 1
    path.write_bytes(bytes(broken))
    history = only(tmp_path)
    assert points(history.curves["loss"]) == {0: 0.5, 2: 0.5}
    assert history.notes == ["1 damaged record of events.out.tfevents.1.a skipped"]


def test_folders_with_event_files_are_runs_except_results_of_aggregate(tmp_path: Path) -> None:
    for name in ("a", "b/version_0", "b/version_1", "mean/tensorboard/x"):
        write(tmp_path / name / "events.out.tfevents.1.h", [scalar("loss", 1, 0.5)])
    (tmp_path / "mean" / "aggregate.json").write_text("{}")
    (tmp_path / "b" / "version_1" / "hparams.yaml").write_text("lr: 0.5\nmodel: {width: 32}\n")
    (tmp_path / "a" / "hparams.yaml").write_text("!!python/object:some.Thing {}\n")
    histories = read(sources([str(tmp_path)]), "step")
    assert [history.name for history in histories] == ["a", "b/version_0", "b/version_1"]
    assert [history.config for history in histories] == [{}, {}, {"lr": 0.5, "model.width": 32}]
    # twice is once
    assert len(sources([str(tmp_path), str(tmp_path / "a")])) == 3
    several = [source.name for source in sources([str(tmp_path / "b"), str(tmp_path / "a")])]
    assert several == ["b/version_0", "b/version_1", "a"]


def test_lines_and_parameters_of_torchs_writer_belong_to_its_run(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for seed in range(2):
        with SummaryWriter(tmp_path / f"run-{seed}") as writer:
            for step in range(3):
                writer.add_scalar("loss", step, step)
                writer.add_scalars("both", {"a": step, "b": -step}, step)
            writer.add_hparams({"lr": 0.5, "seed": seed}, {"hparam/accuracy": 0.25})
    histories = read(sources([str(tmp_path)]), "step")
    assert [(history.name, history.config) for history in histories] == [
        (f"run-{seed}", {"lr": 0.5, "seed": seed}) for seed in range(2)
    ]
    for history in histories:
        assert {*history.curves} == {"loss", "both_a/both", "both_b/both", "hparam/accuracy"}
        assert points(history.curves["both_b/both"]) == {0: 0, 1: -1, 2: -2}


# -- metrics.jsonl


def own(tmp_path: Path, lines: list[Any], **spec: Any) -> Path:
    """A run of ours that has ended, with this said."""
    folder = ended_run(tmp_path / "runs" / "digits", **spec)
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def said(step: int, progress: int, attempt: int, **metrics: float) -> dict[str, Any]:
    return {"progress": progress, "step": step, "time": "", "attempt": attempt, "metrics": metrics}


def test_later_attempt_wins_even_if_the_earlier_one_kept_writing(tmp_path: Path) -> None:
    lines = [said(10 * n, n, 1, loss=1.0) for n in range(1, 5)]
    lines += [said(20, 2, 2, loss=2.0, late=2.0), said(50, 5, 1, loss=1.0, late=1.0), said(30, 3, 2, loss=2.0)]
    folder = own(tmp_path, lines)
    assert points(only(folder).curves["late"]) == {20: 2.0}
    assert points(only(folder).curves["loss"]) == {10: 1.0, 20: 2.0, 30: 2.0}
    (history,) = read(sources([str(folder)]), "progress")
    assert points(history.curves["loss"]) == {1: 1.0, 2: 2.0, 3: 2.0}
    assert (history.name, history.state, history.target) == ("digits", "COMPLETED", "train:train")


def test_broken_lines_are_counted_except_a_torn_last_one(tmp_path: Path) -> None:
    lines = [said(1, 1, 1, loss=float("nan")), '{"progr{"a"\n', "[]\n", said(2, 2, 1, loss=0.5), '{"progress": 3, "st']
    history = only(own(tmp_path, lines))
    assert history.curves["loss"].steps.tolist() == [1, 2]
    assert history.notes == ["2 damaged lines of metrics.jsonl skipped"]


def test_reports_without_steps_are_noted_with_the_option_to_use(tmp_path: Path) -> None:
    history = only(own(tmp_path, [said(0, n, 1, loss=float(n), accuracy=0.5) for n in range(1, 5)]))
    assert points(history.curves["loss"]) == {0: 4.0}
    assert history.notes == ["3 reports superseded by a later one at the same step, --on progress keeps them apart"]


def test_run_without_a_metrics_file_is_read_from_its_event_files(tmp_path: Path) -> None:
    folder = own(tmp_path, [])
    (folder / "metrics.jsonl").unlink()
    write(folder / "tensorboard" / "events.out.tfevents.1.a", [scalar("loss", 3, 1.0)])
    assert points(only(folder).curves["loss"]) == {3: 1.0}
    (history,) = read(sources([str(folder)]), "progress")
    assert (history.curves, history.notes) == ({}, ["its event files have no progress"])


def test_config_of_a_command_comes_from_its_options(tmp_path: Path) -> None:
    command = ["python", "train.py", "--lr", "0.1", "--fast", "--width=32", "model.depth=3", "--seed", "4"]
    history = only(own(tmp_path, [said(1, 1, 1, loss=1.0)], target={"command": command}))
    assert history.target == "python train.py --fast"
    assert history.config == {"lr": "0.1", "width": "32", "model.depth": "3", "seed": "4"}


def test_nested_values_have_dotted_names() -> None:
    assert flattened({"a": {"b": {"c": 1}}, "d": {}, "e": [{"f": 2}]}) == {"a.b.c": 1, "d": {}, "e": [{"f": 2}]}
