"""Write the reports of runs as one table, with a row for each report: CSV, or Parquet."""

from __future__ import annotations

import csv
import importlib.util
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import sync_folder
from mgpu_slurm.core.formatting import counted
from mgpu_slurm.request.spec import Spec, read_spec
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Report
from mgpu_slurm.trackers.described import describe
from mgpu_slurm.trackers.settled import Reports

CSV, PARQUET = "csv", "parquet"
TABLES = (CSV, PARQUET)

_NO_PARQUET = "Parquet needs pyarrow, which is not installed: pip install 'mgpu-slurm[parquet]', or use --to csv"

FIXED = ("run", "attempt", "progress", "step", "time")
"""The columns before those of the config (`params.NAME`) and of metrics (`metrics.NAME`)."""


@dataclass(frozen=True)
class Rows:
    """The reports of one run."""

    run: str
    config: dict[str, Any]
    reports: list[Report]


def write(runs: Sequence[RunFolder], form: str, file: Path) -> list[Rows]:
    """Write what runs have reported, and was not taken back by a resume, to a new file; return what was written.

    Raises:
        UserError: the file exists, its folder does not, nothing was reported, or Parquet cannot be written here.
    """
    if form == PARQUET and importlib.util.find_spec("pyarrow") is None:
        raise UserError(f"--to parquet: {_NO_PARQUET}")
    _check_is_new(file)
    found = _read(runs)
    folder = file.absolute().parent
    with tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=folder) as hidden:
        made = Path(hidden, file.name)
        (_write_csv if form == CSV else _write_parquet)(made, found)
        _check_is_new(file)
        os.rename(made, file)
    sync_folder(folder)
    return found


def print_csv(runs: Sequence[RunFolder], file: TextIO) -> None:
    """Write the same table as CSV to an open file.

    Raises:
        UserError: nothing was reported.
    """
    _write_lines(file, _read(runs))


def _read(runs: Sequence[RunFolder]) -> list[Rows]:
    specs = {group: read_spec(group) for group in dict.fromkeys(run.group for run in runs)}
    found = [rows for run in runs if (rows := _rows_of(run, specs[run.group])).reports]
    if not found:
        more = f" and {counted(len(runs) - 1, 'other run')}" if len(runs) > 1 else ""
        raise UserError(f"nothing was reported yet by {runs[0].run if runs else 'any of its runs'}{more}")
    return found


def _check_is_new(file: Path) -> None:
    if os.path.lexists(file):
        raise UserError(f"{str(file)!r} exists: delete it, or choose another name with -o")
    if not file.absolute().parent.is_dir():
        raise UserError(f"{str(file.parent)!r} is no folder: create it first")


def _rows_of(run: RunFolder, spec: Spec) -> Rows:
    reports = Reports(run)
    reports.read()
    return Rows(run.run, dict(describe(run, spec).config), reports.standing)


def _names(runs: Sequence[Rows]) -> tuple[list[str], list[str]]:
    """Return the names of config values and of metrics, in the order in which they appear."""
    params = dict.fromkeys(name for rows in runs for name in rows.config)
    metrics = dict.fromkeys(name for rows in runs for report in rows.reports for name in report.values)
    return list(params), list(metrics)


def _columns(runs: Sequence[Rows]) -> list[str]:
    params, metrics = _names(runs)
    return [*FIXED, *(f"params.{name}" for name in params), *(f"metrics.{name}" for name in metrics)]


def _lines(runs: Sequence[Rows]) -> Iterator[list[Any]]:
    params, metrics = _names(runs)
    for rows in runs:
        own = [rows.config.get(name) for name in params]
        for each in rows.reports:
            values = each.values
            fixed = [rows.run, each.attempt, each.progress, each.step, each.time]
            yield [*fixed, *own, *(values.get(name) for name in metrics)]


def _write_csv(path: Path, runs: Sequence[Rows]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        _write_lines(file, runs)


def _write_lines(file: TextIO, runs: Sequence[Rows]) -> None:
    writer = csv.writer(file)
    writer.writerow(_columns(runs))
    writer.writerows(_lines(runs))


def _write_parquet(path: Path, runs: Sequence[Rows]) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    names = _columns(runs)
    columns = list(zip(*_lines(runs), strict=True))
    arrays = [arrow.array(*_typed(name, column)) for name, column in zip(names, columns, strict=True)]
    parquet.write_table(arrow.Table.from_arrays(arrays, names=names), path)


def _typed(name: str, column: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """Return the values of a column of one type, and that type; values of several types become text."""
    import pyarrow as arrow

    if name.startswith("metrics."):
        return column, arrow.float64()
    kinds = {type(value) for value in column if value is not None}
    if kinds <= {int, float} and float in kinds:
        return column, arrow.float64()
    for kind, type_of in ((bool, arrow.bool_()), (int, arrow.int64()), (str, arrow.string())):
        if kinds <= {kind} and not (kind is int and any(abs(value or 0) >= 1 << 63 for value in column)):
            return column, type_of
    return [None if value is None else str(value) for value in column], arrow.string()
