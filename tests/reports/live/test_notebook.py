"""What Jupyter shows of a run is well-formed, whatever the run has reported."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mgpu_slurm import api
from mgpu_slurm.core.files import append_jsonl
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder

NAN, INF = math.nan, math.inf


def run_with(path: Path, reports: list[tuple[int, int, float]], **state: Any) -> RunFolder:
    """Return a run that has ended.

    Args:
        reports: attempt, progress and loss.
    """
    folder = RunFolder(path)
    folder.create_task() if folder.task is not None else folder.create()
    for attempt, progress, loss in reports:
        append_jsonl(folder.metrics, {"progress": progress, "attempt": attempt, "metrics": {"loss": loss}})
    metrics = {"loss": reports[-1][2]} if reports else {}
    records.update_state(folder, state="COMPLETED", metrics=metrics, **state)
    return folder


def shown(folder: RunFolder) -> ElementTree.Element:
    """Return what Jupyter would show, parsed."""
    handle = api.Group(folder) if records.read_state(folder).tasks else api.Handle(folder)
    return ElementTree.fromstring(f"<body>{handle._repr_html_()}</body>")


def lines(found: ElementTree.Element) -> list[list[tuple[float, float]]]:
    """Return the points of each curve."""
    curves = [each.attrib["points"] for each in found.iter() if each.tag.endswith("polyline")]
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in each.split())] for each in curves]


def test_run_is_a_table_and_a_curve(tmp_path: Path) -> None:
    reports = [(1, 1, 1.0), (1, 2, 0.75), (1, 3, 7.0), (2, 3, 0.5)]
    found = shown(run_with(tmp_path / "x", reports, step=9, reason="<b>&"))
    rows = [[cell.text for cell in row] for row in found.iter("tr")]
    assert rows[0] == ["RUN", "STATE", "ATTEMPT", "RANKS", "STEP", "REASON, METRICS"]
    assert rows[1] == ["x", "COMPLETED", "0", "1x1", "9", "<b>&  loss=0.5"]
    # the report that the second attempt has taken back is not drawn
    assert lines(found) == [[(4.0, 4.0), (160.0, 40.0), (316.0, 76.0)]]
    assert found.find("div") is not None
    assert found.find("div").text == "loss: 0.5 to 1"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("losses", "count"),
    [([], 0), ([NAN], 0), ([0.5], 2), ([0.5, 0.5], 2), ([1.0, NAN, INF, 0.5], 2), ([1e308, -1e308], 2)],
)
def test_curve_of_any_values_stays_inside_of_its_frame(losses: list[float], count: int, tmp_path: Path) -> None:
    found = shown(run_with(tmp_path / "x", [(1, place, loss) for place, loss in enumerate(losses, start=1)]))
    points = [point for line in lines(found) for point in line]
    assert len(points) == count
    assert all(0 <= x <= 320 and 0 <= y <= 80 for x, y in points)


def test_long_curve_is_thinned_out_and_keeps_its_ends(tmp_path: Path) -> None:
    found = shown(run_with(tmp_path / "x", [(1, place, float(place)) for place in range(1, 1001)]))
    (line,) = lines(found)
    assert len(line) <= 161
    assert (line[0], line[-1]) == ((4.0, 76.0), (316.0, 4.0))


def test_group_has_a_row_and_a_curve_for_each_run(tmp_path: Path) -> None:
    group = RunFolder(tmp_path / "group")
    group.create()
    records.update_state(group, tasks=2)
    for task in range(2):
        run_with(group.of_task(task).path, [(1, 1, task + 1.0), (1, 2, task + 0.5)])
    found = shown(group)
    assert [row[0].text for row in found.iter("tr")] == ["RUN", "group/0", "group/1", "group"]
    assert len(lines(found)) == 2


def test_sweep_is_one_row(tmp_path: Path) -> None:
    sweep = run_with(tmp_path / "sweep", [], tasks=1)
    sweep.sweep.write_text("{}")
    sweep.summary.write_text(json.dumps({"metric": "loss", "trials": {"COMPLETE": 3}}))
    run_with(sweep.of_task(0).path, [], kind="worker")
    found = ElementTree.fromstring(f"<body>{api.Study(sweep)._repr_html_()}</body>")
    assert [[cell.text for cell in row][:2] for row in found.iter("tr")][1:] == [["sweep", "COMPLETED"]]
