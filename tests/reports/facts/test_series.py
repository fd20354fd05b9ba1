"""The points of a run's metrics, by another reading of the same reports, and where lines are broken."""

from __future__ import annotations

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as some

from mgpu_slurm.reports.aggregation.merging import Curve
from mgpu_slurm.reports.facts import series
from mgpu_slurm.reports.facts.series import Points
from tests.reports.facts.histories import BEGIN, Attempts, attempts, kept, line, lines


def read(folder: Path, *lines: str, spans: list[tuple[float, float]] | None = None) -> Points:
    path = folder / "metrics.jsonl"
    path.write_text("".join(f"{each}\n" for each in lines))
    return series.points(series.read(path), spans or [])


@given(attempts(), some.randoms())
def test_later_attempt_replaces_all_from_its_first_progress_on(history: Attempts, random: Any) -> None:
    expected = kept(history)
    with TemporaryDirectory() as folder:
        found = read(Path(folder), *lines(history, random))
    assert (found.progress, found.step) == ((expected[-1][0], expected[-1][0] * 10) if expected else (0, 0))
    assert set(found.series) == {name for _, metrics in expected for name in metrics}
    for name, each in found.series.items():
        points = [(at, metrics[name]) for at, metrics in expected if name in metrics]
        np.testing.assert_array_equal(each.progress, [at for at, _ in points])
        np.testing.assert_array_equal(each.step, [at * 10 for at, _ in points])
        np.testing.assert_array_equal(each.value, [value for _, value in points])
        np.testing.assert_equal(each.last, points[-1][1])
        finite = [value for _, value in points if math.isfinite(value)]
        assert each.best("minimize") == min(finite, default=None)
        assert each.best("maximize") == max(finite, default=None)


def test_minutes_are_those_at_work(tmp_path: Path) -> None:
    written = [line(at, {"loss": 1.0}, seconds=seconds) for at, seconds in ((1, 60), (2, 120), (3, 700))]
    spans = [(BEGIN + 640, BEGIN + 1000), (BEGIN, BEGIN + 180)]
    assert read(tmp_path, *written, spans=spans).series["loss"].minutes.tolist() == [1.0, 2.0, 4.0]
    assert np.isnan(read(tmp_path, *written).series["loss"].minutes).all()


def test_damaged_lines_are_counted_and_a_torn_last_one_is_not(tmp_path: Path) -> None:
    good = line(1, {"loss": 0.5})
    bad = [
        "",
        "{",
        "[1]",
        "null",
        "{}",
        "\x00\x00",
        json.dumps(json.loads(good) | {"metrics": 3}),
        json.dumps(json.loads(good) | {"metrics": {"loss": "low"}}),
        line(2, {"loss": 1.0}, time="yesterday"),
        line(2, {"loss": 1.0}, attempt=None),
        line(2, {"loss": 1.0}, step="many"),
        line(2, {"loss": 10**400}),
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes("".join(f"{each}\n" for each in [*bad, good]).encode() + b"\xff\xfe\n" + good[:40].encode())
    found = series.points(series.read(path), [])
    assert found.series["loss"].value.tolist() == [0.5]
    assert found.notes == (f"{len(bad) + 1} damaged lines of metrics.jsonl left out",)


def test_run_without_a_file_has_no_points(tmp_path: Path) -> None:
    assert series.points(series.read(tmp_path / "metrics.jsonl"), []) == Points({})


def test_steps_of_event_files_stand_for_progress() -> None:
    curves = {
        "loss": Curve(np.asarray([1, 2**53]), np.asarray([2.0, np.nan])),
        "late": Curve(np.asarray([2**53 + 2]), np.asarray([1.0])),
    }
    found = series.of_curves(curves)
    assert (found.progress, found.step) == (2**53 + 2, 2**53 + 2)
    assert found.series["loss"].progress.tolist() == found.series["loss"].step.tolist() == [1, 2**53]
    assert np.isnan(found.series["loss"].minutes).all()
    assert found.series["loss"].best("minimize") == 2.0
