"""Write aggregated curves: a folder with CSV, Parquet and runs for TensorBoard, whole or not at all."""

from __future__ import annotations

import csv
import importlib.util
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import sync_folder, without_nan, write_json
from mgpu_slurm.metrics import event_writer
from mgpu_slurm.metrics.event_layout import Integers
from mgpu_slurm.reports.aggregation.aggregate import Aggregate, Group
from mgpu_slurm.reports.aggregation.decimation import decimated
from mgpu_slurm.reports.aggregation.statistics import NAMES, Summary
from mgpu_slurm.submission.project.outputs import AGGREGATE, CURVES, PARQUET

TENSORBOARD = "tensorboard"
NO_PARQUET = "Parquet needs pyarrow, which is not installed: pip install 'mgpu-slurm[parquet]'"

MOST_POINTS = 10_000
"""Maximum number of points of a curve for TensorBoard, which shows far fewer; CSV and Parquet have all."""


def has_parquet() -> bool:
    return importlib.util.find_spec("pyarrow") is not None


def check(out: Path | None, parquet: bool | None = None) -> None:
    """Check that the output can be written, before anything is computed.

    Raises:
        UserError: the folder contains something else, or Parquet is requested but cannot be written here.
    """
    if parquet and not has_parquet():
        raise UserError(f"--parquet: {NO_PARQUET}")
    if out is not None and out.exists() and not _may_be_replaced(out):
        raise UserError(f"--out {str(out)!r}: exists and was not written by `aggregate`: choose another folder")


def _may_be_replaced(out: Path) -> bool:
    return out.is_dir() and ((out / AGGREGATE).exists() or not any(out.iterdir()))


def default_folder(result: Aggregate) -> Path:
    """Return a folder in the working directory, named after what was aggregated."""
    places = {run.place for group in result.groups for run in group.runs}
    return Path(f"aggregate-{Path(places.pop()).absolute().name}" if len(places) == 1 else "aggregate")


def write(result: Aggregate, out: Path, parquet: bool | None = None) -> list[str]:
    """Write the folder, replacing an older one; return the names of its contents.

    Args:
        parquet: whether to write Parquet; None writes it if possible.
    """
    check(out, parquet)
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        written = list(_write_into(made, result, has_parquet() if parquet is None else parquet))
        write_json(made / AGGREGATE, without_nan(result.facts))
        # mkdtemp uses mode 0700; the results get the parent folder's permissions
        made.chmod(0o777 & out.parent.stat().st_mode)
        _put_in_place(made, out)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return written


def _put_in_place(made: Path, out: Path) -> None:
    check(out)
    if out.exists():
        old = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
        out.replace(old)
        made.replace(out)
        shutil.rmtree(old)
    else:
        made.replace(out)
    sync_folder(out.parent)


def _write_into(folder: Path, result: Aggregate, parquet: bool) -> Iterator[str]:
    _write_csv(folder / CURVES, result)
    yield CURVES
    if parquet:
        _write_parquet(folder / PARQUET, result)
        yield PARQUET
    for group in result.groups:
        _write_events(folder / TENSORBOARD / group.name, group)
    yield f"{TENSORBOARD}/"


# -- tables


def _write_csv(path: Path, result: Aggregate) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(_columns(result))
        writer.writerows(_rows(result))


def _columns(result: Aggregate) -> list[str]:
    return ["group", "metric", result.on, "count", *NAMES]


def _rows(result: Aggregate) -> Iterator[tuple[Any, ...]]:
    for group in result.groups:
        for metric, summary in group.metrics.items():
            columns = [_cells(name, summary) for name in NAMES]
            rows = zip(summary.steps.tolist(), summary.count.tolist(), *columns, strict=True)
            yield from ((group.name, metric, *row) for row in rows)


def _cells(name: str, summary: Summary) -> list[float | None]:
    """Return a statistic at each step; None, an empty cell, if it is missing."""
    cells: NDArray[np.object_] = summary.values[name].astype(object)
    cells[_is_missing(name, summary.count)] = None
    found: list[float | None] = cells.tolist()
    return found


def _is_missing(name: str, count: Integers) -> NDArray[np.bool_]:
    """Return at which steps a statistic is missing, unlike NaN, which runs reported."""
    missing: NDArray[np.bool_] = count == 1 if name in ("std", "ci_low", "ci_high") else np.zeros(len(count), bool)
    return missing


def _write_parquet(path: Path, result: Aggregate) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    tables = [
        arrow.Table.from_arrays(
            [
                arrow.repeat(group.name, len(summary.steps)),
                arrow.repeat(metric, len(summary.steps)),
                arrow.array(summary.steps),
                arrow.array(summary.count),
                *(arrow.array(summary.values[name], mask=_is_missing(name, summary.count)) for name in NAMES),
            ],
            names=_columns(result),
        )
        for group in result.groups
        for metric, summary in group.metrics.items()
    ]
    parquet.write_table(arrow.concat_tables(tables), path)


# -- TensorBoard


def _write_events(folder: Path, group: Group) -> None:
    """Write a run for each statistic, with the metrics' own names, so that TensorBoard overlays them."""
    now = time.time()
    for name in NAMES:
        below = folder / name.replace("_", "-")
        below.mkdir(parents=True)
        events = [event_writer.first_event(now), *_events(group, name, now)]
        (below / f"{event_writer.PREFIX}{int(now):010d}.{name}").write_bytes(event_writer.encoded(events))


def _events(group: Group, name: str, now: float) -> Iterator[Any]:
    for metric, summary in group.metrics.items():
        is_shown = ~_is_missing(name, summary.count)
        steps, values = summary.steps[is_shown], summary.values[name][is_shown]
        kept = decimated(values, MOST_POINTS)
        for step, value in zip(steps[kept].tolist(), values[kept].tolist(), strict=True):
            yield event_writer.scalar_event(step, metric, value, now)
