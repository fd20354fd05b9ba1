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

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import sync_folder, without_nan, write_json
from mgpu_slurm.reports.aggregation.aggregate import Aggregate, Group
from mgpu_slurm.reports.aggregation.run_sources import MADE_HERE
from mgpu_slurm.reports.aggregation.statistics import NAMES

CSV, PARQUET, TENSORBOARD = "curves.csv", "curves.parquet", "tensorboard"
NO_PARQUET = "Parquet needs pyarrow, which is not installed: pip install 'mgpu-slurm[parquet]'"

_QUEUE = 1000
"""Maximum number of events queued for TensorBoard's writing thread."""


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
    return out.is_dir() and ((out / MADE_HERE).exists() or not any(out.iterdir()))


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
        write_json(made / MADE_HERE, without_nan(result.facts))
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
    _write_csv(folder / CSV, result)
    yield CSV
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
            columns = [summary.values[name].tolist() for name in NAMES]
            for step, count, *values in zip(summary.steps.tolist(), summary.count.tolist(), *columns, strict=True):
                yield (group.name, metric, step, count, *map(_cell, NAMES, values, [count] * len(NAMES)))


def _cell(name: str, value: float, count: int) -> float | None:
    """Return None (an empty cell) for a missing statistic; NaN if runs reported NaN."""
    return None if count == 1 and name in ("std", "ci_low", "ci_high") else value


def _write_parquet(path: Path, result: Aggregate) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    kinds = [arrow.string(), arrow.string(), arrow.int64(), arrow.int64(), *[arrow.float64()] * len(NAMES)]
    schema = arrow.schema(list(zip(_columns(result), kinds, strict=True)))
    columns = list(zip(*_rows(result), strict=True))
    arrays = [arrow.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
    parquet.write_table(arrow.Table.from_arrays(arrays, schema=schema), path)


# -- TensorBoard


def _write_events(folder: Path, group: Group) -> None:
    """Write a run for each statistic, with the metrics' own names, so that TensorBoard overlays them."""
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for name in NAMES:
        writer = EventFileWriter(str(folder / name.replace("_", "-")), max_queue_size=_QUEUE)
        try:
            for event in _events(group, name):
                writer.add_event(event)
        finally:
            writer.close()


def _events(group: Group, name: str) -> Iterator[Any]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary as EventSummary

    now = time.time()
    for metric, summary in group.metrics.items():
        values = summary.values[name].tolist()
        for step, count, value in zip(summary.steps.tolist(), summary.count.tolist(), values, strict=True):
            if _cell(name, value, count) is not None:
                told = EventSummary(value=[EventSummary.Value(tag=metric, simple_value=value)])
                yield Event(wall_time=now, step=step, summary=told)
