"""What commands write into a project on request, and no job reads: reports, charts and aggregated curves.

Exported tables and weights are not among them, because a job may read what was exported for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

GENERATOR = 'name="generator" content="mgpu-slurm"'
"""Attributes of an element in pages and charts, near their beginning."""

AGGREGATE, CURVES, PARQUET = "aggregate.json", "curves.csv", "curves.parquet"
"""Files in a folder of aggregated curves, of which the first two are always there."""

_HEAD_BYTES = 2000
_EVENTS = re.compile(r"events\.out\.tfevents\.\d+.*")
"""Files for TensorBoard, of any program."""


def is_page(file: Path) -> bool:
    """Return whether a file is a report or one of its charts."""
    # a pipe would be waited for
    with suppress(OSError):
        if file.is_file():
            with file.open("rb") as opened:
                return GENERATOR.encode() in opened.read(_HEAD_BYTES)
    return False


def without_outputs(root: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield the names of files below a folder that are not outputs."""
    return (name for name in names if not _is_output(root / name))


def _is_output(file: Path) -> bool:
    if file.name in (AGGREGATE, CURVES, PARQUET):
        return all(os.path.lexists(file.with_name(each)) for each in (AGGREGATE, CURVES))
    return _EVENTS.fullmatch(file.name) is not None or (file.suffix in (".html", ".svg") and is_page(file))
